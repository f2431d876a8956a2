# From a clean clone with nothing but Python 3.10 or newer: `make demo`, `make test`, `make lint`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := samples/model/unused_parameter.py
DEMO_RUN := build/demo

.PHONY: help demo test test-all golden samples gpu no-harm torch-tests frameworks browser chaos lint format readme picture docs docs-schema docs-reports clean
.DEFAULT_GOAL := help

# Tests start some thousands of processes: without compiled modules each would compile them again.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo         install into .venv and examine a faulty sample"
	@echo "make test         run the tests"
	@echo "make test-all     also the tests that take long"
	@echo "make golden       write what checks say in tests anew, after a change of words"
	@echo "make samples      every sample, also those that show a fault in other clothes"
	@echo "make gpu          what to try first on a machine with GPUs"
	@echo "make no-harm      all clean samples with and without the doctor, bit by bit; the doctor broken"
	@echo "make torch-tests  PyTorch's own distributed tests under the probe"
	@echo "make chaos        random faults on random ranks, and how many are named (SEEDS=32)"
	@echo "make frameworks   Lightning, Accelerate, Transformers, torchdata, mpirun, ... for real"
	@echo "make browser      the HTML page in Chromium, which is installed where it is missing"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff rewrite what it can"
	@echo "make readme       write the tables of README and CONTRIBUTING and the index of events"
	@echo "make picture      run the sample of the README and draw its report"
	@echo "make docs         the documentation site, in build/site; no network once it is installed"
	@echo "make clean        remove what the above made, .venv included"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The sources are installed in place: only a change of what is required asks for pip again.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $@

# The sample is broken on purpose: training may fail, finding the fault (exit 3) may not.
demo: $(INSTALLED)
	@rm -rf $(DEMO_RUN) && mkdir -p build
	@echo "ddpdoctor run $(DEMO)    (what training printed: build/demo.txt)"
	@$(BIN)/ddpdoctor run --out $(DEMO_RUN) $(DEMO) >build/demo.txt 2>&1 || true
	@$(BIN)/ddpdoctor report --fail-on error $(DEMO_RUN) || test $$? -eq 3

# Ranks wait for each other much of the time, so three tests at once are of use even on two cores.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
test: $(INSTALLED)
	$(PYTEST)

# Also what takes long: every sample, no-harm, PyTorch's own tests, every function of the probe broken.
# Every Python is started anew, where `make test` forks many from one that has torch imported.
test-all: $(INSTALLED)
	$(PYTEST) --fresh -m "exhaustive or not exhaustive"

# What checks say, word for word, in tests/golden/: read the difference before you commit it.
golden: $(INSTALLED)
	$(PYTEST) --golden -m "not slow"

samples: $(INSTALLED)
	$(PYTEST) --fresh -m "exhaustive or not exhaustive" tests/whole/test_samples.py

# Flight recorders, samples on the device, CUDA graphs, hangs on NCCL (two GPUs), what it costs.
gpu: $(INSTALLED)
	@$(BIN)/python tests/first_hour.py

no-harm: $(INSTALLED)
	$(BIN)/python -m pytest -m exhaustive tests/whole/test_no_harm.py tests/whole/test_fail_open.py

torch-tests: $(INSTALLED)
	$(BIN)/python -m pytest -s -m exhaustive tests/torch_own

# Random faults on random ranks: SEEDS runs of some ten seconds each, and a table of scores.
SEEDS ?= 32
chaos: $(INSTALLED)
	$(BIN)/python tests/chaos.py --seeds $(SEEDS)

frameworks: $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[frameworks,exporters]'
	$(BIN)/python -m pytest -m frameworks tests/frameworks
	$(BIN)/python -m pytest tests/exporters

# Of Debian where there is one, which needs root; else the one that Playwright brings.
browser: $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[browser]'
	command -v chromium >/dev/null || apt-get install -y -qq chromium || $(BIN)/playwright install chromium
	$(BIN)/python -m pytest -m browser tests/browser

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: $(INSTALLED)
	$(BIN)/python tests/readme.py --no-picture

# The picture holds times and the name of the machine, so it changes with every run.
picture: $(INSTALLED)
	$(BIN)/python tests/readme.py

# The tools come from the network once; the site itself is built, and reads, without it.
docs: $(INSTALLED)
	@$(BIN)/python -c "import material" 2>/dev/null || $(BIN)/python -m pip install \
		--disable-pip-version-check -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python docs/make_site.py
	@echo "open build/site/index.html; its search needs a server: python -m http.server -d build/site"

# After a change of what findings.json holds.
docs-schema: $(INSTALLED)
	$(BIN)/python docs/make_site.py --schema

# What is reported about the sample of each check (CHECK="a b" for some), as the site shows it.
docs-reports: $(INSTALLED)
	$(BIN)/python docs/make_site.py --record $(CHECK)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache ddpdoctor-runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
