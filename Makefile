# Needs Python 3.11 to 3.13 with pip. Each target makes .venv and installs what it lacks by itself.
# Another Python: make test PYTHON=python3.13 VENV=../venv313
#   make train    train a small GPT on four ranks of this machine (ARGS="--steps 100 --verify ...")
#   make test     run the tests that take seconds (ARGS="tests/rules -k layout"): seven minutes on two cores
#   make test-all   run all tests (more than an hour on two cores)
#   make test-clients   train other people's models in every mode, and by their trainers; print the
#                  table (10 to 20 minutes)
#   make test-gpu   the main claims on this machine's GPUs (on its CPU where it has none), with
#                  figures; on a GPU then the table of a small and a large model beside rivals
#                  (TABLES="small llama gpt")
#   make lint     style, layers and types
#   make docs     build the site into site/; a link that leads nowhere is an error
#   make house    what a newcomer of the code meets, in figures (ARGS=-v names the places)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
READY  := $(VENV)/.ready
CLIENTS := $(VENV)/.clients
LOWERING := $(VENV)/gpu-lowering
SITE   := $(VENV)/.site
BIN    := $(VENV)/bin
ARGS   ?=
TABLES ?= small llama

.PHONY: train test test-all test-gpu test-clients house lint style layers types format docs clean
.DEFAULT_GOAL := test

# The pip that is there installs into the new environment: ensurepip, which some systems lack, is
# not needed.
$(READY): pyproject.toml constraints.txt $(wildcard partita/tensor/in_c/*)
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet -c constraints.txt -e '.[dev,train]'
	touch $@

$(CLIENTS): $(READY)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet -c constraints.txt -e '.[clients]'
	touch $@

# Beside the environment: what runs on CPUs is tested without triton.
$(LOWERING): $(READY)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet -c constraints.txt --no-deps \
	  --target $@ triton
	touch $@

$(SITE): $(READY)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet -c constraints.txt -e '.[docs]'
	touch $@

train: $(READY)
	$(BIN)/partita train $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

test-all: $(READY) $(LOWERING)
	$(BIN)/python -m pytest -n 2 $(ARGS)

# Without a network and an environment: by any Python that has torch and pytest. Plugins of pytest
# are not loaded, so that it does not matter which are there.
test-gpu:
	@for python in $(BIN)/python $(PYTHON) python3 ""; do $$python -c "import importlib.util as u; \
	  exit(not all(map(u.find_spec, ('torch', 'pytest'))))" 2>/dev/null && break; done; \
	  test "$$python" || { echo "no Python here has torch and pytest: 'make test' installs them"; \
	  exit 1; }; set -ex; \
	  PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $$python -m pytest tests/gpu tests/believed_gpu $(ARGS); \
	  $$python -c "import torch; exit(not torch.cuda.is_available())" || exit 0; \
	  for model in $(TABLES); do $$python -m partita bench steps --model $$model --rounds 2; done

test-clients: $(CLIENTS)
	$(BIN)/python -m pytest tests/integrations
	$(BIN)/python -m tests.clients.sweep $(ARGS)

house: $(READY)
	$(BIN)/python bench/house.py $(ARGS)

lint: style layers types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

layers: $(READY)
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(BIN)/mkdocs serve"

clean:
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
