# shellcheck shell=bash
# What the scripts beside this file share. Each of them reads it first.

# shellcheck disable=SC2034 # the scripts use them
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)

PROFILE=${PROFILE:-holdfast}
# The Minikube that setup-minikube.sh makes, and no other cluster, unless it is named.
KUBE_CONTEXT=${KUBE_CONTEXT:-$PROFILE}
NAMESPACE=ray-system
# shellcheck disable=SC2034
CLUSTER=parallel-training
IMAGE=${IMAGE:-holdfast-parallel-training:2.60.0}
RETRY_DELAY_S=${RETRY_DELAY_S:-5}

say() { printf '%s\n' "== $*"; }
warn() { printf '%s\n' "warning: $*" >&2; }
die() {
    printf '%s\n' "error: $*" >&2
    exit 1
}

# The comment at the top of a script is its help.
usage() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"; }

# no_arguments "$@": the scripts are told what to do by variables.
no_arguments() {
    case ${1:-} in
        "") ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            usage >&2
            die "unknown argument: $1"
            ;;
    esac
}

# at_least HAVE WANT: whether a version is new enough.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

minimum_of() {
    case $1 in
        docker) echo 24.0.0 ;;
        minikube) echo 1.32.0 ;;
        kubectl) echo 1.28.0 ;;
        helm) echo 3.12.0 ;;
    esac
}

how_to_get() {
    case $1 in
        docker) echo "https://docs.docker.com/engine/install" ;;
        minikube) echo "https://minikube.sigs.k8s.io/docs/start" ;;
        kubectl) echo "https://kubernetes.io/docs/tasks/tools" ;;
        helm) echo "https://helm.sh/docs/intro/install" ;;
    esac
}

version_of() {
    case $1 in
        docker) docker version --format '{{.Server.Version}}' ;; # of the daemon: it must answer
        minikube) minikube version --short ;;
        kubectl) kubectl version --client ;;
        helm) helm version --short ;;
    esac
}

# need TOOL…: each is there and new enough.
need() {
    local tool text version minimum
    for tool in "$@"; do
        minimum=$(minimum_of "$tool")
        command -v "$tool" >/dev/null 2>&1 ||
            die "$tool is not installed. $tool $minimum or newer is needed: $(how_to_get "$tool")"
        if ! text=$(version_of "$tool" 2>&1); then
            [ "$tool" = docker ] && die "docker does not answer. Is its daemon running, and may you use it? It says: $text"
            die "$tool does not say its version. It says: $text"
        fi
        version=$(printf '%s\n' "$text" | grep -Eo '[0-9]+\.[0-9]+(\.[0-9]+)?' | head -n 1) ||
            die "$tool does not say its version. It says: $text"
        at_least "$version" "$minimum" ||
            die "$tool $version is too old. $tool $minimum or newer is needed: $(how_to_get "$tool")"
        say "$tool $version"
    done
}

# retry TIMES COMMAND…: where a network may fail.
retry() {
    local times=$1 try=1 delay=$RETRY_DELAY_S
    shift
    until "$@"; do
        if ((try >= times)); then
            warn "failed $times times: $*"
            return 1
        fi
        warn "failed, try $((try + 1)) of $times in $delay s: $*"
        sleep "$delay"
        try=$((try + 1)) delay=$((delay * 2))
    done
}

# whole NAME LEAST: the variable of this name is a whole number, and not too small.
whole() {
    local value=${!1}
    if ! [[ $value =~ ^[1-9][0-9]{0,8}$ ]] || ((value < $2)); then
        die "$1=$value is not accepted: it must be a whole number, $2 or more"
    fi
}

k() { kubectl --context "$KUBE_CONTEXT" "$@"; }

reach_cluster() {
    k get --raw /readyz >/dev/null ||
        die "the cluster '$KUBE_CONTEXT' does not answer. Run setup-minikube.sh, or name another one with KUBE_CONTEXT"
}

# repository_of IMAGE, tag_of IMAGE: a registry may have a port, and an image no tag.
repository_of() { case ${1##*/} in *:*) printf '%s\n' "${1%:*}" ;; *) printf '%s\n' "$1" ;; esac; }
tag_of() { case ${1##*/} in *:*) printf '%s\n' "${1##*:}" ;; *) echo latest ;; esac; }

# What install-ray.sh has made is marked by labels of the namespace: it changes, and cleanup.sh removes, nothing else.
is_ours() { # NAMESPACE WHAT
    [ "$(k get namespace "$1" --output "jsonpath={.metadata.labels.holdfast-$2}" 2>/dev/null)" = ours ]
}

# The state of the Ray pods, for the message of what failed.
show_pods() {
    k -n "$NAMESPACE" get pods -o wide >&2 || true
    k -n "$NAMESPACE" get events --field-selector type=Warning --sort-by .lastTimestamp 2>/dev/null | tail -n 10 >&2 || true
}
