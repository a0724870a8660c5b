# Every target explains itself: make help
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
UV := $(shell command -v uv 2>/dev/null || echo .venv/bin/uv)

.PHONY: help
help: ## Show this help
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}'

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

.PHONY: test
test: setup lint typecheck verify ## Set everything up and run every test this machine can run
	$(PYTHON) -m pytest

.PHONY: generate
generate: setup ## Generate CRD, chart CRD and API reference from the models
	$(PYTHON) -m sft_api.generate

.PHONY: verify
verify: setup ## Fail when generated files differ from what is committed
	$(PYTHON) -m sft_api.generate --check
