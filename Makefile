# Two commands: `make quickstart` trains a fixed-point RNN, `make test` checks the project. Each sets itself up.

ENVIRONMENT := .venv
PYTHON := $(ENVIRONMENT)/bin/python
INSTALL := $(PYTHON) -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
# A Python that starts (a version manager's shim may not), is new enough and can make virtual environments.
USABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
# Bytecode is made of what is imported, at its first import: compiling all of PyTorch at its installation takes longer.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-slow clean

quickstart: $(ENVIRONMENT)/installed
	@echo "Training on the A5 word problem; the curve by length comes at the end."
	$(PYTHON) -m fprnn_lightning fit --config configs/quickstart.yaml

test: $(ENVIRONMENT)/installed-test
	@echo "Checking style, then running the tests (a few minutes)."
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m "not slow" -n auto --maxprocesses 8

test-slow: $(ENVIRONMENT)/installed-test
	@echo "Running the slow tests."
	$(PYTHON) -m pytest -m slow

clean:
	@echo "Removing the virtual environment and caches; logs/ stays."
	rm -rf $(ENVIRONMENT) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find fprnn_lightning tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(ENVIRONMENT)/created:
	@for python in python3 python3.13 python3.12 python3.11; do \
		if $$python -c '$(USABLE)' 2>/dev/null; then \
			echo "Creating a virtual environment in $(ENVIRONMENT) with $$($$python --version)."; \
			$$python -m venv --clear $(ENVIRONMENT) && touch $@; exit; \
		fi; \
	done; \
	echo "error: no usable Python found, 3.11 to 3.13 with the venv module is needed" >&2; exit 1

$(ENVIRONMENT)/installed: pyproject.toml constraints.txt | $(ENVIRONMENT)/created
	@echo "Installing PyTorch, Lightning and this package (a minute or two, once)."
	@$(INSTALL) -e .
	@touch $@

$(ENVIRONMENT)/installed-test: pyproject.toml constraints.txt | $(ENVIRONMENT)/created
	@echo "Installing PyTorch, Lightning, this package and its test tools (a minute or two, once)."
	@$(INSTALL) -e '.[test]'
	@touch $@
