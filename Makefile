# Every target installs what it needs into .venv first; nothing is done twice.
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q
STEPS := 40

.PHONY: help install demo test check unit real slow diagrams reference clean

help: ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: ## .venv from the lock files
	@tools/install

demo: install ## the whole loop, 40 steps: a tiny policy learns to sort; writes relax-report.html
	$(BIN)/relax-infer run quickstart --steps $(STEPS) --report relax-report.html --down

test: check unit real ## everything that CI runs

check: install ## formatting, lint, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

unit: install ## fast tests: no engine, no Ray
	$(PYTEST) -m "not real and not slow"

real: install ## tests on real engines, Ray and Temporal; minutes
	$(PYTEST) -m "real and not slow"

slow: install ## long tests that CI leaves out
	$(PYTEST) -m slow

diagrams: install ## docs/state-machines.md from the transition tables
	$(BIN)/python -m relax_infer.machines.diagrams docs/state-machines.md

reference: install ## docs/recipe.md from the typed recipe
	$(BIN)/python -m relax_infer.config.reference docs/recipe.md

clean: ## end the local stack and remove what tools left; .venv and the runs in .relax stay
	if [ -x $(BIN)/relax-infer ]; then $(BIN)/relax-infer down; fi
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist relax-report.html
