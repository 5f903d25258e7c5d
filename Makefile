# make demo    a training that is preempted, killed and paused, and ends with the same bits
# make test    all tests (PYTEST_ARGS: more options for pytest)
# make test-cluster   those of them that need a cluster
# make lint    ruff, mypy, import-linter
# make soak    random interruptions of real jobs for MINUTES, then all cases of the tests that make test takes a share of
# make bench   the numbers, against their targets (BENCH_ARGS, such as --quick)
# make benchmark   parallel training: one process against Ray's workers, on a local cluster (EPOCHS, BATCH_SIZE, WORKERS,
#              DATA, IMAGES, PREEMPT_AT; QUICK=1: a few minutes on two cores; RESULTS: the folder; BENCHMARK_ARGS: more)
# make docs    docs/settings.md from the table of settings
# make manifests   deploy/manifests from the Helm chart (HELM: the program)
# make clean   remove what the other targets left, except .venv and results/shared, which Minikube has mounted

PYTHON ?= python3
TORCH ?= torch==2.13.0
MINUTES ?= 10
PYTEST_ARGS ?=
BENCH_ARGS ?=
BENCHMARK_ARGS ?=
RESULTS ?= results
HELM ?= helm
MANIFESTS ?= deploy/manifests

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

# Packages are installed as they are, and compiled when they are imported first. Where Python is told to keep nothing of
# that, each of the many processes here would compile all of torch again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-cluster lint soak bench benchmark docs manifests clean
.DEFAULT_GOAL := test

# A torch that this machine has already is used, whatever its version: it may be the one that fits its accelerator.
# Otherwise torch comes first, so that nothing else decides which build of it is taken.
$(READY): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit("holdfast needs Python 3.11 or newer; name one: make PYTHON=…" \
	    if sys.version_info < (3, 11) else 0)'
	@test -x $(RUN) || if $(PYTHON) -c 'import torch' 2>/dev/null; \
	    then $(PYTHON) -m venv --system-site-packages $(VENV); else $(PYTHON) -m venv $(VENV); fi
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(RUN) -m ensurepip
	@$(RUN) -c 'import torch' 2>/dev/null || { echo "installing $(TORCH)"; $(RUN) -m pip install --quiet --no-compile '$(TORCH)'; }
	@echo "installing holdfast and its tools into $(VENV)"
	@$(RUN) -m pip install --quiet --no-compile --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(RUN) examples/demo/demo.py

# Some need a cluster: HOLDFAST_TEST_KUBECONFIG, or a script that makes one; else they are skipped.
CLUSTER := $(abspath $(wildcard ../shared/kube/cluster))
WITH_CLUSTER := $(if $(CLUSTER),HOLDFAST_TEST_CLUSTER="$${HOLDFAST_TEST_CLUSTER-$(CLUSTER)}")

test: $(READY)
	$(WITH_CLUSTER) $(RUN) tests/run.py $(PYTEST_ARGS)

test-cluster: $(READY)
	$(WITH_CLUSTER) $(RUN) -m pytest --cluster=only $(PYTEST_ARGS)

lint: $(READY)
	$(RUN) -m ruff check --no-cache
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-logo

soak: $(READY)
	$(RUN) -m tests.soak --minutes $(MINUTES)
	$(WITH_CLUSTER) $(RUN) -m pytest --whole -m share $(PYTEST_ARGS)

bench: $(READY)
	$(RUN) benchmarks/run.py $(BENCH_ARGS)

BENCHMARK = examples/parallel-training/benchmark.py
GIVEN = $(if $($(1)),--$(2) '$($(1))')

benchmark: $(READY)
	$(RUN) $(BENCHMARK) --save-path '$(RESULTS)' $(if $(filter-out 0,$(QUICK)),--quick) $(call GIVEN,EPOCHS,epochs) \
	    $(call GIVEN,BATCH_SIZE,batch-size) $(call GIVEN,WORKERS,workers) $(call GIVEN,DATA,data) \
	    $(call GIVEN,IMAGES,images) $(call GIVEN,PREEMPT_AT,preempt-at) $(BENCHMARK_ARGS)

docs: $(READY)
	$(RUN) docs/generate.py

RENDER = $(HELM) template holdfast-operator deploy/chart --namespace holdfast-system --kube-version 1.30.0

manifests:
	@mkdir -p $(MANIFESTS)
	$(RENDER) --no-hooks --set createNamespace=true > $(MANIFESTS)/operator.yaml
	$(RENDER) --show-only templates/uninstall.yaml > $(MANIFESTS)/uninstall.yaml

clean:
	rm -rf build dist demo-out holdfast-runs holdfast-bench-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache examples/parallel-training/results
	test ! -d results || find results -mindepth 1 -maxdepth 1 ! -name shared -exec rm -rf {} +
	rmdir results 2>/dev/null || true
	find src tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
