# Ray with the CPU build of torch, which holdfast needs and no training here uses: pip by itself would take the one for
# CUDA, which is gigabytes. A torch that the image has already stays as it is. Built by build-and-push.sh.
ARG RAY_IMAGE=rayproject/ray:2.60.0-py312
FROM ${RAY_IMAGE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -c 'import torch' 2>/dev/null || pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch==2.13.0
