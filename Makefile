# Every target sets up .venv by itself; with an NVIDIA GPU it takes the `gpu` extra, else `cpu`.
PYTHON ?= python3
PORT ?= 8000
UV_VERSION := 0.13.8
EXTRA := $(if $(shell nvidia-smi -L 2>/dev/null),gpu,cpu)
BIN := .venv/bin
STAMP := .venv/installed-$(EXTRA)

# The CPU build of torch is not on PyPI: it comes from a folder that pip has been told of, or from
# PyTorch's own index.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
TORCH := $(if $(filter cpu,$(EXTRA)),$(if $(wildcard $(UV_FIND_LINKS)/torch-*+cpu-*),,--torch-backend cpu))

.PHONY: run serve test check bench pins
.DELETE_ON_ERROR:

run: $(STAMP)
	@$(BIN)/flyte run --local workflows/gsm8k.py main \
	    --dataset models/arithmetic/problems.jsonl --num_questions 500 --output runs/demo
	@$(BIN)/python -m tasks.report runs/demo

serve: $(STAMP)
	@$(BIN)/python -m apps.local --port $(PORT)

test: $(STAMP)
	$(BIN)/pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.app_cost
	$(BIN)/python -m benchmarks.throughput

$(STAMP): requirements/$(EXTRA).txt
	@echo "installing into .venv (about a minute, more on a slow network)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(TORCH) -r $<
	@touch $@

# Resolves the pins again, for Linux on x86-64; the CPU build leaves out what text does not need.
PIN := $(BIN)/uv pip compile --quiet --upgrade pyproject.toml --extra dev --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 --no-header --no-annotate
pins: $(STAMP)
	$(PIN) --extra cpu $(TORCH) --overrides requirements/cpu-overrides.txt -o requirements/cpu.txt
	UV_FIND_LINKS= $(PIN) --extra gpu -o requirements/gpu.txt
