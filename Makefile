# make demo    set up, run the quickstart sweep, write its report
# make test    set up, run the tests
# make faults  set up, kill processes and machines under real sweeps, fuzz specs (minutes)
# make check   set up, lint, types, import contracts, specs, documentation, code for GPUs
# make newcomer set up, do what docs/first-hour.md and docs/your-question.md say (minutes)
# make docs    set up, build the site: build/site/index.html
# make bench   set up, measure speed side by side (minutes; quote ratios, not seconds)
# make gpu     on a box with a GPU: try what kvlab claims for it, and write reports/gpu/<device>.md
# make clean   remove what these made: .venv, runs and the site

# The first Python 3.11 to 3.14 found; say `make PYTHON=... demo` for another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null \
  && { echo $$p; break; }; done)
BIN := .venv/bin
# kvlab as users install it, and with the tools of its tests and checks, which is twice as large
READY := .venv/.ready
DEV := .venv/.dev

# Not with -o pipefail in .SHELLFLAGS: make 3.81, which macOS has, does not know it.
SHELL := bash

# For the demo Python compiles the modules that it imports; pip would compile all, on one core.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test faults check lint types pages kernels newcomer docs bench gpu clean

setup: $(DEV)

$(DEV): EXTRA := [dev]
# but tests of packages, and models and services that nothing here imports
$(DEV): COMPILE := $(BIN)/python -m compileall -q -j 0 -x \
  '/tests?/|/(transformers/models|peft|nltk|chardet|databricks|ray/(rllib|serve|tune|llm))/' \
  .venv/lib >/dev/null 2>&1 || :

$(READY) $(DEV): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "kvlab needs Python 3.11 to 3.14; none was found"; exit 1; }
	@echo "== setting up .venv with $(PYTHON): two to three minutes, most of them for torch, Ray, MLflow"
	@$(PYTHON) -m venv .venv
	@set -o pipefail; PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check \
	  --progress-bar off --no-compile -c constraints.txt -e ".$(EXTRA)" | { grep --line-buffered -oE \
	  '(Downloading|Using cached|Processing) [^ ]+[.](whl|tar[.]gz)( .*)?$$|^Installing collected packages' || :; }
	@$(COMPILE)
	@touch $(READY) $@
	@echo "== set up"

demo: $(READY)
	@echo "== running sweeps/quickstart.yaml: plan, train, measure, track, report"
	@$(BIN)/kvlab plan sweeps/quickstart.yaml
	@$(BIN)/kvlab submit sweeps/quickstart.yaml --reports runs/reports
	@$(BIN)/python -m tests.compare_results runs/reports/quickstart reports/quickstart

test: $(DEV)
	@echo "== running the tests on every core"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

faults: $(DEV)
	@echo "== killing processes and machines under real sweeps, mutating specs"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m faults -n auto --dist worksteal --timeout 900 \
	  $$(grep -rl --include='test_*.py' 'mark\.faults' tests)

# each for itself, so that make -j has them side by side; the longest first
check: kernels types pages lint

lint: $(DEV)
	@echo "== lint, import contracts, code lines"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.code_size

types: $(DEV)
	@echo "== types"
	@$(BIN)/mypy kvlab

pages: $(DEV)
	@echo "== specs, documentation"
	@$(BIN)/python -m tests.checks

kernels: $(DEV)
	@echo "== compiling for GPUs that need not be here, interpreting their kernels"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda_code -n auto --dist loadfile tests/model

newcomer: $(DEV)
	@echo "== doing what docs/first-hour.md and docs/your-question.md say, with an empty home"
	@$(BIN)/python -m tests.newcomer

docs: $(DEV)
	@$(BIN)/python -c "import furo, myst_parser" 2>/dev/null || \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@$(BIN)/sphinx-build -q -W --keep-going -b html -d build/doctrees -c docs . build/site
	@echo "$(CURDIR)/build/site/index.html"

bench: $(DEV)
	@$(BIN)/python -m tests.performance

# with the Python that is here, if nothing was set up: the box may have torch and no network
gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.studies gpu_page

clean:
	rm -rf .venv runs build docs/generated
