# `make demo` and `make test` do everything from a fresh clone; `make help` lists the rest.
# PYTHON=/path/to/python3.11 chooses the interpreter for .venv. The settings of pip (PIP_INDEX_URL
# and the like) are obeyed.

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-triton-3.8.0 check setup clean
.DELETE_ON_ERROR:

VENV := .venv/.complete
# The environment holds this folder's path: where the folder was moved, it is completed anew.
ifneq ($(shell cat $(VENV) 2>/dev/null),$(CURDIR))
  $(shell rm -f $(VENV))
endif
# Compiled against besides the version in .venv: what older GPU images have, and the newest.
TRITONS := .triton-versions/3.6.0/triton/__init__.py .triton-versions/3.9.0/triton/__init__.py
# For the kernels of `cpasync`: its own folder, since only tests need it and it is large.
CUTE := .cute-dsl/.complete
# Two workers, or none where there is one core.
WORKERS := $(shell [ "$$(nproc)" -ge 2 ] && echo 2 || echo 0)
PYTEST := .venv/bin/python -m pytest -n $(WORKERS)

help:
	@echo "make demo      set up, then run the demo (writes tileloom-demo/report.html)"
	@echo "make test      set up, then run the test suite"
	@echo "make test-all  the same with the long products: every kernel, architecture and Triton"
	@echo "make test-triton-3.8.0  the emulator and the shipped kernels on a further Triton"
	@echo "make check     formatting, lint, types, then the test suite"
	@echo "make setup     only set up: .venv, other Tritons in .triton-versions, .cute-dsl"
	@echo "make clean     remove them again"

demo: $(VENV)
	.venv/bin/python -m tileloom demo

test: $(VENV) $(TRITONS) $(CUTE)
	$(PYTEST) -m "not full"

test-all: $(VENV) $(TRITONS) $(CUTE)
	$(PYTEST)

# A release that `make test` leaves out: the emulator's cases and dumps, every shipped kernel.
test-triton-3.8.0: $(VENV) .triton-versions/3.8.0/triton/__init__.py
	TILELOOM_TEST_TRITONS=3.8.0 $(PYTEST) -m "not full" -k 3.8.0 tests/emulator tests/launch

check: $(VENV) $(TRITONS) $(CUTE)
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m ruff check .
	.venv/bin/python -m basedpyright
	$(PYTEST) -m "not full"

setup: $(VENV) $(TRITONS) $(CUTE)

clean:
	rm -rf .venv .triton-versions .cute-dsl

$(VENV): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" sh scripts/setup.sh venv

.triton-versions/%/triton/__init__.py: | $(VENV)
	@sh scripts/setup.sh triton $*

$(CUTE): constraints.txt | $(VENV)
	@sh scripts/setup.sh cute
