#!/usr/bin/env bash
# The image of the trainings: Ray, holdfast, TensorFlow, Fashion-MNIST. It goes into Minikube's nodes, or to a registry.
# After a change, run it and install-ray.sh again: the pods are replaced. From a registry, nodes that have an image of
# this name do not fetch it again: give another tag with IMAGE, to both scripts.
#
#   REGISTRY=registry.example.com/team   push it there instead; install-ray.sh then wants IMAGE=<what is printed>
#   IMAGE=holdfast-parallel-training:2.60.0
#   RAY_IMAGE=rayproject/ray:2.60.0-py312
#   TENSORFLOW=tensorflow-cpu            'tensorflow[and-cuda]' for GPUs
#   DATASETS=dataset-fashion-mnist       packages of Debian or Ubuntu with images; DATASETS=none for none
#   PROFILE=holdfast                     the Minikube
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
no_arguments "$@"

REGISTRY=${REGISTRY:-} RAY_IMAGE=${RAY_IMAGE:-rayproject/ray:2.60.0-py312} TENSORFLOW=${TENSORFLOW:-tensorflow-cpu}
DATASETS=${DATASETS:-dataset-fashion-mnist}
[[ $DATASETS =~ ^[a-z0-9.+\ -]+$ ]] || die "DATASETS=$DATASETS is not accepted: it must be names of packages, or none"
[ "$DATASETS" != none ] || DATASETS=''
if [ -n "$REGISTRY" ]; then need docker; else need docker minikube; fi

with_torch=holdfast-torch:$(tag_of "$IMAGE") with_holdfast=holdfast-ray:$(tag_of "$IMAGE")
say "Ray with torch: $with_torch"
retry 3 docker build --file "$HERE/torch.Dockerfile" --build-arg "RAY_IMAGE=$RAY_IMAGE" --tag "$with_torch" "$HERE" ||
    die "the image of Ray with torch cannot be built"
say "Ray with holdfast: $with_holdfast"
retry 3 docker build --file "$ROOT/deploy/docker/ray.Dockerfile" --build-arg "RAY_IMAGE=$with_torch" \
    --tag "$with_holdfast" "$ROOT" || die "the image of Ray with holdfast cannot be built"
say "with TensorFlow: $IMAGE"
retry 3 docker build --file "$HERE/Dockerfile" --build-arg "BASE=$with_holdfast" --build-arg "TENSORFLOW=$TENSORFLOW" \
    --build-arg "DATASETS=$DATASETS" --tag "$IMAGE" "$HERE" || die "the image with TensorFlow cannot be built"

if [ -n "$REGISTRY" ]; then
    target=${REGISTRY%/}/${IMAGE##*/}
    docker tag "$IMAGE" "$target"
    retry 3 docker push "$target" || die "$target cannot be pushed. Are you logged in? docker login ${REGISTRY%%/*}"
    say "pushed. Next: IMAGE=$target install-ray.sh"
else
    retry 2 minikube image load "$IMAGE" --profile "$PROFILE" ||
        die "the image cannot be loaded into Minikube '$PROFILE'. Does it run? setup-minikube.sh starts it"
    say "loaded into Minikube '$PROFILE'. Next: install-ray.sh"
fi
