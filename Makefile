# Every target makes .venv by itself; PYTHON chooses the interpreter it is made from.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: help demo demo-sdxl test test-slow torture kills chains fuzz mutate test-upstream test-oldest test-newest bench bench-filters bench-memory bench-caching lint types
.PHONY: format docs clean

help:
	@echo "make demo       train two LoRAs with gradient filters on a small model, draw what the filters let through"
	@echo "make demo-sdxl  the same for SDXL: a LoRA, and the model itself"
	@echo "make test       every test"
	@echo "make test-slow  the long sets, of which 'make test' runs a sample"
	@echo "make test-oldest, make test-newest   every test with the oldest and the newest versions that front-ends install"
	@echo "make torture    stops, full disks, loss of power and damage at every place of a save; make kills: 300 kills"
	@echo "make fuzz       ten times the generated inputs"
	@echo "make bench      what a filter costs in a training step, as ratios"
	@echo "make bench-filters  what filters cost beside an optimizer's step; FULL=1 for full sizes"
	@echo "make bench-memory  what steps inside the backward pass save"
	@echo "make bench-caching  images per second of latent caching beside a plain loop"
	@echo "make lint       ruff; make format repairs layout, make types runs pyright, make docs writes docs/arguments.md"

$(READY): requirements.txt requirements-dev.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements.txt -r requirements-dev.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps open_clip_torch==3.3.0
	@touch $(READY)

demo: $(READY)
	$(RUN) tools/demo.py

demo-sdxl: $(READY)
	$(RUN) tools/demo.py --family sdxl

test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2

test-slow: $(READY)
	$(RUN) -m pytest -q -n 2 -m slow

# the filter's file on old interpreters and old torch, each in an environment of its own (gigabytes on x86: PyPI's
# older torch wheels bring CUDA along)
UPSTREAM := 3.10=2.4.1 3.11=2.6.0 3.12=2.6.0
test-upstream:
	@for pair in $(UPSTREAM); do \
	  python=$${pair%%=*}; torch=$${pair##*=}; \
	  interpreter=$$(command -v python$$python || ls $$HOME/.pyenv/versions/$$python.*/bin/python 2>/dev/null | tail -n 1); \
	  if [ -z "$$interpreter" ]; then echo "python $$python is not here, skipped"; continue; fi; \
	  folder=build/upstream-$$python-$$torch; \
	  [ -x $$folder/bin/python ] || $$interpreter -m venv $$folder; \
	  $$folder/bin/pip install --quiet --disable-pip-version-check torch==$$torch "numpy<2.3" || exit 1; \
	  $$folder/bin/python tools/check_upstream.py || exit 1; \
	done

# the whole suite with the oldest and the newest versions that front-ends install; TESTS chooses a part of it
OLDEST_PYTHON ?= 3.10
NEWEST_PYTHON ?= 3.13
TESTS ?= tests
find_python = $$(for p in python$(1) $$HOME/.pyenv/versions/$(1).*/bin/python; do $$p -c "" 2>/dev/null && echo $$p; done | head -n 1)
INSTALL := -m pip install --quiet --disable-pip-version-check

build/oldest/.ready: requirements.txt requirements-dev.txt constraints-oldest.txt
	$(call find_python,$(OLDEST_PYTHON)) -m venv build/oldest
	build/oldest/bin/python $(INSTALL) -c constraints-oldest.txt -r requirements.txt -r requirements-dev.txt
	build/oldest/bin/python $(INSTALL) --no-deps open_clip_torch==3.3.0
	@touch $@

build/newest/.ready: requirements.txt requirements-dev.txt
	$(call find_python,$(NEWEST_PYTHON)) -m venv build/newest
	build/newest/bin/python $(INSTALL) --upgrade -r requirements.txt -r requirements-dev.txt
	build/newest/bin/python $(INSTALL) --no-deps open_clip_torch==3.3.0
	@touch $@

test-oldest test-newest: test-%: build/%/.ready
	build/$*/bin/python -m pip list --disable-pip-version-check | grep -E -i "^(torch|diffusers|transformers|accelerate|numpy|safetensors|bitsandbytes) "
	build/$*/bin/python -m pytest -q -n 2 $(TESTS)

torture: $(READY)
	$(RUN) -m pytest -q -p no:xdist -m torture tests/test_torture.py

# 300 kills of runs that are then resumed, in an hour and a half on two cores
kills: $(READY)
	KILLED_RUNS=75 $(RUN) -m pytest -q -p no:xdist -m slow tests/test_kill.py

# 200 runs with random options, each stopped 2 to 5 times
chains: $(READY)
	CHAINS=200 $(RUN) -m pytest -q -n 2 -m slow tests/test_chains.py

fuzz: $(READY)
	FUZZ=10 $(RUN) -m pytest -q -n 2 tests/test_fuzz.py

# whether the tests of the step arithmetic, the parsers and the writer notice faults; survivors are printed
mutate: $(READY)
	$(RUN) tools/mutate.py library/run_plan.py tests/test_run_plan.py
	$(RUN) tools/mutate.py library/key_values.py tests/test_key_values.py
	$(RUN) tools/mutate.py library/files.py tests/test_files.py tests/test_torture.py
	$(RUN) tools/mutate.py library/naming.py tests/test_naming.py

bench: $(READY)
	$(RUN) tools/bench.py

bench-filters: $(READY)
	$(RUN) tools/bench_filters.py $(if $(FULL),--full)

bench-memory: $(READY)
	$(RUN) tools/bench_memory.py

bench-caching: $(READY)
	$(RUN) tools/bench_caching.py

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
	rm -rf $(VENV) demo_output demo_output_sdxl
