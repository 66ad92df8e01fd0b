# The verbs of this repository; `make` alone lists them. Every verb sets up what it needs.
#
# Variables (make test PYTHON=python3.12 TORCH=torch==2.11.0 TRANSFORMERS=transformers==5.17.0):
#   PYTHON         interpreter that makes the virtual environment       python3
#   VENV           where the virtual environment lies                   .venv
#   TORCH_VERSION  torch to install: the CPU build without an NVIDIA driver   2.13.0
#   TORCH          another torch requirement, taken as it is written
#   TORCH_INDEX    package index that serves it ("" for none)           see tools/setup.sh
#   TRANSFORMERS   another transformers requirement
#   INTERPRETER    check, test, gpu-test, bench: use this interpreter and install nothing
#   WORKERS        pytest processes                                     2
#   ARGS           more arguments for pytest (test, gpu-test) or the benchmark (bench)

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
WORKERS ?= 2
RUN := $(if $(INTERPRETER),$(INTERPRETER),$(VENV)/bin/python)
SOURCES := src tests tools $(wildcard demo benchmarks)

export PYTHON VENV TORCH_VERSION
ifdef TORCH
export TORCH
endif
ifdef TRANSFORMERS
export TRANSFORMERS
endif
ifneq ($(origin TORCH_INDEX),undefined)
export TORCH_INDEX
endif

# Tests start dozens of processes; each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo style check test test-long bench verify gpu-test

help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r verb text; do \
	  printf '  make %-9s %s\n' "$$verb" "$$text"; done

setup: ## make .venv with torch, this package and the tools (does nothing when up to date)
	@$(if $(INTERPRETER),echo "setup: using $(INTERPRETER) as it is",tools/setup.sh)

demo: setup ## two small FP4 models write code, and prove their bits
	@EXACTMOE="$(VENV)/bin/exactmoe" tools/demo.sh

style: setup ## format the sources and apply safe lint fixes
	$(RUN) -m ruff format $(SOURCES)
	$(RUN) -m ruff check --fix $(SOURCES)

check: setup ## formatting, lint, types and structure, nothing changed
	$(RUN) -m ruff format --check $(SOURCES)
	$(RUN) -m ruff check $(SOURCES)
	$(RUN) -m mypy
	$(RUN) tools/structure.py

# One thread a process: the workers already fill the cores, and bits must not depend on threads.
# worksteal: tests of a file stay together, with what they share, and no worker waits at the end.
test: check ## everything that needs no GPU
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "not gpu and not two_gpu and not long" $(ARGS)

test-long: setup ## tests at more sizes than those of test, in minutes
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "long and not gpu and not two_gpu" $(ARGS)

gpu-test: setup ## the tests that need a CUDA card
	@$(RUN) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "gpu-test: torch sees no CUDA card")'
	$(RUN) -m pytest -m "gpu or two_gpu" $(ARGS)

verify: setup ## compare the bytes of both demo models over every width
	$(VENV)/bin/exactmoe verify demo/glm5_next
	$(VENV)/bin/exactmoe verify demo/deepseek_v4

bench: setup ## time the layers on this machine
	$(RUN) benchmarks/cpu_moe.py $(ARGS)
