# Each target needs only Python 3.10 or later and make: .venv is built from constraints.txt when that changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPUS := $(shell $(PYTHON) -c "import os; print(min(2, os.cpu_count() or 1))")
PLUGINS := $(dir $(wildcard plugins/*/pyproject.toml))
SETUP := pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml)

.PHONY: train test test-full lint bench clean

train: $(VENV)/ready ## train a small Llama on the standard library's sources, two processes
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node $(CPUS) -m femto_core

test: $(VENV)/ready
	$(BIN)/python -m pytest -n $(CPUS) --dist loadfile

test-full: $(VENV)/ready ## the long ones too
	$(BIN)/python -m pytest -m 'slow or not slow'

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(filter-out %.egg-info,$(wildcard femto_* plugins/*/femto_*)) tests examples benchmarks

bench: $(VENV)/ready
	$(BIN)/python -m benchmarks

$(VENV)/ready: $(SETUP)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]' $(PLUGINS:%=--editable ./%)
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
