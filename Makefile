# Every target makes .venv by itself; PYTHON chooses the interpreter it is made from.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: help demo test test-slow bench lint types format docs clean

help:
	@echo "make demo       train two LoRAs with gradient filters on a small model, draw what the filters let through"
	@echo "make test       every test"
	@echo "make test-slow  the long sets, of which 'make test' runs a sample"
	@echo "make bench      what a filter costs in a training step, as ratios"
	@echo "make lint       ruff; make format repairs layout, make types runs pyright, make docs writes docs/arguments.md"

$(READY): requirements.txt requirements-dev.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements.txt -r requirements-dev.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps open_clip_torch==3.3.0
	@touch $(READY)

demo: $(READY)
	$(RUN) tools/demo.py

test: $(READY)
	$(RUN) -m pytest -q -n 2

test-slow: $(READY)
	$(RUN) -m pytest -q -n 2 -m slow

bench: $(READY)
	$(RUN) tools/bench.py

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)
	$(VENV)/bin/pyright

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(READY)
	$(RUN) tools/write_docs.py

clean:
	rm -rf $(VENV) demo_output
