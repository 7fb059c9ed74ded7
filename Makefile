# Everything starts from `make setup`; each target below runs it first and it costs nothing once done.
PY := .venv/bin/python
PYTEST := $(PY) -m pytest

# Two test workers and every daemon that they start compile the same sources unless they may keep them, and fight for
# the processors where each of them also computes in threads.
unexport PYTHONDONTWRITEBYTECODE
check: export OMP_NUM_THREADS = 1

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-video evidence test check check-static check-waiting check-computing fmt clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

setup: ## install everything into .venv and convert the model (minutes from nothing, nothing when done)
	@scripts/setup.sh

demo: setup ## the short show on a real SGLang pair (under 10 minutes)
	$(PY) -m controld.cli.main demo $(ARGS)

demo-video: setup ## a video engine under a changing load, on the CPU (about three minutes)
	$(PY) -m controld.cli.main demo-video $(ARGS)

evidence: setup ## decide every claim on serving (up to an hour); writes build/evidence
	$(PY) -m controld.cli.main demo --evidence $(ARGS)

# The tests that mostly wait (for files, leases, processes) import no torch; the others compute. Side by side, and beside
# the static checks, they keep two processors busy for less than test workers that would each import everything.
WAITING := $(addprefix tests/,agent cli daemon fleet obs planning store)
FAST := -q -m "not slow and not pair and not root and not hypothesis"

check: setup ## format, lint, types, import rules and the fast tests (no generated inputs, no pair)
	@$(MAKE) --no-print-directory --keep-going --jobs=3 --output-sync=target check-static check-waiting check-computing

check-static:
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/lint-imports
	.venv/bin/mypy

check-waiting:
	$(PYTEST) $(FAST) $(WAITING)

check-computing:
	$(PYTEST) $(FAST) $(addprefix --ignore=,$(WAITING))

test: setup ## every test, the real pair included
	.venv/bin/ruff check .
	.venv/bin/lint-imports
	$(PYTEST) -q

fmt: setup ## format and fix
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean: ## remove what was built (.venv and the model stay)
	find build -mindepth 1 -maxdepth 1 ! -name models -exec rm -rf {} + 2> /dev/null || true
	rm -rf .mypy_cache .pytest_cache .ruff_cache
