# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
# `make test-all` runs every test, for before a release: some 20 minutes on 2 cores.
PYTHON ?= python3
# Any torch >= 2.9 works; this is the version that the numbers in the documents were made with.
TORCH ?= torch==2.13.0
MEGATRON ?= megatron-core==0.16.1
# The later megatron-core asks for Python 3.12; its wheel also runs unpacked on 3.11, beside triton.
MEGATRON_LATER ?= megatron-core==0.19.2

VENV := .venv
BIN := $(VENV)/bin
LATER := $(VENV)/megatron-core-later
# Files stay whole, in their order: sorted by their number of tests, the longest would come last.
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: quickstart test test-all lint format docs clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install '$(TORCH)'
	$(PIP) install '$(MEGATRON)' -e '.[megatron,report]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install '$(TORCH)' '$(MEGATRON)' -e '.[dev]' triton
	$(PIP) install --no-deps --ignore-requires-python --upgrade --target $(LATER) --only-binary=:all: --implementation cp \
	    --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
	    '$(MEGATRON_LATER)'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) install -e '.[docs]'
	@touch $@

$(VENV)/.installed-all: $(VENV)/.installed-dev
	$(PIP) install '$(TORCH)' '$(MEGATRON)' -e '.[all]'
	@touch $@

quickstart: $(VENV)/.installed
	$(BIN)/megatron-offload compare --config configs/quickstart.yaml

test: lint
	$(BIN)/python -m pytest --quick $(SPREAD)

test-all: lint $(VENV)/.installed-all
	$(BIN)/python -m pytest $(SPREAD)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, into site/: `python -m http.server -d site` shows it.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) runs site
