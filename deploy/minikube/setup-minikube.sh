#!/usr/bin/env bash
# A Minikube of 2 nodes with 4 CPUs and 8 GB each, on Docker, with metrics-server. Running it again changes nothing.
#
#   NODES=2 CPUS=4 MEMORY_GB=8    its size
#   GPUS=all                      nodes see the machine's GPUs (needs NVIDIA's container toolkit)
#   CNI=calico                    the network; Calico enforces network policies
#   SHARED=results/shared         a folder of this machine that all nodes share, for checkpoints and results
#   PROFILE=holdfast              its name
#   KUBERNETES_VERSION=           the version; unless set, Minikube's own choice
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
no_arguments "$@"

NODES=${NODES:-2} CPUS=${CPUS:-4} MEMORY_GB=${MEMORY_GB:-8} GPUS=${GPUS:-} CNI=${CNI:-calico}
whole NODES 1
whole CPUS 2
whole MEMORY_GB 2
need docker minikube kubectl

read -r have_cpus have_bytes < <(docker info --format '{{.NCPU}} {{.MemTotal}}') || die "docker info does not answer"
((have_cpus >= CPUS)) ||
    die "docker has $have_cpus CPUs, and a node wants $CPUS. Give docker more, or take smaller nodes: CPUS=$have_cpus"
# A machine that is sold with 16 GB has a little less.
have_gb=$(((have_bytes + 700000000) / 1000000000))
((have_gb >= NODES * MEMORY_GB)) ||
    die "docker has $have_gb GB of memory, and $NODES nodes want $MEMORY_GB GB each. Give docker more, or take smaller" \
        "nodes: MEMORY_GB=$((have_gb / NODES))"

# Pods write here as a user of their own.
SHARED=${SHARED:-$ROOT/results/shared}
mkdir -p "$SHARED"
chmod a+rwx "$SHARED"
SHARED=$(cd "$SHARED" && pwd)

options=(--driver=docker "--nodes=$NODES" "--cpus=$CPUS" "--memory=${MEMORY_GB}g" "--cni=$CNI"
    --mount "--mount-string=$SHARED:/holdfast-results" --wait=all)
[ -z "$GPUS" ] || options+=("--gpus=$GPUS")
[ -z "${KUBERNETES_VERSION:-}" ] || options+=("--kubernetes-version=$KUBERNETES_VERSION")

say "starting $NODES nodes; the first time this takes about 5 minutes"
retry 2 minikube start --profile "$PROFILE" "${options[@]}" ||
    die "Minikube does not start. What it left is removed by cleanup.sh; 'minikube logs --profile $PROFILE' says more"
retry 3 minikube addons enable metrics-server --profile "$PROFILE" || die "metrics-server cannot be switched on"

k wait nodes --all --for=condition=Ready --timeout=300s || die "a node does not get ready: 'kubectl describe nodes' says why"
there=$(k get nodes --no-headers | awk 'END { print NR }')
((there == NODES)) ||
    die "the cluster has $there nodes instead of $NODES: an older one of the same name? cleanup.sh removes it"
k -n kube-system rollout status deployment/metrics-server --timeout=300s ||
    die "metrics-server does not get ready: 'kubectl -n kube-system describe pods -l k8s-app=metrics-server' says why"

say "ready. Next: build-and-push.sh, then install-ray.sh"
