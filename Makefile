# make train    train a small model on this machine (settings: make train ARGS="train.steps=500 run.name=second")
# make test     what must hold before a change lands: linters, types, tests
# make test-all the same with the tests that take long, marked `full`
# make test-touched BASE=main    the tests, `full` ones too, that changes since BASE may affect
# make test-torch TORCH=2.11.0    the tests with another release of torch and the newest of all else, in an environment of its own
# make release-check    build the wheel and the source archive, install each in a new environment, and use it
# make docs     the docs site in build/site, where every link has a target
# make docs-check    the site in a browser: search, pages on a phone (needs chromium or google-chrome)
# make check    the linters and types alone        make clean    remove what make and the tools have made
#
# Each sets up all it needs in .venv, from Python >= 3.11 alone; a second call finds it ready.
# Another interpreter: make train PYTHON=python3.12

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help train test test-all test-touched test-torch check lint docs docs-check docs-publish release-check clean

VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := pyproject.toml constraints.txt
PYTHON ?=
ARGS ?=
PYTEST_ARGS ?=
# Ranks wait for each other a good part of their time. By files, the longest first (tests/conftest.py): what a file sets
# up is made once, and the workers end together.
WORKERS = --numprocesses 2 --dist loadfile --no-loadscope-reorder
PYTEST = $(BIN)/python -m pytest $(WORKERS)
# Tests start hundreds of processes: compiling the package anew in each would cost a second of processor time.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -11

train: $(VENV)/.ready-to-train
	@$(BIN)/weft train $(ARGS)

test: check
	@echo "==> pytest"
	@$(PYTEST) -m "not full" $(PYTEST_ARGS)

test-all: check
	@echo "==> pytest, all of it"
	@$(PYTEST) $(PYTEST_ARGS)

BASE ?= main

test-touched: check
	@echo "==> pytest, the files that changes since $(BASE) may affect"
	@$(PYTEST) $(PYTEST_ARGS) $$($(BIN)/python tools/touched_tests.py $(BASE))

# A release of torch, such as 2.11.0, and where it lies: TORCH_INDEX=https://download.pytorch.org/whl/cpu spares the
# gigabytes that builds for CUDA bring along.
TORCH ?=
TORCH_INDEX ?=
TORCH_VENV := .venv-torch-$(TORCH)

test-torch:
	@[ -n "$(TORCH)" ] || { echo "error: name the release of torch: make test-torch TORCH=2.11.0" >&2; exit 2; }
	@$(MAKE) --no-print-directory $(TORCH_VENV)/.ready-to-test
	@echo "==> pytest, with torch $(TORCH)"
	@$(TORCH_VENV)/bin/python -m pytest $(WORKERS) -m "not full" $(PYTEST_ARGS)

# The linters and types are those of the torch in constraints.txt, so here they do not run.
.venv-torch-%/.ready-to-test: $(REQUIREMENTS)
	@$(MAKE) --no-print-directory VENV=.venv-torch-$* .venv-torch-$*/bin/python
	@echo "==> installing Weft, torch $* and the tools of development into .venv-torch-$* (once; some minutes)"
	@echo 'torch==$*' > .venv-torch-$*/constraints.txt
	@.venv-torch-$*/bin/python -m pip install -qq --disable-pip-version-check \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	    --constraint .venv-torch-$*/constraints.txt --editable '.[dev,hf]'
	@touch $@

check: $(VENV)/.ready-to-develop
	@echo "==> ruff check";  $(BIN)/ruff check --quiet .
	@echo "==> ruff format"; $(BIN)/ruff format --quiet --check . || { echo "Run: $(BIN)/ruff format ."; exit 1; }
	@echo "==> lint-imports"; $(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@echo "==> pyright";     $(BIN)/pyright --warnings > $(VENV)/pyright.log || { cat $(VENV)/pyright.log; exit 1; }

lint: check

DOCS_VENV := .venv-docs
# mike calls mkdocs, which calls ruff. Material's notice about the next MkDocs is for those who choose versions.
IN_DOCS_VENV = PATH="$(CURDIR)/$(DOCS_VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1
VERSION ?=

docs: $(DOCS_VENV)/.ready
	@$(IN_DOCS_VENV) mkdocs build --quiet
	@echo "==> build/site/index.html"

docs-check: docs
	@$(DOCS_VENV)/bin/python tools/check_site.py

# Adds a version to the branch gh-pages: make docs-publish VERSION=0.2.0
docs-publish: $(DOCS_VENV)/.ready
	@[ -n "$(VERSION)" ] || { echo "error: name the version: make docs-publish VERSION=0.2.0" >&2; exit 2; }
	@$(IN_DOCS_VENV) mike deploy --push --update-aliases $(VERSION) latest
	@$(IN_DOCS_VENV) mike set-default --push --allow-empty latest

$(DOCS_VENV)/.ready: $(REQUIREMENTS)
	@$(MAKE) --no-print-directory VENV=$(DOCS_VENV) $(DOCS_VENV)/bin/python
	@echo "==> installing the tools of the docs site into $(DOCS_VENV) (once)"
	@$(DOCS_VENV)/bin/python -m pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(DOCS_VENV)/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --group docs
	@touch $@

TAG ?=

release-check: $(VENV)/bin/python
	@$(BIN)/python tools/release_check.py $(if $(TAG),--tag $(TAG))

clean:
	rm -rf $(VENV) $(DOCS_VENV) .venv-torch-* .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so an installation that was interrupted is done again.
$(VENV)/.ready-to-train: $(REQUIREMENTS) | $(VENV)/bin/python
	@echo "==> installing Weft and torch into $(VENV) (once; some minutes)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.ready-to-develop: $(REQUIREMENTS) | $(VENV)/bin/python
	@echo "==> installing Weft, torch and the tools of development into $(VENV) (once; some minutes)"
	@$(PIP) --editable '.[dev,hf]'
	@touch $@ $(VENV)/.ready-to-train

$(VENV)/bin/python:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python); do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1; then \
	        echo "==> creating $(VENV) with $$($$python --version)"; \
	        exec $$python -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo "error: no Python >= 3.11 with the venv module is on PATH ($(or $(PYTHON),tried python3 and python3.11 to python3.14))." \
	     "Install one (Debian: apt install python3 python3-venv), or name it: make train PYTHON=/path/to/python3.12" >&2; \
	exit 1
