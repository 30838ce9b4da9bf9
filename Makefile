# `make run` and `make test` need nothing but python3 (3.10 or later) and, for the tests, Graphviz.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
MYPY := $(BIN)/mypy --no-error-summary
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test check bench spec soak render clean need-dot need-java

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

run: $(STAMP) ## replay a small chat workload, report in out/
	@mkdir -p out
	@$(BIN)/hicache-fsm replay --requests 400 --seed 1 --device-tokens 131072 --staging-tokens 32768 \
	  --report out/replay.html --json out/replay.json

test: need-dot check ## everything that must hold: check, then the tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP) ## lint, types, import layers, fresh documents
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(MYPY)
	@$(BIN)/python -m tests.layers
	@$(BIN)/python -m hicache_fsm.lifecycle.derive --check
	@$(BIN)/python -m hicache_fsm.testing.scenario_docs --check docs/scenarios.md

bench: $(STAMP) ## measure
	@$(BIN)/python -m benchmarks

spec: need-java $(STAMP) ## model checking, graph equality, 500 real lives, proofs: about 5 minutes
	@$(BIN)/python -m spec.run
	@$(BIN)/python -m spec.agreement
	@$(BIN)/python -m spec.witness
	@mkdir -p out
	@$(BIN)/hicache-fsm replay --quiet --requests 500 --seed 2 --device-tokens 131072 --staging-tokens 32768 \
	  --log out/spec.log
	@$(BIN)/hicache-fsm validate out/spec.log
	@$(BIN)/python -m spec.traces out/spec.log
	@$(BIN)/python -m spec.proofs

soak: need-java $(STAMP) ## long campaigns: larger models, all mutants, an hour of fuzzing
	@$(BIN)/python -m spec.run --set soak
	@$(BIN)/python -m spec.agreement MC_retries MC_unpinned MC_one_retract
	@$(BIN)/python -m tests.mutants.run
	@$(BIN)/hicache-fsm fuzz --minutes 60

render: $(STAMP) ## regenerate the documents that are derived from the tables
	@$(BIN)/python -m hicache_fsm.lifecycle.derive --write
	@$(BIN)/python -m hicache_fsm.testing.scenario_docs --write docs/scenarios.md

clean: ## remove everything that these targets have made
	@rm -rf .venv out build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || \
	  { echo "'$(PYTHON)' is not installed: install Python 3.10 or later, or name it with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or later is needed, this is $$($(PYTHON) -V 2>&1): name a newer one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 1; }
	@echo "installing into .venv (once, and again when pyproject.toml or constraints.txt change)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

need-dot:
	@command -v dot >/dev/null || \
	  { echo "the tests draw pictures with 'dot', which is not installed: apt-get install graphviz" >&2; exit 1; }

need-java:
	@command -v java >/dev/null || \
	  { echo "the model checker runs on Java, which is not installed: apt-get install default-jre-headless" >&2; exit 1; }
