# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each creates .venv when there is none and installs the package, compiled core included, into it.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.fusedpg-installed
WORKERS ?= auto
NATIVE := $(shell find csrc CMakeLists.txt setup.py -type f 2>/dev/null)

.PHONY: demo test sweep wide bench parity docs lint format gpu-check clean

demo: $(STAMP)
	$(BIN)/python -m fusedpg demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not sweep and not wide and not gpu" $(ARGS)

# the wide parity and compile matrices
sweep: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "sweep and not gpu" $(ARGS)

# every case of the parity matrix
wide: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "wide and not gpu" $(ARGS)

# on a machine with a GPU, in ten minutes, without network: builds, runs every GPU test and the CUDA benchmarks, and writes
# one report. It takes the Python it is given and makes no environment: make gpu-check PYTHON=python3
gpu-check:
	PYTHONPATH=scripts$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m gpu_check $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m fusedpg bench $(ARGS)

# every preset against its trainer's own code
parity: $(STAMP)
	$(BIN)/python -m fusedpg parity $(ARGS)

# the documentation, into build/docs; a warning is an error
docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc -name '*.h' -o -name '*.cpp')

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find csrc -name '*.h' -o -name '*.cpp')

$(STAMP): pyproject.toml constraints.txt certify-no-deps.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -e ".[dev]"
	$(BIN)/python -m pip install --no-deps -r certify-no-deps.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info python/*.egg-info python/fusedpg/*.so
