# All of it runs in .venv, made on first use and installed again only when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train test test-thorough test-lowest test-newest coverage lint docs drawings ui bench gpu-check soft-gpu \
	soak torch clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(VENV)/.core ## train: make train ARGS="model=two_conv_mlp trainer.epochs=3"
	$(BIN)/python -m cnnexp $(ARGS)

test: $(VENV)/.dev ## run the tests: make test ARGS="-k config"
	$(BIN)/python -m pytest -q -n 2 --dist=loadfile $(ARGS)

test-thorough: $(VENV)/.dev ## run the tests that make test leaves out because they take minutes
	$(BIN)/python -m pytest -q -n 2 -m "thorough and not slow" $(ARGS)

# the bounds in pyproject.toml are what these have passed with, each in an environment of its own; not keras, torch, gpu
test-lowest: RESOLUTION := lowest-direct## run the tests with the lowest versions that pyproject.toml allows
test-newest: RESOLUTION := highest## run the tests with the newest ones: make test-newest PYTHON=python3.13
test-lowest test-newest:
	$(PYTHON) -m venv --clear $(VENV)-$@
	$(VENV)-$@/bin/python -m pip --disable-pip-version-check install --quiet "uv<1"
	$(VENV)-$@/bin/uv pip install --quiet --python $(VENV)-$@/bin/python --resolution $(RESOLUTION) \
		--editable ".[dev,mpi,onnx,search,sweep]"
	$(VENV)-$@/bin/python -m pytest -q -n 2 -m "not slow" $(ARGS)

coverage: $(VENV)/.dev ## run the tests and say which lines of the package they do not reach
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest -q -n 2 --dist=loadfile $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

lint: $(VENV)/.dev ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.dev ## build the documentation site into build/docs
	$(PIP) --editable ".[dev,docs]"
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs

drawings: $(VENV)/.dev ## draw the pictures of docs/kernels.md again, for this CPU
	$(BIN)/python docs/kernel_drawings.py

ui: $(VENV)/.ui ## look at the recorded runs in a browser
	$(BIN)/cnnexp ui $(ARGS)

bench: $(VENV)/.dev ## time the backends against each other
	$(BIN)/python -m benchmarks $(ARGS)

gpu-check: $(VENV)/.gpu ## verify the GPU backends on a real GPU, then time them (beside PyTorch if installed)
	$(BIN)/python -m pytest -q tests/backends -k gpu
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

soft-gpu: $(VENV)/.gpu ## verify every GPU backend on a GPU made of software, all that takes long included
	$(BIN)/python -m pytest -q -s -m "slow or not slow" tests/softgpu tests/backends/test_soft_gpu.py $(ARGS)

soak: $(VENV)/.dev ## kills, faults, damaged files and more, for an hour: make soak ARGS="--seconds 600 kills"
	$(BIN)/python -m soak $(ARGS)

torch: $(VENV)/.dev ## add PyTorch, for backend=torch and for the tests that compare with it
	$(PIP) "torch==2.13.0"

clean: ## remove .venv and what tools left behind; outputs/ stays
	rm -rf $(VENV) $(VENV)-* .coverage* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.ui: $(VENV)/.core
	$(PIP) --editable ".[ui]"
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --editable ".[dev]"
	touch $@

$(VENV)/.gpu: $(VENV)/.dev
	$(PIP) --editable ".[dev,gpu]"
	touch $@
