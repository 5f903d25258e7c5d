"""Names that users, manifests and other controllers see."""

from __future__ import annotations

DOMAIN = "holdfast.dev"

CHECKPOINTING = f"{DOMAIN}/checkpointing"
"""Annotation: the block ``spec.checkpointing`` as JSON or YAML, for objects that have no such field."""
PROGRESS = f"{DOMAIN}/training-progress"
"""Annotation: what ``status.trainingProgress`` holds, as JSON, where the status has no such field."""
MANAGED = f"{DOMAIN}/managed"
"""Annotation on a JobSet and label on pods: made safe by the operator; its value is the kind of what asked for it."""
INJECTED = f"{DOMAIN}/injected"
"""Annotation on a Ray pod template: what the operator has put in, so that it can take it out again."""
MANAGER = f"{DOMAIN}/operator"
"""Who wrote a part of ``spec.runtimePatches``, and the field manager of what the operator applies."""

RAY_ENABLED = "ray.io/jit-checkpoint-enabled"
RAY_KILL_WAIT = "ray.io/jit-checkpoint-kill-wait"

TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
TRAINJOB_CRD = f"{TRAINJOBS}.{TRAINER_GROUP}"
JOBSET_GROUP, JOBSET_VERSION, JOBSETS = "jobset.x-k8s.io", "v1alpha2", "jobsets"
JOBSET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
JOB_INDEX_LABEL = "jobset.sigs.k8s.io/job-global-index"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Of a job that Kueue admits."""
CONTAINER = "node"
"""The container, and the replicated job, in which Kubeflow Trainer trains."""

PROGRESS_FILE = "/workspace/training_progress.json"
EXIT_CODE = 143

AUDIENCE = DOMAIN
"""What the token is for that a pod shows when it tells its progress."""
TOKEN_FOLDER = "/var/run/secrets/holdfast.dev"
