# Two commands for a fresh machine (Python 3.11+, make and pip): `make quickstart` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: quickstart real test test-all test-vllm vllm-env lint format docs bench gpu clean

quickstart: $(VENV)/.run
	$(BIN)/loragate quickstart $(ARGS)

# the method on a real chat model, in about 20 minutes; it says what it fetches, and goes on where it was stopped
real: $(VENV)/.real
	$(BIN)/python scripts/real_model.py $(ARGS)

test: $(VENV)/.dev
	$(PYTEST) --dist worksteal -m "not slow" $(ARGS)

# everything, with what `make test` skips where it is absent: the sandbox needs bubblewrap (apt install bubblewrap).
# Files go out whole and in the order of tests/conftest.py: a run that is cut off has done the weightiest ones.
test-all: $(VENV)/.dev
	LORAGATE_REQUIRE_BWRAP=1 $(PYTEST) --dist loadfile --no-loadscope-reorder $(ARGS)

# vLLM on the CPU lives in an environment of its own (Linux, x86_64; about 2 GB), made once and kept
vllm-env:
	scripts/vllm_cpu_env.sh $(VLLM_VENV)

test-vllm: vllm-env
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/generation/test_vllm_engine.py tests/contract/test_vllm.py tests/serving $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks scripts
	$(BIN)/ruff format --check src tests benchmarks scripts
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix src tests benchmarks scripts
	$(BIN)/ruff format src tests benchmarks scripts

# the site, into site/; a warning is an error
docs: $(VENV)/.dev
	$(BIN)/python -m mkdocs build --strict $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/speed/run.py $(ARGS)

# everything that needs a GPU, in 25 minutes, with an interpreter that has CUDA, transformers and peft: make gpu PYTHON=python3
gpu:
	$(PYTHON) benchmarks/gpu/run.py $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'Python 3.11 or newer is needed, found ' + sys.version"
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: another resolution may bring gigabytes of GPU libraries
$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing torch and the package into $(VENV): some minutes"
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.real: $(VENV)/.run
	@echo "installing the optional parts math and gguf"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[math,gguf]"
	touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what the tests need: some minutes"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@
