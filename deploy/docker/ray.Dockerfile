# A Ray image with holdfast in it. From the root of the repository:
#
#   docker build --file deploy/docker/ray.Dockerfile --tag ray-holdfast:2.60.0 .
#
# buildah takes the same options: buildah build --file … --tag … .
#
# The base image must have Python 3.11 or newer and Ray 2.58 or newer. A tag without a Python version is one of an older
# Python. For GPUs: --build-arg RAY_IMAGE=rayproject/ray:2.60.0-py312-gpu

ARG PYTHON_IMAGE=python:3.12-slim
ARG RAY_IMAGE=rayproject/ray:2.60.0-py312

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${RAY_IMAGE}
# What is installed with holdfast. A torch that the base image has already stays as it is.
ARG EXTRAS=ray,s3
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/holdfast-*.whl)[${EXTRAS}]"
# The build fails here if the hook, the config, the constants or the reading of the environment does not work.
RUN --mount=type=bind,source=deploy/docker/prove_ray.py,target=/prove_ray.py \
    python /prove_ray.py
