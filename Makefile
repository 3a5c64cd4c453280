# `make demo` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Pins of everything that is installed, torch first: a range would bring gigabytes of CUDA packages.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-slow test-pure attack sanitize lint format docs coverage bench clean

demo: $(VENV)/.demo  ## a real pretrained encoder with other attention against itself, and a short benchmark
	$(BIN)/smyrf demo --output demo

test: $(VENV)/.test  ## all tests but the slow ones, doctests included; a skip that is not expected is a failure
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q --strict-skips

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -q -m slow

attack: $(VENV)/.test  ## fuzzing, misuse, damaged files, kills and full disks: about an hour; docs/reliability.md
	$(BIN)/python -m tests.attack --json benchmarks/results/attack.json

sanitize: $(VENV)/.test  ## the native kernel under address and undefined-behaviour sanitizers, on a small matrix
	PYTHON=$(BIN)/python INSTALL="$(PIP)" .ci/sanitize

test-pure: $(VENV)/.test  ## the core's tests against an installation without the extension
	PYTHON=$(BIN)/python .ci/pure

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*.h csrc/*.cpp

docs: $(VENV)/.docs  ## the site, in site/; a warning is an error
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

coverage: $(VENV)/.test  ## which architectures replace_attention covers: docs/coverage.md
	$(BIN)/python -m tests.zoo

bench: $(VENV)/.demo  ## the paper's two profiling experiments; takes about half an hour
	$(BIN)/smyrf bench --preset batch1 --json benchmarks/results/batch1.json --plot benchmarks/results/batch1
	$(BIN)/smyrf bench --preset fixed-tokens --json benchmarks/results/fixed-tokens.json --plot benchmarks/results/fixed-tokens

$(VENV)/bin/python:
	@echo "creating the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.%: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*) | $(VENV)/bin/python
	@echo "installing smyrf[$*] (a few minutes the first time)"
	@$(PIP) torch
	@$(PIP) --editable ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) demo site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
