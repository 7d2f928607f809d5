# Everything a person runs. `make setup` is implied; VENV=path puts the environment elsewhere.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# Tests train on the CPU, so the CPU build of torch is enough; PIP_TORCH_ARGS may name the index that has it.
TORCH ?= torch==2.13.0
PIP_TORCH_ARGS ?=
MEGATRON ?= megatron-core==0.16.1
JOBS ?= 2
PYTEST_ARGS ?=
ACCEPT_JOBS ?= 2000
ACCEPT_LAYOUTS ?= 5000
ACCEPT_INPUTS ?= 2000
ACCEPT_INSTANCES ?= 1000

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
BASE := $(VENV)/.stamp-base
LIBRARIES := $(VENV)/.stamp-libraries
PACKAGE := $(VENV)/.stamp-package
LINTERS := $(VENV)/.stamp-linters

CYTHON := $(wildcard cython_dp/*.pyx cython_dp/*.pxd)
SOURCES := $(shell find nest_megatron/ cython_dp hydra_plugins conf -name '*.py' -o -name '*.py[xi]' -o -name '*.pxd' -o -name '*.yaml')
PYTEST := $(PY) -m pytest -q

ENV_HYDRA138 := $(or $(NEST_ENV_HYDRA138),.venv-hydra138)
ENV_NEMO := $(or $(NEST_ENV_NEMO),.venv-nemo)
ENV_MEGATRON019 := $(or $(NEST_ENV_MEGATRON019),.venv-megatron019)

.PHONY: help setup demo test test-python test-debug lint accept bench clean env-hydra-1.3.8 env-nemo env-megatron-0.19

help: ## list the targets
	@sed -n 's/^\([a-z][a-z0-9.-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(PACKAGE) ## create the virtual environment and install everything the tests need

$(BASE):
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=25.1'
	@touch $@

$(LIBRARIES): pyproject.toml | $(BASE)
	@$(PIP) $(PIP_TORCH_ARGS) '$(TORCH)'
	@$(PIP) --group test '$(MEGATRON)'
	@touch $@

$(PACKAGE): setup.py $(CYTHON) $(LIBRARIES)
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(LINTERS): pyproject.toml | $(BASE)
	@$(PIP) --group lint
	@touch $@

demo: setup ## plan Llama-3-70B on 64 H100, then plan and train a tiny Llama with 8 processes on this CPU
	@$(PY) scripts/train.py +nest=auto
	@$(PY) scripts/train.py --config-name megatron_llama_tiny +nest=auto +nest.cluster=cpu-node +nest.pin.tp=2 +nest.pin.pp=2

# An optional environment that exists is kept current.
test: setup $(wildcard $(ENV_HYDRA138)/.stamp $(ENV_NEMO)/.stamp $(ENV_MEGATRON019)/.stamp) ## run the tests
	@$(PYTEST) -n $(JOBS) --dist loadgroup -m 'not accept' $(PYTEST_ARGS)

test-python: setup ## run the solver's tests on the slow pure-Python twin
	@NEST_DP_IMPL=python $(PYTEST) tests/dp $(PYTEST_ARGS)

test-debug: setup ## run the solver's tests on a build with bounds checks, then build the fast one again
	@rm $(PACKAGE)
	@NEST_CYTHON_DEBUG=1 $(PIP) --no-build-isolation --no-deps -e .
	@status=0; NEST_DP_IMPL=cython $(PYTEST) tests/dp $(PYTEST_ARGS) || status=$$?; \
	$(MAKE) --no-print-directory setup; exit $$status

lint: setup $(LINTERS) ## check style, types, spelling and metadata
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/codespell
	@$(if $(CYTHON),PATH="$(abspath $(VENV))/bin:$$PATH" cython-lint $(CYTHON))
	@$(VENV)/bin/validate-pyproject pyproject.toml

accept: setup ## run the large random counts and keep their log as evidence
	@mkdir -p docs/evidence
	@$(PY) scripts/accept.py --jobs $(ACCEPT_JOBS) | tee docs/evidence/accept.log
	@$(PY) scripts/oracle_table.py --layouts $(ACCEPT_LAYOUTS) | tee docs/evidence/legality-oracle.log
	@$(PY) scripts/search_oracle.py --instances $(ACCEPT_INSTANCES) | tee docs/evidence/search-oracle.log
	@$(PY) scripts/hostile_inputs.py --inputs $(ACCEPT_INPUTS) | tee docs/evidence/hostile-inputs.log

bench: setup ## time the planner and the solver
	@for script in scripts/bench_*.py; do echo "== $$script"; $(PY) "$$script"; done

# Environments with other versions; the integration tests use those that exist and skip the rest.
env-hydra-1.3.8: $(ENV_HYDRA138)/.stamp ## build .venv-hydra138: hydra-core 1.3.8 and our wheel, no torch

$(ENV_HYDRA138)/.stamp: $(SOURCES) | $(PACKAGE)
	@$(call fresh_env,$(ENV_HYDRA138),hydra-core==1.3.8)

env-nemo: $(ENV_NEMO)/.stamp ## build .venv-nemo: NeMo 3.0.0 (hydra-core 1.3.2) and our wheel, about 1.7 GB

$(ENV_NEMO)/.stamp: $(SOURCES) | $(PACKAGE)
	@$(call fresh_env,$(ENV_NEMO),$(PIP_TORCH_ARGS) '$(TORCH)' 'nemo-toolkit[core]==3.0.0')

# Its wheel asks for Python 3.12 but is built for 3.11 too; the tests set the one name of typing it misses. The
# tests run there from this checkout, so the environment follows the dependencies and not every source file.
env-megatron-0.19: $(ENV_MEGATRON019)/.stamp ## build .venv-megatron019: megatron-core 0.19.2 with megatron.training, about 2 GB

$(ENV_MEGATRON019)/.stamp: pyproject.toml | $(PACKAGE)
	@test -x $(ENV_MEGATRON019)/bin/python || $(PYTHON) -m venv $(ENV_MEGATRON019)
	@$(ENV_MEGATRON019)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --ignore-requires-python megatron-core==0.19.2
	@$(call fresh_env,$(ENV_MEGATRON019),$(PIP_TORCH_ARGS) '$(TORCH)' triton packaging einops)

# $(call fresh_env,folder,requirements): the requirements and a wheel of this checkout in a virtual environment.
define fresh_env
test -x $(1)/bin/python || $(PYTHON) -m venv $(1); \
rm -rf $(1)/dist; \
$(PY) -m build --no-isolation --outdir $(1)/dist . >$(1)/build.log 2>&1 || { cat $(1)/build.log; exit 1; }; \
$(1)/bin/python -m pip install -qq --disable-pip-version-check $(2) $(1)/dist/*.whl; \
$(1)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --force-reinstall $(1)/dist/*.whl; \
touch $@
endef

clean: ## remove build products and caches, keep the environments
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis outputs multirun
	@rm -f cython_dp/*.so cython_dp/*.c $(PACKAGE)
	@find nest_megatron cython_dp hydra_plugins scripts tests -name __pycache__ -prune -exec rm -rf {} +
