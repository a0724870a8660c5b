# Every target explains itself: make help
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
# Of pytest. In the order of collection, which has what takes long first; runs have more processes of their own.
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder
# And two that have what mostly waits, and help after that (tests/conftest.py): in one process that took as long as all
# else in three.
AND_WHAT_WAITS = $(TWO_AT_A_TIME:2=4)
# Else each process of pytest would rewrite and compile all modules of tests anew.
export PYTHONDONTWRITEBYTECODE :=
SOURCES := $(CURDIR):$(CURDIR)/crds:$(CURDIR)/operator:$(CURDIR)/trainer_image

.PHONY: help
help: ## Show this help
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  \033[1m%-14s\033[0m %s\n", $$1, $$2}'

.venv/.installed: requirements/dev.txt pyproject.toml
	tests/setup.sh
	@touch $@

.PHONY: setup
setup: .venv/.installed ## Create .venv with everything development needs, from hash-locked requirements

.PHONY: lock
lock: setup ## Recompute requirements/*.txt from pyproject.toml
	tests/lock.sh

.PHONY: lint
lint: setup ## Check style, formatting and the dependency rule
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports

.PHONY: typecheck
typecheck: setup ## Check types (strict)
	.venv/bin/mypy

.PHONY: quick
quick: setup lint typecheck verify ## Check style, types, generated files and run the unit tests: under three minutes, after every change
	$(PYTHON) -m pytest -q $(TWO_AT_A_TIME) tests/unit

.PHONY: test
test: setup lint verify ## Set everything up and run every test this machine can run
	@$(MAKE) --no-print-directory --jobs=2 --keep-going typecheck pytest

# Types are checked beside it: in a new checkout that takes one processor more than a minute.
.PHONY: pytest
pytest: setup
	$(PYTHON) -m pytest $(AND_WHAT_WAITS)

.PHONY: generate
generate: setup ## Generate CRD, chart CRD and API reference from the models
	$(PYTHON) -m sft_api.generate

.PHONY: verify
verify: setup ## Fail when generated files differ from what is committed
	$(PYTHON) -m sft_api.generate --check

.PHONY: architectures
architectures: setup ## Try every architecture that transformers knows, and write the page that says which are accepted (half a minute)
	PYTHONPATH=$(SOURCES) $(PYTHON) -m tests.architectures

# := is evaluated with this file, before anything is set up. A line with $(MAKE) in it would be run by make -n too.
demo: export SFT_DEMO_BEGAN := $(shell date +%s)
.PHONY: demo
demo: setup ## Set everything up and run the main job: a small model learns which module has a function, and is examined (SEED=1 ...)
	@$(PYTHON) examples/demo.py $(if $(SEED),--seed $(SEED))

.PHONY: parity
parity: setup ## Compare losses, gradients, masks and a killed and resumed run with what they must be
	$(PYTHON) -m tests.parity $(SEED)

.PHONY: parity-megatron
parity-megatron: setup ## Compare the strategy on Megatron-Core with transformers and with FSDP, on the CPU
	PYTHONPATH=$(SOURCES) $(PYTHON) -m tests.megatron

.venv-oldest/.installed: requirements/oldest.txt
	.venv/bin/python -m venv .venv-oldest
	.venv/bin/uv pip sync --quiet --python .venv-oldest/bin/python --require-hashes requirements/oldest.txt
	@touch $@

.PHONY: test-oldest
test-oldest: setup .venv-oldest/.installed ## make parity with the oldest torch and transformers that are supported: before a release
	PYTHONPATH=$(SOURCES) .venv-oldest/bin/python -m tests.parity $(SEED)

# What the API server and its controllers decide differs between their versions; pods run as they always did.
.PHONY: test-kubernetes
test-kubernetes: setup ## The CRD and the operator with the oldest and the newest Kubernetes: before a release (KUBERNETES="1.34.4 1.37.2")
	for version in $(or $(KUBERNETES),1.34.4 1.37.2); do \
		SFT_TEST_KUBERNETES_VERSION=$$version $(PYTHON) -m pytest $(TWO_AT_A_TIME) tests/integration/test_crd.py tests/integration/operator || exit 1; done

# With the Python of a machine, say make gpu PYTHON=python3, nothing is set up: such a machine may have no network.
.PHONY: gpu
gpu: $(if $(filter .venv/bin/python,$(PYTHON)),setup) ## Try every path that needs a GPU, and measure beside a plain loop, in at most 9 minutes (DEVICE=cpu, PYTHON=python3, LOGS=folder, ONLY="checks qwen3_8b_lora", RECORD=1)
	PYTHONPATH=$(SOURCES)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON) -m tests.gpu $(if $(DEVICE),--device $(DEVICE)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ONLY),--only $(ONLY)) $(if $(RECORD),--record) $(if $(LOGS),--logs $(LOGS))

.PHONY: e2e
e2e: setup ## Install the chart on a real node and disturb running jobs in every way (SCENARIOS="pod-lost bad-jobs ..." for some)
	$(PYTHON) -m tests.e2e $(SCENARIOS)

.PHONY: e2e-ray
e2e-ray: setup ## Jobs with compute.launcher: ray on a real node, disturbed in every way, beside one without (SCENARIOS="raylet-killed ...")
	$(PYTHON) -m tests.e2e.on_ray $(SCENARIOS)

.PHONY: e2e-megatron
e2e-megatron: setup ## Jobs with strategy.megatron on a real node, on the CPU, in every layout, disturbed; one has the wrong image (SCENARIOS="stages ...")
	$(PYTHON) -m tests.e2e.on_megatron $(SCENARIOS)

# What stands for the last release until there is one.
BEFORE_UPGRADE ?= 93a58063
.PHONY: e2e-upgrade
e2e-upgrade: setup ## Jobs of an earlier release through helm upgrade to the working tree, and back: before a release (BEFORE_UPGRADE=commit)
	$(PYTHON) -m tests.e2e.on_upgrade $(BEFORE_UPGRADE)

.PHONY: chaos
chaos: setup ## Something at random happens to a job on the real node every 20 to 40 seconds (SEED="1 2 3", MINUTES=5 for each)
	$(PYTHON) -m tests.chaos $(if $(SEED),--seeds $(SEED)) $(if $(MINUTES),--minutes $(MINUTES))

.PHONY: kill-matrix
kill-matrix: setup ## Kills at every phase of a run, an object store that fails in every way, 1,000 turned bytes (SEED=1, CASES="kill-rank0-commit ...", ARGUMENTS=--list)
	$(PYTHON) -m tests.killmatrix $(if $(SEED),--seed $(SEED)) $(ARGUMENTS) $(CASES)

.PHONY: combinations
combinations: setup ## Features of a run in combinations drawn at random, on small models of many families (SEED=1, MINUTES=20, ARGUMENTS="--first 7 --cases 1")
	PYTHONPATH=$(SOURCES) $(PYTHON) -m tests.combinations $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(ARGUMENTS)

.PHONY: e2e-kueue
e2e-kueue: setup ## The operator beside Kueue itself, built once (SCENARIOS="preemption ..." for some)
	$(PYTHON) -m tests.kueue $(SCENARIOS)

.PHONY: soak-informer
soak-informer: setup ## The picture of the cluster under watches that are cut, silent, 410, duplicated, reordered (MINUTES=60)
	$(PYTHON) -m tests.soak.informer $(or $(MINUTES),60)

.venv-bench/.installed: requirements/bench.txt
	$(PYTHON) -m venv .venv-bench
	.venv/bin/uv pip sync --quiet --python .venv-bench/bin/python --require-hashes requirements/bench.txt
	@touch $@

.PHONY: bench
bench: setup .venv-bench/.installed ## Tokens/s beside TRL, time of a checkpoint, cost of a job to the operator: each in its short form
	$(PYTHON) -m tests.bench.trainer .venv-bench/bin/python --steps 5 --sizes 128x4
	$(PYTHON) -m tests.bench.checkpoint --rounds 1
	$(PYTHON) -m tests.bench.operator --parts start --jobs 100 --rates 20

.PHONY: bench-trainer
bench-trainer: setup .venv-bench/.installed ## Tokens/s beside TRL in all its modes, compiled, with adapters, beside a bare loop (ARGUMENTS="--steps 5 --sizes 128x4")
	$(PYTHON) -m tests.bench.trainer .venv-bench/bin/python $(ARGUMENTS)

.PHONY: bench-checkpoint
bench-checkpoint: setup ## What a checkpoint of 100 M parameters costs: stall_ratio, upload_ratio, resume_read_ratio (ARGUMENTS="--rounds 1 --parts stalls ...")
	$(PYTHON) -m tests.bench.checkpoint $(ARGUMENTS)

.PHONY: bench-recovery
bench-recovery: setup ## How long a run is away after a killed worker, a lost pod, a node without power, and what that costs: a quarter of an hour (ARGUMENTS="--minutes 3")
	$(PYTHON) -m tests.bench.recovery $(ARGUMENTS)

.PHONY: bench-before
bench-before: setup ## Tokens/s beside an earlier commit's worktree, in pairs (BEFORE=folder, after make setup there)
	$(PYTHON) -m tests.bench.pairs $(BEFORE) $(REPEATS)

.PHONY: bench-operator
bench-operator: setup ## Cost of jobs to the operator: 300 that come, 1,000 that train, 64,000 pods listed: a quarter of an hour (ARGUMENTS="--jobs 20 ...")
	$(PYTHON) -m tests.bench.operator $(ARGUMENTS)
