# Each target makes its own environment in .venv the first time, and again when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?= -n 2 --dist worksteal

# What `make fuzz` runs; see benchmarks/fuzz/README.md.
SEEDS ?= 0-99
MODE ?= bitwise

.PHONY: demo test lint format fuzz clean

demo: $(INSTALLED)
	$(BIN)/memfit demo

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fuzz.main --seeds $(SEEDS) --mode $(MODE) $(ARGS)

clean:
	rm -rf $(VENV)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
