#!/usr/bin/env bash
# KubeRay's operator by Helm, and a Ray cluster of 1 head and 2 workers in which trainings are safe from preemption.
# Running it again brings the cluster to what the variables say now; with another image or size, the pods are replaced.
# Prometheus, Kueue and operators that somebody else has installed stay as they are.
#
#   install-ray.sh            install
#   install-ray.sh --render   print the manifests and do nothing
#
#   WORKERS=2 WORKER_CPUS=1 WORKER_MEMORY=3Gi   the workers
#   IMAGE=holdfast-parallel-training:2.60.0     made by build-and-push.sh
#   WITH="claim monitoring"   more of components/: gpu, autoscaling, claim, kueue, monitoring; or a folder of your own
#   KUBERAY=skip              KubeRay is there already
#   KUEUE=skip                Kueue is there already (with WITH=kueue)
#   GRAFANA_URL=              where your browser reaches Grafana (default: port 30300 of Minikube)
#   OPERATOR_IMAGE=           install holdfast's operator too, with this image (deploy/docker/operator.Dockerfile)
#   KUBE_CONTEXT=holdfast     the cluster, as kubectl calls it
#   TIMEOUT_S=600             for the pods to get ready
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
render_only=false
if [ "${1:-}" = --render ]; then
    render_only=true
    shift
fi
no_arguments "$@"

KUBERAY_VERSION=1.6.1 KUEUE_VERSION=0.18.3 PROMETHEUS_VERSION=88.5.3
WORKERS=${WORKERS:-2} WORKER_CPUS=${WORKER_CPUS:-1} WORKER_MEMORY=${WORKER_MEMORY:-3Gi} TIMEOUT_S=${TIMEOUT_S:-600}
WITH=${WITH:-}
whole WORKERS 1
whole WORKER_CPUS 1
whole TIMEOUT_S 1
[[ $WORKER_MEMORY =~ ^[1-9][0-9]*(Mi|Gi)$ ]] ||
    die "WORKER_MEMORY=$WORKER_MEMORY is not accepted: it must be such as 3Gi or 2500Mi"
[[ ${GRAFANA_URL:-http://} =~ ^https?://[A-Za-z0-9.:/_-]*$ ]] ||
    die "GRAFANA_URL=$GRAFANA_URL is not accepted: it must be such as http://localhost:30300"
[[ $IMAGE =~ ^[A-Za-z0-9][A-Za-z0-9._/:@-]*$ ]] || die "IMAGE=$IMAGE is not accepted: it is not the name of an image"

has() { case " $WITH " in *" $1 "*) ;; *) return 1 ;; esac; }

if has kueue && has autoscaling; then
    die "WITH=\"$WITH\" is not accepted: Kueue does not let in a cluster that changes its size; leave out one of the two"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Where a browser finds Grafana: the nodes of Minikube are seen from this machine, where Docker runs on Linux itself.
grafana_url() {
    local ip
    if [ -z "${GRAFANA_URL:-}" ] && [ "$KUBE_CONTEXT" = "$PROFILE" ] && command -v minikube >/dev/null 2>&1; then
        ip=$(minikube ip --profile "$PROFILE" 2>/dev/null) && [ -n "$ip" ] && GRAFANA_URL=http://$ip:30300
    fi
    printf '%s\n' "${GRAFANA_URL:-http://localhost:30300}"
}

# What is in the image that build-and-push.sh has loaded into Minikube: the same name may mean another one now, and pods
# that have the old one must go. Elsewhere it is not known here.
image_id() {
    local id=''
    if [ "$KUBE_CONTEXT" = "$PROFILE" ] && command -v docker >/dev/null 2>&1; then
        id=$(docker image inspect --format '{{.Id}}' "$IMAGE" 2>/dev/null) || id=''
    fi
    if [[ $id =~ ^(sha256:)?[0-9a-f]{64}$ ]]; then printf '%s\n' "$id"; else echo unknown; fi
}

not_a_component() { # PART WHY
    die "WITH: '$1' is not a component: $2; accepted are $(cd "$HERE/components" && echo *), and the path of a folder with" \
        "a kustomization.yaml"
}

# The manifests as one kustomization, in a copy: the components, then the values of the variables.
prepare() {
    local part name number=0 seen=' ' id
    id=$(image_id)
    cp -R "$HERE/base" "$HERE/components" "$work"
    if has monitoring; then
        sed "s|http://localhost:30300|$(grafana_url)|" "$HERE/components/monitoring/kustomization.yaml" \
            >"$work/components/monitoring/kustomization.yaml"
    fi
    {
        printf '%s\n' "apiVersion: kustomize.config.k8s.io/v1beta1" "kind: Kustomization" "resources: [base]" "components:"
        for part in $WITH; do
            case $seen in *" $part "*) continue ;; esac # kustomize would apply its patches twice
            seen="$seen$part "
            name=components/$part
            if [[ $part == */* ]]; then
                # Two folders may have the same name.
                number=$((number + 1)) name=own/$number
                [ -d "$part" ] || not_a_component "$part" "there is no such folder"
                mkdir -p "$work/own"
                cp -R "$part" "$work/$name" || not_a_component "$part" "it cannot be read"
            fi
            [ -f "$work/$name/kustomization.yaml" ] || not_a_component "$part" "it has no kustomization.yaml"
            printf '%s\n' "  - $name"
        done
        # Last, so that they win.
        cat <<YAML
patches:
  - target: {kind: RayCluster, name: $CLUSTER}
    patch: |-
      - {op: replace, path: /spec/headGroupSpec/template/spec/containers/0/image, value: "$IMAGE"}
      - {op: replace, path: /spec/workerGroupSpecs/0/template/spec/containers/0/image, value: "$IMAGE"}
      - {op: replace, path: /spec/headGroupSpec/template/metadata/annotations/parallel-training~1image, value: "$id"}
      - {op: replace, path: /spec/workerGroupSpecs/0/template/metadata/annotations/parallel-training~1image, value: "$id"}
      - {op: replace, path: /spec/workerGroupSpecs/0/replicas, value: $WORKERS}
      - {op: replace, path: /spec/workerGroupSpecs/0/maxReplicas, value: $((WORKERS > 4 ? WORKERS : 4))}
      - {op: replace, path: /spec/workerGroupSpecs/0/template/spec/containers/0/resources/requests/cpu, value: "$WORKER_CPUS"}
      - {op: replace, path: /spec/workerGroupSpecs/0/template/spec/containers/0/resources/limits/cpu, value: "$WORKER_CPUS"}
      - {op: replace, path: /spec/workerGroupSpecs/0/template/spec/containers/0/resources/requests/memory, value: $WORKER_MEMORY}
      - {op: replace, path: /spec/workerGroupSpecs/0/template/spec/containers/0/resources/limits/memory, value: $WORKER_MEMORY}
YAML
    } >"$work/kustomization.yaml"
    kubectl kustomize "$work" >"$work/manifests.yaml" || die "the manifests cannot be put together"
}

if $render_only; then
    need kubectl >&2
    prepare
    cat "$work/manifests.yaml"
    exit 0
fi

make_namespace() {
    k get namespace "$1" >/dev/null 2>&1 || k create -f - <<YAML || die "the namespace $1 cannot be made"
{apiVersion: v1, kind: Namespace, metadata: {name: $1, labels: {holdfast-namespace: ours}}}
YAML
}

install_chart() { # RELEASE CHART NAMESPACE OPTION…
    local release=$1 chart=$2 namespace=$3
    shift 3
    say "$release in namespace $namespace"
    make_namespace "$namespace"
    if ! is_ours "$namespace" "release-$release"; then
        if helm status "$release" --kube-context "$KUBE_CONTEXT" --namespace "$namespace" >/dev/null 2>&1; then
            warn "$release in namespace $namespace was there before: it stays as it is"
            return
        fi
        k label namespace "$namespace" "holdfast-release-$release=ours" || die "the namespace $namespace cannot be marked"
    fi
    retry 3 helm upgrade --install "$release" "$chart" --kube-context "$KUBE_CONTEXT" \
        --namespace "$namespace" --wait --timeout "${TIMEOUT_S}s" "$@" ||
        die "$release cannot be installed with Helm: 'kubectl -n $namespace get pods' may say why"
}

need kubectl helm
reach_cluster
prepare

if [ "${KUBERAY:-}" != skip ]; then
    retry 3 helm repo add --force-update kuberay https://ray-project.github.io/kuberay-helm ||
        die "the Helm repository of KubeRay cannot be reached"
    install_chart kuberay-operator kuberay/kuberay-operator "$NAMESPACE" --version "$KUBERAY_VERSION"
fi
k wait crd/rayclusters.ray.io --for=condition=Established --timeout=60s ||
    die "the cluster does not know RayClusters: KubeRay is not installed. Leave out KUBERAY=skip"
if [ -n "${OPERATOR_IMAGE:-}" ]; then
    install_chart holdfast-operator "$ROOT/deploy/chart" holdfast-system \
        --set "image.repository=$(repository_of "$OPERATOR_IMAGE")" --set "image.tag=$(tag_of "$OPERATOR_IMAGE")"
fi
if has kueue && [ "${KUEUE:-}" != skip ]; then
    install_chart kueue oci://registry.k8s.io/kueue/charts/kueue kueue-system --version "$KUEUE_VERSION"
fi
if has monitoring; then
    retry 3 helm repo add --force-update prometheus-community https://prometheus-community.github.io/helm-charts ||
        die "the Helm repository of Prometheus cannot be reached"
    install_chart prometheus prometheus-community/kube-prometheus-stack monitoring --version "$PROMETHEUS_VERSION" \
        --values "$HERE/components/monitoring/prometheus-values.yaml"
fi

say "the Ray cluster '$CLUSTER' in namespace $NAMESPACE"
make_namespace "$NAMESPACE"
from_cluster() { k -n "$NAMESPACE" get "raycluster/$CLUSTER" --ignore-not-found --output "jsonpath=$1"; }
shape() { from_cluster '{.spec.headGroupSpec}{.spec.workerGroupSpecs[*].template}{.spec.autoscalerOptions}'; }
before=$(shape)
old=$(k -n "$NAMESPACE" get pods --selector "ray.io/cluster=$CLUSTER" --output name)
# Webhooks of what was just installed may not answer yet.
retry 5 k apply --server-side --force-conflicts -f "$work/manifests.yaml" || die "the manifests are not accepted by the cluster"
# KubeRay replaces all pods then. The old ones are called ready while they leave, and its status is a little behind.
if [ -n "$before" ] && [ -n "$old" ] && [ "$before" != "$(shape)" ]; then
    say "the pods are replaced; a training on them is saved first"
    # shellcheck disable=SC2086 # one word each
    k -n "$NAMESPACE" wait $old --for=delete "--timeout=${TIMEOUT_S}s" ||
        die "pods from before the change are still there after $TIMEOUT_S s: delete them, or run cleanup.sh --keep-cluster"
    until=$((SECONDS + TIMEOUT_S))
    while head=$(from_cluster '{.status.head.podName}') && [ -n "$head" ] && [[ $old =~ pod/"$head"($|[[:space:]]) ]]; do
        ((SECONDS < until)) ||
            die "KubeRay still names the old head, $head, after $TIMEOUT_S s: does its operator run? 'kubectl -n" \
                "$NAMESPACE get pods' says it; TIMEOUT_S gives it longer"
        sleep 1
    done
fi
ready() { k -n "$NAMESPACE" wait "raycluster/$CLUSTER" "$@" "--timeout=${TIMEOUT_S}s"; }
# With autoscaling, workers come when there is work.
if ! ready --for=condition=HeadPodReady || { ! has autoscaling &&
    ! ready --for=jsonpath='{.status.readyWorkerReplicas}'="$WORKERS"; }; then
    show_pods
    die "the Ray cluster is not ready after $TIMEOUT_S s. The pods and their events are above; see" \
        "examples/parallel-training/TROUBLESHOOTING.md"
fi
# Ray's dashboard shows graphs of Grafana's by their names, and its head makes the dashboards that have them.
load_graphs() {
    local head dashboards=(default_grafana_dashboard.json train_grafana_dashboard.json) folder=$work/graphs
    head=$(k -n "$NAMESPACE" get pods --selector "ray.io/cluster=$CLUSTER,ray.io/node-type=head" \
        --field-selector status.phase=Running --output jsonpath='{.items[0].metadata.name}') || return 1
    mkdir -p "$folder"
    k -n "$NAMESPACE" exec "$head" -c ray-head -- tar -C /tmp/ray/session_latest/metrics/grafana/dashboards -cf - \
        "${dashboards[@]}" | tar -xf - -C "$folder" || return 1
    cat >"$folder/kustomization.yaml" <<YAML
configMapGenerator:
  - name: grafana-ray
    namespace: $NAMESPACE
    files: [${dashboards[0]}, ${dashboards[1]}]
    options: {disableNameSuffixHash: true, labels: {grafana_dashboard: "1"}}
YAML
    kubectl kustomize "$folder" >"$work/graphs.yaml" && k apply --server-side --force-conflicts -f "$work/graphs.yaml"
}
if has monitoring; then
    say "Ray's own graphs for Grafana"
    retry 3 load_graphs || die "Ray's own graphs cannot be copied from the head to Grafana; all else is ready. Run it again"
fi
say "ready. Dashboard: http://<a node>:30265, client: ray://<a node>:30001. Next: run-benchmark.sh"
