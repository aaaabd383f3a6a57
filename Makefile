# Every target works on a fresh clone: the first call makes .venv, later calls reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests and tools must see the packaged fedbench.algorithms, never the folder ./algorithms.
export PYTHONSAFEPATH := 1

.PHONY: run test lint format bench faults clean

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedbench needs Python 3.11 or newer; call make with PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

run: $(VENV)/.installed   ## run the quickstart grid, print its table, draw its plots
	$(BIN)/fedbench run --grid quickstart
	$(BIN)/fedbench table --grid quickstart
	$(BIN)/fedbench plot --grid quickstart

test: $(VENV)/.installed  ## all tests but the benchmarks
	$(BIN)/python -m pytest

lint: $(VENV)/.installed  ## ruff, format check, mypy over engine and plugins together
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy cannot follow the package mapping of pyproject.toml: give it a tree of links that looks installed.
	@rm -rf .typecheck && mkdir -p .typecheck/fedbench
	@for path in $(CURDIR)/fedbench/*; do ln -s $$path .typecheck/fedbench/; done
	@for part in algorithms datasets grids; do ln -s $(CURDIR)/$$part .typecheck/fedbench/$$part; done
	cd .typecheck && ../$(BIN)/mypy --config-file ../pyproject.toml -p fedbench

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed ## speed as a ratio to a minimal loop, in one run
	$(BIN)/python -m pytest tests/bench --benchmark-enable --benchmark-only -s

faults: $(VENV)/.installed ## kills at random moments: 102 jobs, 50 workers, 10 runs
	FEDBENCH_FAULTS_JOBS=102 FEDBENCH_FAULTS_WORKER_KILLS=50 FEDBENCH_FAULTS_RUN_KILLS=10 $(BIN)/python -m pytest tests/integration/test_faults.py -s --timeout 3600

clean:
	rm -rf $(VENV) .typecheck build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
