# The two commands of the README: `make quickstart` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
RERUNS ?= 1
AGAIN := --reruns $(RERUNS) --max-suite-reruns 5 --rerun-show-tracebacks
STAMP := $(VENV)/.installed

# Else every process that is started would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup quickstart test pytest fuzz lint format clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed (PYTHON=... chooses one)") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,postgres]'
	$(BIN)/python deployments/precompile.py
	touch $(STAMP)

quickstart: setup  ## Train SmolLM2-135M with RL on the embedded defaults
	$(BIN)/opentinker models fetch smollm2-135m
	$(BIN)/opentinker train deployments/configs/quickstart.yaml
	@echo 'the commands above are in $(BIN):  source $(BIN)/activate'

test: setup  ## Lint, types, import direction and all tests, side by side
	$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: setup
	$(BIN)/python -m pytest $(AGAIN) -n $(WORKERS)

fuzz: setup  ## 10,000 wrong requests against a live server (CASES, SEED)
	OPENTINKER_FUZZ_CASES=$(or $(CASES),10000) OPENTINKER_FUZZ_SEED=$(or $(SEED),5) \
	$(BIN)/python -m pytest -p no:xdist --timeout 7200 tests/service/test_fuzz.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
