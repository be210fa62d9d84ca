# `make help` lists what there is. Everything happens in .venv, made from the project's own files.
# Tests run in WORKERS processes at once, three even on two cores: they also wait, for disks and for
# processes of their own. Those marked `alone` come after the others. WORKERS=0 runs every test in
# one process, for a debugger.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest
# A process that dies ends the run: pytest-xdist would wait for ever for what it had been given.
PARALLEL := --dist loadgroup --max-worker-restart 0 --numprocesses $(WORKERS)
UNMIXED := $(if $(filter output-sync,$(.FEATURES)),--output-sync) # Make before 4.0 cannot
MAY_BE_NONE := || test $$? -eq 5 # pytest ends with 5 where it finds no test, as with ARGS of one file

# Images of containers often set it; tests then compile every module again in each of their processes.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo install install-dev check types docs style test test-full test-targets bench release clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: install ## train on real digits under three parallelisms; DEMO="--quick" passes options on
	@$(BIN)/meshwright demo $(DEMO)

install: $(VENV)/.installed ## the project in a virtual environment

install-dev: $(VENV)/.installed-dev ## the same with what tests and checks need

check: install-dev $(VENV)/.installed-docs ## lint, format, types, the direction of the imports, plain words, and the site
	@$(MAKE) --no-print-directory --jobs 2 $(UNMIXED) types docs style

types: install-dev
	$(BIN)/pyright

style: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/dialect.py

docs: $(VENV)/.installed-docs ## build the documentation into site/; a broken link is an error
	$(BIN)/zensical build --strict

test: install-dev ## the tests that everybody runs
	$(PYTEST) $(PARALLEL) -m "not full and not targets and not alone" $(ARGS) $(MAY_BE_NONE)
	$(PYTEST) $(PARALLEL) -m "alone and not full and not targets" $(ARGS) $(MAY_BE_NONE)

test-full: install-dev ## all tests: long tables and killed processes too
	$(PYTEST) $(PARALLEL) -m "not targets and not alone" $(ARGS) $(MAY_BE_NONE)
	$(PYTEST) $(PARALLEL) -m "alone and not targets" $(ARGS) $(MAY_BE_NONE)

# pytest ends with 5 where it finds no test
test-targets: $(VENV)/.installed-targets ## tests against compilers and browsers that the project does not ship
	@$(PYTEST) $(PARALLEL) -m targets $(ARGS) || { status=$$?; \
	  if [ $$status -eq 5 ]; then echo "No test is marked 'targets' yet."; else exit $$status; fi; }

bench: install ## measure against the peers and print the ratios; BENCH passes options on
	$(BIN)/python benchmarks/run.py $(BENCH)

# The version is that of src/meshwright/__init__.py. Upload with `twine upload dist/*`.
release: $(BIN)/python ## build the wheel and the sdist into dist/, check both, and try the wheel
	rm -rf dist $(VENV)-release
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip --quiet install "build>=1.3" "twine>=6.2"
	$(VENV)-release/bin/python -m build --quiet .
	$(VENV)-release/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear $(VENV)-release
	$(VENV)-release/bin/python -m pip --quiet install dist/*.whl
	cd dist && ../$(VENV)-release/bin/python ../tools/try_wheel.py *.whl *.tar.gz

clean: ## remove the virtual environment and everything that tools left behind
	rm -rf $(VENV) .venv-* .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf build dist runs/demo site .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The virtual environment. The second stamp waits for the first: two pips at once would collide.

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "There is no program $(PYTHON). Install Python 3.11 or newer, or name it: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; ok = sys.version_info >= (3, 11); \
	  ok or sys.exit("Meshwright needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] \
	  + ". Name a newer one: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing Meshwright into $(VENV) ..."
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed
	@echo "Installing what tests and checks need into $(VENV) ..."
	@$(PIP) install --editable ".[dev]"
	@touch $@

$(VENV)/.installed-docs: pyproject.toml $(VENV)/.installed-dev
	@echo "Installing what builds the documentation into $(VENV) ..."
	@$(PIP) install --editable ".[docs]"
	@touch $@

$(VENV)/.installed-targets: pyproject.toml $(VENV)/.installed-dev
	@echo "Installing the TPU compiler, what drives a browser, and clients of servers into $(VENV) ..."
	@$(PIP) install --editable ".[dev,tpu,browser,clients]"
	@command -v chromium > /dev/null || echo "Tests in a browser are left out: apt-get install chromium"
	@touch $@
