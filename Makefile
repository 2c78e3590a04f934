# `make demo` and `make test` do all their set-up themselves.

PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := .venv/bin
EXAMPLE := examples/summaries.jsonl

.PHONY: demo test lint clean

demo: .venv/installed
	$(BIN)/diffscore score $(EXAMPLE) -o scored.jsonl --draws 4 --mask-ratios stratified --show 16
	@echo "rows with their scores: scored.jsonl"

test: .venv/tested
	$(BIN)/python -m pytest

lint: .venv/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv .venv

.venv/installed: requirements.txt setup.py pyproject.toml $(wildcard csrc/*) | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

.venv/tested: requirements-dev.txt .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

include mini.mk

clean:
	rm -rf .venv build *.egg-info scored.jsonl*
