# make demo | test | unit | docs | test-long | test-torch | mutants | matrix | chaos | validation | lint | venv | ... | clean
# PYTHON=python3.12 chooses the Python, TORCH_INDEX=https://... where torch comes from, VENV=folder the environment.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
TORCH_RELEASES ?= 2.11.0 2.15.0
TORCH_TESTS ?= tests/unit tests/commands tests/fake_ranks tests/ranks
BIN := $(VENV)/bin
DEMO_EXTRAS := train,hf,report
TEST_EXTRAS := train,hf,parquet,report,pandas,tensorboard,torchao,dev

# One thread per process: ranks with several threads each fight over the cores.
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes: without bytecode on disk each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# Files in the order of their folders: those that start ranks first, the many short ones of tests/unit to fill the end.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

.PHONY: help demo docs test unit test-long test-torch mutants matrix chaos validation lint venv venv-demo python constraints transcript clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

demo: venv-demo ## the story of one job, from plan to export: minutes, all in .demo/ (DEMO=full adds 16,384 GPUs)
	@$(BIN)/python examples/demo.py

docs: python ## build the site of the documentation into build/site; dead links fail
	@$(PYTHON) .ci/install.py $(VENV) docs --torch-index "$(TORCH_INDEX)"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "open build/site/index.html"

unit: venv ## the tests of one process that take less than half a second each
	@$(BIN)/pytest $(PARALLEL) -m "not long and not slow" tests/unit tests/architecture

test: venv ## the quick tests
	@$(BIN)/pytest $(PARALLEL) -m "not long"

test-long: venv ## all tests
	@$(BIN)/pytest $(PARALLEL)

test-torch: python ## the quick tests on the oldest and the newest torch (any build of it)
	@for release in $(TORCH_RELEASES); do \
	  $(PYTHON) .ci/install.py .venv-torch-$$release $(TEST_EXTRAS) --torch $$release --any-build && \
	  .venv-torch-$$release/bin/pytest $(PARALLEL) -m "not long" $(TORCH_TESTS) || exit 1; \
	done

mutants: venv ## plant bugs, and print those that no test sees
	@$(BIN)/python tests/mutants/run.py

matrix: venv ## prove what composes and write docs/composability.md
	@$(BIN)/meshwright prove examples/tiny-moe.toml --matrix docs/composability.md

chaos: venv ## the short chaos matrix, and docs/chaos_matrix.md (CHAOS=--long: every kind on every layout, 200 random)
	@$(BIN)/python -m validation.chaos_matrix $(CHAOS)

validation: venv ## fit the constants anew, tighten the tolerances, write docs/accuracy.md
	@$(BIN)/python -m validation.fit
	@$(BIN)/python -m validation.tolerance
	@$(BIN)/python -m validation.errors

lint: venv ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: python ## the environment for tests, in .venv
	@$(PYTHON) .ci/install.py $(VENV) $(TEST_EXTRAS) --torch-index "$(TORCH_INDEX)"

venv-demo: python
	@$(PYTHON) .ci/install.py $(VENV) $(DEMO_EXTRAS) --torch-index "$(TORCH_INDEX)"

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than Python 3.11, which Meshwright needs: make ... PYTHON=python3.12" >&2; exit 2; }

constraints: ## resolve constraints.txt anew
	@PYTHON=$(PYTHON) .ci/freeze $(TEST_EXTRAS)

transcript: venv ## record docs/transcript.txt and .svg from a new demo
	@$(BIN)/python docs/transcript.py

clean: ## remove what these commands made
	rm -rf .venv .venv-torch-* .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
