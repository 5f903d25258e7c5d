#!/usr/bin/env bash
# Removes the Minikube and all that is in it. Can run at any time, after a set-up that stopped half-way too, and twice.
# Results and checkpoints on this machine stay.
#
#   cleanup.sh                  remove the Minikube
#   cleanup.sh --keep-cluster   remove only what install-ray.sh has installed, and no release or namespace that was there
#                               before it
#
#   PROFILE=holdfast            the Minikube
#   KUBE_CONTEXT=holdfast       with --keep-cluster: the cluster, as kubectl calls it
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
keep_cluster=false
if [ "${1:-}" = --keep-cluster ]; then
    keep_cluster=true
    shift
fi
no_arguments "$@"

there() { command -v "$1" >/dev/null 2>&1; }
left=()

remove_ray() {
    there kubectl || die "kubectl is not installed: $(how_to_get kubectl)"
    reach_cluster
    # KubeRay removes the pods, so it must be there still; the namespace goes at the end where it is ours.
    if k get crd/rayclusters.ray.io >/dev/null 2>&1; then
        k -n "$NAMESPACE" delete "raycluster/$CLUSTER" --ignore-not-found --timeout=180s || left+=("RayCluster $CLUSTER")
        k -n "$NAMESPACE" wait pods --selector "ray.io/cluster=$CLUSTER" --for=delete --timeout=180s || left+=("Ray's pods")
    fi
    k -n "$NAMESPACE" delete --ignore-not-found --timeout=60s service/ray-external service/ray-gcs \
        networkpolicy/ray networkpolicy/ray-head serviceaccount/ray serviceaccount/ray-benchmark role/ray-benchmark \
        rolebinding/ray-benchmark configmap/grafana-parallel-training configmap/grafana-ray ||
        left+=("objects in namespace $NAMESPACE")
    if k get crd/podmonitors.monitoring.coreos.com >/dev/null 2>&1; then
        k -n "$NAMESPACE" delete --ignore-not-found --timeout=60s podmonitor/ray || left+=("Prometheus' PodMonitor")
    fi
    if k get crd/clusterqueues.kueue.x-k8s.io >/dev/null 2>&1; then
        k -n "$NAMESPACE" delete --ignore-not-found --timeout=60s localqueue/trainings clusterqueue/trainings \
            resourceflavor/any-node || left+=("Kueue's queues")
    fi
    if there helm; then
        uninstall prometheus monitoring
        uninstall holdfast-operator holdfast-system
        uninstall kueue kueue-system
        uninstall kuberay-operator "$NAMESPACE"
        for namespace in monitoring holdfast-system kueue-system; do remove_namespace "$namespace"; done
    else
        warn "helm is not installed: what it installed stays"
        left+=("Helm releases")
    fi
    if k -n "$NAMESPACE" get persistentvolumeclaim/parallel-training-results >/dev/null 2>&1; then
        say "the claim parallel-training-results stays: it holds checkpoints and results"
    else
        remove_namespace "$NAMESPACE"
    fi
}

uninstall() { # RELEASE NAMESPACE
    is_ours "$2" "release-$1" || return 0
    if helm status "$1" --kube-context "$KUBE_CONTEXT" --namespace "$2" >/dev/null 2>&1; then
        helm uninstall "$1" --kube-context "$KUBE_CONTEXT" --namespace "$2" --wait --timeout 180s || {
            left+=("release $1")
            return 0
        }
        say "$1 is removed; the kinds of objects that its chart brought stay"
    fi
    k label namespace "$2" "holdfast-release-$1-" || left+=("the mark of release $1")
}

remove_namespace() {
    is_ours "$1" namespace || return 0
    if [ -n "$(there helm && helm list --all --short --kube-context "$KUBE_CONTEXT" --namespace "$1")" ]; then
        say "namespace $1 stays: there are other releases in it"
    else
        k delete "namespace/$1" --ignore-not-found --timeout=120s || left+=("namespace $1")
    fi
}

# What Minikube has made in Docker carries the name of its node: the profile's, and with -m02, -m03 and so on.
remove_from_docker() { # KIND, and the command that removes one
    local label=name.minikube.sigs.k8s.io ids
    of_nodes() { awk -v profile="$PROFILE" '{ node = $2; sub(/-m[0-9]+$/, "", node) } $2 == profile || node == profile { print $1 }'; }
    case $1 in
        containers) ids=$(docker ps --all --filter "label=$label" --format "{{.ID}} {{.Label \"$label\"}}" | of_nodes) ;;
        volumes) ids=$(docker volume ls --filter "label=$label" --format "{{.Name}} {{.Label \"$label\"}}" | of_nodes) ;;
        networks) ids=$(docker network ls --quiet --filter "name=^$PROFILE\$") ;;
    esac || return 1
    [ -n "$ids" ] || return 0
    say "Docker's $1 of '$PROFILE'"
    shift
    # shellcheck disable=SC2086 # one word each
    "$@" $ids
}

remove_minikube() {
    local deleted=true
    if ! there minikube; then
        warn "minikube is not installed: only Docker is looked at"
    elif ! retry 2 minikube delete --profile "$PROFILE"; then
        deleted=false
    fi
    # After a set-up that was killed, containers may be there that Minikube does not know of.
    if there docker; then
        remove_from_docker containers docker rm --force --volumes || left+=("containers of '$PROFILE'")
        remove_from_docker volumes docker volume rm --force || left+=("volumes of '$PROFILE'")
        remove_from_docker networks docker network rm || left+=("the network of '$PROFILE'")
    fi
    $deleted || minikube delete --profile "$PROFILE" || left+=("Minikube '$PROFILE'")
    if there kubectl; then
        kubectl config delete-context "$PROFILE" >/dev/null 2>&1 || true
        kubectl config delete-cluster "$PROFILE" >/dev/null 2>&1 || true
        kubectl config delete-user "$PROFILE" >/dev/null 2>&1 || true
    fi
}

if $keep_cluster; then remove_ray; else remove_minikube; fi
if ((${#left[@]})); then
    die "not all could be removed, see above; what is left: $(printf '%s; ' "${left[@]}")run cleanup.sh again"
fi
say "clean"
