# `make` or `make help` lists what there is. Every target does its own set-up, once.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
# A stamp is written when its step is complete: an interrupted one is done again.
STAMPS := $(VENV)/.stamps

# auto: the stock vLLM where there is an NVIDIA GPU, else the CPU build.
ENGINE ?= auto
# Arguments of demo, bench, test, test-fast and soak.
ARGS ?=

.PHONY: help
help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  ARGS='…' is passed on: make demo ARGS=--once, make test-fast ARGS='-k settings'"
	@echo "  PYTHON=… names the interpreter; ENGINE=cpu|gpu overrules what was found"

.PHONY: setup
setup: $(STAMPS)/core $(STAMPS)/engine  ## Make .venv with the gateway, vLLM and the development tools
	@echo "Set up: $(VENV)"

.PHONY: demo
ifneq ($(findstring --engine sim,$(strip $(subst =, ,$(ARGS)))),)
demo: $(STAMPS)/core
else
demo: $(STAMPS)/core $(STAMPS)/engine
endif
demo:  ## An image question through encode, prefill and decode engines, with proofs (ARGS=--once, ARGS='--engine sim')
	@$(PY) -m triptych demo $(ARGS)

.PHONY: test
test: setup lint  ## Everything: lint, types, all tests, those with real vLLM processes too
	$(PY) -m pytest -m "not soak" $(ARGS)

.PHONY: test-fast
test-fast: lint  ## The same without the tests that start vLLM
	$(PY) -m pytest -m "not soak and not vllm" $(ARGS)

.PHONY: lint
lint: $(STAMPS)/core  ## ruff, mypy, and whether generated files are up to date
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) scripts/settings_reference.py --check

.PHONY: format
format: $(STAMPS)/core  ## Let ruff mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

.PHONY: generate
generate: $(STAMPS)/core  ## Write docs/settings.md and the table of flags from the settings model
	$(PY) scripts/settings_reference.py

.PHONY: bench
bench: $(STAMPS)/core $(STAMPS)/peers  ## Benchmarks against other gateways, as ratios of one run
	@command -v nginx > /dev/null || echo "nginx is not installed: no comparison with it"
	$(PY) -m benchmarks $(ARGS)

.PHONY: soak
soak: setup  ## Long runs: soak, fuzz and kill
	$(PY) -m pytest -m soak $(ARGS)

.PHONY: clean
clean:  ## Remove caches and what runs left behind
	rm -rf build dist .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

.PHONY: distclean
distclean: clean  ## clean, and the virtual environment too
	rm -rf $(VENV)

# --- set-up

$(STAMPS)/venv: scripts/venv.sh
	@scripts/venv.sh $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/core: $(STAMPS)/venv pyproject.toml
	@scripts/step.sh "Installing the gateway and the development tools" $(PY) -m pip install -e '.[dev,demo]'
	@touch $@

# Gateways that others wrote, in an environment of their own: they share nothing with ours but the machine.
$(STAMPS)/peers: | $(STAMPS)/venv
	@$(PY) -m venv $(VENV)/peers
	@scripts/step.sh "Installing what the benchmarks compare with" $(VENV)/peers/bin/python -m pip install vllm-router
	@touch $@

$(STAMPS)/engine: scripts/engine.sh src/triptych/engine/install.py | $(STAMPS)/core
	@scripts/engine.sh $(PY) $(ENGINE)
	@touch $@
