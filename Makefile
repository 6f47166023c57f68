# Two commands to know: `make demo` and `make test`. Both set up .venv first (once).
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-long lint bench reproduce reproduce-full clean

demo: $(STAMP)
	$(BIN)/p2ptrain demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check p2ptrain tests examples benchmarks
	$(BIN)/ruff format --check p2ptrain tests examples benchmarks
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

# The papers' experiments, one after the other; -full repeats the headline ones with three seeds.
reproduce: $(STAMP)
	$(BIN)/p2ptrain reproduce $(ARGS)

reproduce-full: $(STAMP)
	$(BIN)/p2ptrain reproduce --out p2ptrain-reproduction
	$(BIN)/p2ptrain reproduce --headline --seeds 3 --out p2ptrain-reproduction-seeds

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "p2ptrain needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
