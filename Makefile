# What a target does stands behind its name below; `make` and `make help` print it.

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

.PHONY: help demo test test-rest test-all test-cluster test-extras lint strangers soak bench benchmark docs manifests clean
.DEFAULT_GOAL := help

help: ## this list
	@echo 'make TARGET [VARIABLE=…]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

demo: $(READY) ## a real training run that is preempted, killed and paused, and loses nothing; with a picture
	$(RUN) examples/demo/demo.py

# Some tests need a cluster: HOLDFAST_TEST_KUBECONFIG, or a script that makes one; without, they are skipped.
CLUSTER := $(abspath $(wildcard ../shared/kube/cluster))
WITH_CLUSTER := $(if $(CLUSTER),HOLDFAST_TEST_CLUSTER="$${HOLDFAST_TEST_CLUSTER-$(CLUSTER)}")

test: $(READY) ## every promise and every adapter once, in about ten minutes; PYTEST_ARGS: options, or names of tests
	$(WITH_CLUSTER) $(RUN) tests/run.py --part core $(PYTEST_ARGS)

test-rest: $(READY) ## what make test leaves out
	$(WITH_CLUSTER) $(RUN) tests/run.py --part rest $(PYTEST_ARGS)

test-all: $(READY) ## all tests, those on a cluster and on Slurm included
	$(WITH_CLUSTER) $(RUN) tests/run.py --part all $(PYTEST_ARGS)

test-cluster: $(READY) ## the tests that need a Kubernetes cluster
	$(WITH_CLUSTER) $(RUN) -m pytest --cluster=only $(PYTEST_ARGS)

test-extras: $(READY) ## the wheel, with each extra alone, in an empty environment; EXTRAS: some of them
	$(RUN) -m tests.extras --torch '$(TORCH)' $(EXTRAS)

lint: $(READY) ## ruff, mypy, import-linter
	$(RUN) -m ruff check --no-cache
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-logo

# NAMES: beginnings of names of rows; ARGS: --points, --seed, --verbose, --keep. REPO: a checkout of a repository, with a
# manifest that says what is run: MANIFEST, or the one that is known for it; ARGS also: --table, --page (docs/strangers.md).
strangers: $(READY) ## scripts as others write them: off, on, and interrupted; must be alike
	$(RUN) -m tests.strangers$(if $(REPO),.checkout "$(REPO)" $(if $(MANIFEST),--manifest "$(MANIFEST)")) $(NAMES) $(ARGS)

soak: $(READY) ## MINUTES of random interruptions of real jobs, then every case of every test
	$(RUN) -m tests.soak --minutes $(MINUTES)
	$(WITH_CLUSTER) $(RUN) -m pytest --whole -m share $(PYTEST_ARGS)

bench: $(READY) ## the numbers, against their targets; BENCH_ARGS=--quick
	$(RUN) benchmarks/run.py $(BENCH_ARGS)

BENCHMARK = examples/parallel-training/benchmark.py
GIVEN = $(if $($(1)),--$(2) '$($(1))')

# EPOCHS, BATCH_SIZE, WORKERS, DATA, IMAGES, PREEMPT_AT; RESULTS: the folder; BENCHMARK_ARGS: more options.
benchmark: $(READY) ## parallel training: one process against Ray workers on a local cluster; QUICK=1: a few minutes
	$(RUN) $(BENCHMARK) --save-path '$(RESULTS)' $(if $(filter-out 0,$(QUICK)),--quick) $(call GIVEN,EPOCHS,epochs) \
	    $(call GIVEN,BATCH_SIZE,batch-size) $(call GIVEN,WORKERS,workers) $(call GIVEN,DATA,data) \
	    $(call GIVEN,IMAGES,images) $(call GIVEN,PREEMPT_AT,preempt-at) $(BENCHMARK_ARGS)

docs: $(READY) ## docs/settings.md and docs/versions.md, from the code
	$(RUN) docs/generate.py

RENDER = $(HELM) template holdfast-operator deploy/chart --namespace holdfast-system --kube-version 1.30.0

manifests: ## deploy/manifests, from the Helm chart; HELM: the program
	@mkdir -p $(MANIFESTS)
	$(RENDER) --no-hooks --set createNamespace=true > $(MANIFESTS)/operator.yaml
	$(RENDER) --show-only templates/uninstall.yaml > $(MANIFESTS)/uninstall.yaml

clean: ## remove what the other targets left, except .venv and results/shared, which Minikube has mounted
	rm -rf build dist demo-out holdfast-runs holdfast-bench-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache examples/parallel-training/results
	test ! -d results || find results -mindepth 1 -maxdepth 1 ! -name shared -exec rm -rf {} +
	rmdir results 2>/dev/null || true
	find src tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
