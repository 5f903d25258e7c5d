"""The Kubernetes operator: makes the pods that Kubeflow Trainer, JobSet, Job and KubeRay create safe.

It creates no pods and schedules nothing. Webhooks (:mod:`.admission`) add what a training container needs to objects
as they are created; a controller (:mod:`.controller`) reads the progress of the pods and writes it into the status.
What is done to an object is computed by pure functions (:mod:`.trainjob`, :mod:`.jobset`, :mod:`.ray`).
"""
