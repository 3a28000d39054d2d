# Everything installs itself into .venv first and skips what is there.
#
#   make demo             the quickstart, STEPS=40 by default: from an empty stack to a report
#   make test             check, unit tests, tests on the real stack
#   make check            ruff, format, pyright, import rules
#   make unit / make real the two halves of the tests; ARGS='-k word' goes to pytest
#   make wide             what `make test` leaves out: wide layouts, more faults, long repeats
#   make slow             forty steps in every mode, and a control that must not learn
#   make chaos            kills every part of a real run, and says how long it took to mend
#   make bench            what the control plane itself costs
#   make up / make down   the local stack in .relax
#   make diagrams         docs/state-machines.md from the transition tables
#   make reference        docs/recipe.md from the typed recipe, docs/openapi.json from the routes,
#                         docs/metrics.md from the table of metrics
#   make pictures         docs/placement/*.svg from the shipped recipes
#   make docs             the documents as a site, in site/

SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test check unit real wide slow chaos bench up down diagrams reference pictures docs

VENV := .venv
BIN := $(VENV)/bin
LOCKS := lock/requirements.lock lock/dev.lock
# Tasks of reasoning-gym. One of its packages is compiled here, so a machine may go without.
TASKS := lock/reasoning-gym.lock
STAMP := $(VENV)/.installed
# A package index with CPU builds of torch, for machines whose default index has CUDA builds only.
TORCH_INDEX ?=
STEPS ?= 40
ARGS ?=
# Also `make -j` runs one thing at a time: the real stack wants the whole machine.
.NOTPARALLEL:

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

install:
	@wanted=$$(cat $(LOCKS) $(TASKS) pyproject.toml | sha256sum | cut -d' ' -f1)
	if [ -x $(BIN)/python ] && [ "$$(cat $(STAMP) 2>/dev/null)" = "$$wanted" ]; then exit 0; fi
	if [ ! -x $(BIN)/python ]; then
	  for python in $(PYTHON) python3.11 python3; do
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	      found=$$python; break
	    fi
	  done
	  if [ -z "$${found:-}" ]; then
	    echo "Python 3.11 or later is needed; none of '$(PYTHON) python3.11 python3' is." \
	      "Install one, or name it: make PYTHON=/path/to/python3.11" >&2
	    exit 2
	  fi
	  echo "Making $(VENV) with $$("$$found" --version)"
	  "$$found" -m venv $(VENV)
	fi
	total=$$(cat $(LOCKS) | grep -c '^[A-Za-z0-9]')
	echo "Installing the $$total packages of $(LOCKS) into $(VENV), about 2.4 GB and two minutes"
	echo "and beside them the tasks of reasoning-gym, which may be compiled here"
	pip="$(BIN)/python -m pip install --disable-pip-version-check --no-deps"
	half() {
	  awk -v half=$$1 'NR % 2 == half' $(LOCKS) > $(VENV)/half-$$1.txt
	  $$pip --progress-bar off -r $(VENV)/half-$$1.txt 2> >(grep -v '^WARNING' >&2)
	}
	{ $$pip -qq -r $(TASKS) || \
	  echo "reasoning-gym was not installed (it needs a C compiler and Python's headers): recipes" \
	    "with data.source reasoning_gym.* cannot run here, all others can" >&2; } & tasks=$$!
	{ half 0 & first=$$!; half 1; wait $$first; } | awk -v total=$$total -f lock/progress.awk
	wait $$tasks
	if [ -n "$(TORCH_INDEX)" ]; then
	  echo "Installing torch from $(TORCH_INDEX)"
	  $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --force-reinstall \
	    --index-url "$(TORCH_INDEX)" $$(grep -E '^torch==' lock/requirements.lock)
	fi
	if ! $(BIN)/python -c 'import torch' 2>/dev/null; then
	  echo "The torch that was installed does not load here: it is probably a CUDA build on a" \
	    "machine without CUDA. Name an index with CPU builds: make TORCH_INDEX=URL" >&2
	  exit 2
	fi
	echo "Installing relax-infer itself"
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	echo "$$wanted" > $(STAMP)
	echo "Installed"

demo: install
	@$(BIN)/relax-infer run quickstart --steps $(STEPS) --report relax-report.html --down

# The checks take one core, so the unit tests begin beside them.
test: install
	@checks=$(VENV)/check.log; $(MAKE) --no-print-directory check > $$checks 2>&1 & checking=$$!
	code=0; $(MAKE) --no-print-directory unit || code=$$?
	wait $$checking || code=$$?
	cat $$checks
	[ $$code -eq 0 ] || exit $$code
	$(MAKE) --no-print-directory real

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# Processes for two cores, the longest first; the third at work mostly waits. Every test is in one.
LONG := tests/workflows/test_training_run.py
SCALING := $(wildcard tests/workflows/test_*scal*.py)
WAITING := tests/cli tests/acceptance tests/deploy tests/security
PARTS := tests/workflows tests/machines tests/gateway tests/discovery $(WAITING)
without = $(addprefix --ignore=,$(1))
define UNIT_CHUNKS
workflows tests/workflows $(call without,$(LONG) $(SCALING))
others tests $(call without,$(PARTS))
waiting $(WAITING)
gateway tests/gateway tests/discovery
scaling $(SCALING)
runs $(LONG)
machines tests/machines
endef
export UNIT_CHUNKS

# Every line of stdin is a name and what pytest is given, in a process of its own; exit code 5 is
# "nothing chosen". Machines are shared and other lanes are at work: what failed (exit code 1) is
# tried once more when all is quiet, aloud, and a test that fails twice fails.
define chunks
{ export SEEN=$(VENV)/seen AGAIN=$(VENV)/again.txt OMP_NUM_THREADS=1; : > $$AGAIN
chunk() {
  local name=$$1 code=0 begun=$$SECONDS; shift
  local log=$(VENV)/$$name.log
  $(BIN)/python -m pytest -m $(2) -o cache_dir=$$SEEN/$$name --durations=10 $(ARGS) "$$@" \
    > $$log 2>&1 || code=$$?
  echo "$$name: $$((SECONDS - begun)) s" >> $$log
  cat $$log
  [ $$code -ne 1 ] || echo "$$name $$*" >> $$AGAIN
  [ $$code -le 1 ] || [ $$code -eq 5 ]
}
export -f chunk
xargs -P $(1) -L 1 bash -c 'chunk "$$@"' _
while read -r name files; do
  echo "== what failed in $$name, once more and alone"
  $(BIN)/python -m pytest -m $(2) -o cache_dir=$$SEEN/$$name --last-failed \
    --last-failed-no-failures none $(ARGS) $$files < /dev/null
done < $$AGAIN
}
endef

unit: install
	@$(call chunks,3,"not real and not wide and not slow and not chaos") <<< "$$UNIT_CHUNKS"

slow: install
	$(BIN)/python -m pytest -m slow --durations=0 $(ARGS)

# A process for each, since each has a Ray of its own.
chaos: install
	@code=0
	for each in tests/chaos/test_*.py; do
	  $(BIN)/python -m pytest -m chaos -s --durations=0 $(ARGS) $$each || code=$$?
	done
	exit $$code

bench: install
	for each in $$(ls tests/bench/*.py | grep -v __init__); do
	  echo "== $$each"; $(BIN)/python -m "$$(echo $${each%.py} | tr / .)"
	done

# A process for each room: two tests in one process must not share a Ray. Two at once, for two
# cores, the longest first; the engines' own room is halved.
WHOLE := tests/engines/test_real_engine.py
LONG_ROOMS := training placement gateway
REAL_FILES = $(shell grep -rlE 'mark\.real' tests --include='*.py' | sort)
room = $(filter tests/$(1)/%,$(REAL_FILES))
rooms = $(LONG_ROOMS) $(filter-out engines e2e $(LONG_ROOMS),$(sort $(notdir $(patsubst %/,%,$(dir $(REAL_FILES))))))

define REAL_CHUNKS
real-e2e $(call room,e2e)
real-engines $(filter-out $(WHOLE),$(call room,engines))
real-engine $(WHOLE)
$(foreach name,$(rooms),real-$(name) $(call room,$(name))
)
endef
export REAL_CHUNKS

real: install
	@$(call chunks,2,"real and not wide and not slow") <<< "$$REAL_CHUNKS"

# Both halves of the tests, what CI has no time for.
wide: install
	@$(call chunks,3,"wide and not real") <<< "$$UNIT_CHUNKS"
	$(call chunks,2,"wide and real") <<< "$$REAL_CHUNKS"

up: install
	@$(BIN)/python -m workers.local up --home .relax

down: install
	@$(BIN)/python -m workers.local down --home .relax

diagrams: install
	$(BIN)/python -m relax_infer.machines.diagrams docs/state-machines.md

reference: install
	$(BIN)/python -m relax_infer.config.reference docs/recipe.md
	$(BIN)/python -m relax_infer.gateway.openapi docs/openapi.json
	$(BIN)/python -m relax_infer.telemetry.catalogue docs/metrics.md

pictures: install
	$(BIN)/python -m relax_infer.placement docs/placement

# A small interpreter of its own: nothing of it is needed to run or test anything.
DOCS := .venv-docs

docs:
	@wanted=$$(sha256sum lock/docs.lock | cut -d' ' -f1)
	if [ "$$(cat $(DOCS)/.installed 2>/dev/null)" != "$$wanted" ]; then
	  for python in $(PYTHON) python3.11 python3; do
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	      found=$$python; break
	    fi
	  done
	  if [ -z "$${found:-}" ]; then
	    echo "Python 3.11 or later is needed: make docs PYTHON=/path/to/python3.11" >&2; exit 2
	  fi
	  echo "Installing the packages of lock/docs.lock into $(DOCS)"
	  "$$found" -m venv $(DOCS)
	  $(DOCS)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r lock/docs.lock
	  echo "$$wanted" > $(DOCS)/.installed
	fi
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	echo "site/index.html"
