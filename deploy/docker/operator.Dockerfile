# The operator's image. From the root of the repository:
#
#   docker build --file deploy/docker/operator.Dockerfile --tag holdfast-operator:0.1.0 .
#
# buildah takes the same options: buildah build --file … --tag … .

ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE}
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/holdfast-*.whl)[kubernetes]"
# All that the operator needs can be imported, as the user that it runs as.
USER 65532:65532
WORKDIR /tmp
RUN python -c "import holdfast.operator.app" && python -m holdfast.operator --help > /dev/null
ENTRYPOINT ["python", "-m", "holdfast.operator"]
CMD ["run"]
