# Two commands do everything on a fresh machine: `make quickstart` and `make test`.

PYTHON ?= python3
# What parity tests compare with. PyPI's build for Linux brings CUDA (gigabytes): an index that has the CPU build spares it,
# make test TORCH_INDEX=https://download.pytorch.org/whl/cpu, and so does a wheel where pip's find-links points.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
VENV := .venv
# Python compiles a module when it is first used; pip would compile them all, most of which are never used: a minute and a half.
PIP := --quiet --no-compile
BIN := $(VENV)/bin
SEED ?= 0
WORKERS := --numprocesses=3 --dist=loadfile --no-loadscope-reorder --durations=15
RUN := runs/quickstart$(if $(filter-out 0,$(SEED)),-seed$(SEED))
# Python keeps what it compiles, which is a third of the time of a short program, wherever this is called from.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart real check test test-all lint docs warm-start sight peers clean

# Trains on the embedded data and prints what improved. SEED=1 for another seed (its own directory).
quickstart: $(VENV)/.installed
	$(BIN)/python -m launch.train --config=configs/quickstart.py --workdir=$(RUN) --config.seed=$(SEED) \
		--resume=auto

# A real language model learns on real questions (benchmarks/real_sample.zip) where to search.
real: $(VENV)/.installed
	$(BIN)/python -m benchmarks.real_data --output=runs/real_data
	$(BIN)/python -m launch.train --config=configs/sources.py --workdir=runs/real$(if $(filter-out 0,$(SEED)),-seed$(SEED)) \
		--config.seed=$(SEED) --resume=auto

# The core in three minutes: rewards, agents, recipes, credit, losses, the engine, the direction of imports.
CORE := $(addprefix tests/,core rewards agents recipes data services evaluation invariants/test_imports.py test_docs.py \
	training/test_config.py training/test_credit.py training/test_metrics.py learning/test_losses.py \
	engine/test_engine.py)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/python -m pytest $(WORKERS) -m "not slow" $(CORE)

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest $(WORKERS) -m "not slow"

# The slow ones too; and XLA compiles as it does for users (tests/conftest.py says how `make test` has it).
test-all: $(VENV)/.installed-dev lint
	XLA_FLAGS= $(BIN)/python -m pytest $(WORKERS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation site, in build/site: open index.html there, with or without a network.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Makes the warm start that ships in the package (about half an hour on two cores).
warm-start: $(VENV)/.installed
	$(BIN)/python -m launch.train --config=configs/atlas_warm_start.py --workdir=runs/atlas_warm_start

# Makes the policy that sees which ships in the package (about 20 minutes on two cores).
sight: $(VENV)/.installed
	$(BIN)/python -m launch.train --config=configs/atlas_sight.py --workdir=runs/atlas_sight

# Not the directory but its pip: Python leaves a .venv without pip where Debian's python3-venv is missing.
$(BIN)/pip:
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('$(PYTHON) is Python %d.%d; routerl_jax needs 3.11 or \
	later. Name one: make PYTHON=python3.12 ...' % sys.version_info[:2])"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.py | $(BIN)/pip
	@echo "installing into $(VENV); this takes some minutes and prints nothing"
	$(BIN)/pip install $(PIP) --editable ".[scann,bm25,serve]"
	touch $@

$(VENV)/.installed-dev: setup.py $(VENV)/.installed
	$(BIN)/pip install $(PIP) $(TORCH) $(addprefix --extra-index-url=,$(TORCH_INDEX))
	$(BIN)/pip install $(PIP) --editable ".[scann,notebooks,dev]"
	touch $@

$(VENV)/.installed-docs: setup.py $(VENV)/.installed
	$(BIN)/pip install $(PIP) --editable ".[scann,docs]"
	touch $@

# google-tunix, which only benchmarks.agentic needs, with the same JAX in a Python of its own.
peers: $(VENV)/.installed-dev
	test -d $(VENV)-peers || $(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/pip install $(PIP) "google-tunix>=0.1.7" $$($(BIN)/pip freeze | grep -E "^(jax|flax)==")

clean:
	rm -rf $(VENV) $(VENV)-peers build *.egg-info
