# make serve   the service; ARGS="--model-path FILE" and RWKV_... variables configure it
# make test    the tests of daily work: five minutes on two cores
# make test-all    all tests, as in CI
# make test-long   all tests with more seeds, soaks and faults: hours
# make mutants   share of a sample of changed expressions that the tests detect: hours
# make coverage    branch coverage of the state pool and of the engine's core: a quarter of an hour
# make lint    formatting, lint and types
# make docs    the site of the documents in build/site; broken links fail
# make cluster-demo   three machines on one: a Ray cluster with the demo model, of which a node is killed
# make install-nvcc   NVIDIA's compiler from pip (serve does it where a card is and no toolkit)
# make install-gpu    that and FlashInfer
# make lock    requirements/*.lock and licences.md from requirements*.txt
# make release   wheels (of any platform, and with compiled kernels), source distribution and SBOM into dist/, after an audit of the dependencies
#
# All install what they need into .venv first, from pinned lists; a second start finds it there.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name) 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
SOURCES := app.py setup.py requirements programs routes rwkv_batch sampling state_pool native test bench demo examples
ARGS ?=
TEST_ARGS ?=
WORKERS ?= $$(($$(nproc) + 2))

.PHONY: serve test test-all test-long mutants coverage cluster-demo lint docs screenshots format install install-dev install-gpu install-nvcc lock release audit clean

serve: $(VENV)/.installed
	@$(BIN)/python -m native.nvcc
	exec $(BIN)/python app.py $(ARGS)

# More workers than cores, because tests also wait.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
test: $(VENV)/.installed-dev
	$(PYTEST) -m "not (slow or browser or cluster or proxy or gpu)" $(TEST_ARGS)

test-all: $(VENV)/.installed-dev
	$(PYTEST) $(TEST_ARGS)

test-long: export RWKV_LONG_TESTS = 1
test-long: test-all

# A sample of MUTANTS. The first call only makes them and notes which tests call which function: its pattern fits none.
MUTANTS ?= 500
mutants: $(VENV)/.installed-dev
	-$(BIN)/mutmut run none
	$(BIN)/mutmut results --all true | cut -d: -f1 | shuf -n $(MUTANTS) | xargs $(BIN)/mutmut run
	$(BIN)/mutmut results

# The nearest tests, and those of other folders that execute more. The simulation's threads are greenlets.
COVERAGE = $(subst $(BIN)/python,$(BIN)/coverage run,$(PYTEST)) -m "not (browser or proxy or gpu)" $(TEST_ARGS)
coverage: $(VENV)/.installed-dev
	$(BIN)/coverage erase
	-$(COVERAGE) test/state_pool test/engine test/programs/test_backup.py test/programs/serve/test_tunings.py \
	  test/routes/test_http_states.py test/routes/test_http_session_files.py
	-$(COVERAGE:run=run --concurrency=thread,greenlet) test/simulation
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

cluster-demo: $(VENV)/.installed-cluster
	$(BIN)/python -m test.cluster_demo $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pictures in docs/images are the screenshots of the browser tests.
screenshots: $(VENV)/.installed-dev
	RWKV_SCREENSHOTS=build/screenshots $(BIN)/python -m pytest -q --timeout 1800 test/routes/web \
	  -k "branches or many_rows or edited_by_keyboard or published or shows_the_metrics or first_paint"
	cd build/screenshots && cp chat.png batch.png translate.png tune.png dashboard.png ../../docs/images/

format: $(VENV)/.installed-dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev
install-nvcc: $(VENV)/.installed
	$(BIN)/pip install --disable-pip-version-check -r requirements-nvcc.txt
install-gpu: $(VENV)/.installed
	$(BIN)/pip install --disable-pip-version-check -r requirements-gpu.txt

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python found; install Python 3.11, 3.12 or 3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "error: $(PYTHON) is not Python 3.11..3.13; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q 'pip>=23.3'  # an older one compares tags of wheels for a minute

$(VENV)/.installed: requirements.txt | $(BIN)/python
	@echo "installing packages into $(VENV); this takes a minute"
	$(BIN)/pip install --disable-pip-version-check -q -r requirements.txt
	touch $@

$(VENV)/.installed-dev: requirements-dev.txt requirements-nvcc.txt requirements-cluster.txt requirements.txt | $(BIN)/python
	$(BIN)/pip install --disable-pip-version-check -q --no-compile -r requirements-dev.txt  # most is never imported
	touch $@ $(VENV)/.installed

$(VENV)/.installed-cluster: requirements-cluster.txt requirements.txt | $(BIN)/python
	$(BIN)/pip install --disable-pip-version-check -q -r requirements-cluster.txt
	touch $@ $(VENV)/.installed

# The tools of a release, in an environment of their own, each with its hash.
RELEASE := .build/release
$(RELEASE)/.installed: requirements/release.lock | $(BIN)/python
	$(BIN)/python -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --disable-pip-version-check -q --require-hashes -r requirements/release.lock
	touch $@

lock: $(RELEASE)/.installed
	PATH="$(CURDIR)/$(RELEASE)/bin:$$PATH" $(RELEASE)/bin/python requirements/lock.py

audit: $(RELEASE)/.installed
	$(RELEASE)/bin/pip-audit --strict --progress-spinner off --disable-pip -r requirements/gpu.lock -r requirements/cluster.lock
	$(RELEASE)/bin/hadolint deploy/Dockerfile

release: audit $(VENV)/.installed
	$(BIN)/python -m requirements.prebuild build/prebuilt
	PATH="$(CURDIR)/$(RELEASE)/bin:$$PATH" $(RELEASE)/bin/python requirements/release.py build/prebuilt \
	  requirements/cpu.lock requirements/gpu.lock

clean:
	rm -rf $(VENV) .build dist build .mypy_cache .ruff_cache .pytest_cache
