# Each target makes the virtual environment and installs what is missing. Overrides:
#   PYTHON=python3.12  VENV=path  TORCH_VERSION=2.12.0  TORCH_INDEX_URL=an index with builds of torch
#   ARGS="trainer.max_steps=50"  for make train, or options of pytest, of a benchmark, of make fuzz
#   JOBS=2   processes of pytest for the tests (default: 2 without ARGS, else 0: the one that was started)
#   KIND=cpu|cuda  BASE=image  TAG=name  for make image, which needs no virtual environment

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?=
TORCH_INDEX_URL ?=
ARGS ?=

PY := $(VENV)/bin/python
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)

# Which torch: TORCH_VERSION if given; else the newest (a CUDA build) beside a GPU; else the CPU build.
ifneq ($(TORCH_VERSION),)
TORCH := torch==$(TORCH_VERSION)
else ifeq ($(GPU),yes)
TORCH :=
else
# An exact version, for which a CPU build is found where a range would find the CUDA build.
TORCH := torch==2.13.0
endif
ifneq ($(TORCH_INDEX_URL),)
TORCH += --extra-index-url $(TORCH_INDEX_URL)
endif

SIZE := about $(if $(GPU),3 GB to download; 5 to 15,0.4 GB to download; 2 to 5) minutes

# Another choice of torch or interpreter, or other dependencies, make another stamp, and so install again.
CHOICE := $(shell echo '$(PYTHON) $(TORCH) $(GPU)' | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(CHOICE)
DEV_STAMP := $(VENV)/.installed-dev-$(CHOICE)
DOCS_STAMP := $(VENV)/.installed-docs-$(CHOICE)
SLURM_STAMP := $(VENV)/.installed-slurm-$(CHOICE)

.PHONY: help install train smoke test test-full test-extras test-s3 test-ray test-cuda test-field test-slurm docs mutants fuzz bench bench-offload bench-scale bench-checkpoint gpu-check lightning-table image image-test structure lint format clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.* ## ' '/^[a-z-]+:.* ## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile
	@echo
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

install: $(STAMP) ## the virtual environment, with this package and torch

$(STAMP): pyproject.toml
	@test -x $(PY) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11: PYTHON=...")'
	@echo "Installing $(or $(TORCH),torch for CUDA), Lightning, Hydra and the tests' packages into $(VENV): $(SIZE)."
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[test]'
	@rm -f $(VENV)/.installed-*
	@touch $@
	@echo "Installed. To use python -m lightning_zero...: source $(VENV)/bin/activate"

$(DEV_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[test,dev]'
	@touch $@

train: $(STAMP) ## the main job: a small GPT on real text under ZeRO stage 3
	$(PY) -m lightning_zero.train $(ARGS)

# Many tests wait, for a process that starts or a timeout, so two at a time are faster also on two cores.
JOBS ?= $(if $(ARGS),0,2)
CPU_MINUTES ?= 20

PYTEST := $(PY) -m pytest -n $(JOBS) --dist worksteal

smoke: $(STAMP) ## one test of each part, in 45 seconds
	$(PYTEST) -m smoke $$(grep -rl --include='test_*.py' mark.smoke tests) $(ARGS)

test: $(STAMP) ## one case of each subject, in ten minutes
	$(PYTEST) --durations=20 --cpu-minutes=$(CPU_MINUTES) $(ARGS)

test-full: $(STAMP) ## all cases that make test leaves out, in an hour or more
	$(PYTEST) --tier=rest --timeout=1800 $(if $(GPU),-m 'not slurm') $(ARGS)

# Next to the environment, so that all other tests see the libraries that users have too.
EXTRAS := $(abspath $(VENV))/extras
EXTRA_TESTS := tests/engine/test_float8.py tests/engine/test_low_bit_classes.py tests/trainer/test_packed.py tests/test_examples.py

test-extras: $(STAMP) ## 4-bit weights, 8-bit optimizers and float8, whose libraries take 50 MB to download
	$(PY) -m pip install -q --no-deps --upgrade --target $(EXTRAS) 'bitsandbytes>=0.50' 'torchao>=0.18'
	PYTHONPATH=$(EXTRAS) $(PYTEST) --tier=all $(EXTRA_TESTS) -k 'float8 or packed or qlora' $(ARGS)

S3 := $(abspath $(VENV))/s3

test-s3: $(STAMP) ## checkpoints on a server that speaks S3, whose libraries take 95 MB of disk
	@test -d $(S3)/moto || $(PY) -m pip install -q --disable-pip-version-check --no-compile --target $(S3) 's3fs>=2026.9' 'moto[s3]>=5.2' flask-cors
	PYTHONPATH=$(S3) $(PYTEST) --tier=all tests/trainer/test_s3.py $(ARGS)

# Ray's own cluster on this machine: 600 MB of disk.
RAY := $(abspath $(VENV))/ray

test-ray: $(STAMP) ## workers of Ray Train, one of which dies, and trials of Ray Tune; not in CI
	@test -d $(RAY)/ray || $(PY) -m pip install -q --disable-pip-version-check --no-compile --target $(RAY) 'ray[train]>=2.60'
	PYTHONPATH=$(RAY) $(PYTEST) --tier=all tests/launch/test_ray.py $(ARGS)

mutants: $(STAMP) ## break the package in 60 places and see whether a test fails, in an hour
	$(PY) -m tests.mutants $(ARGS)

# torch's CUDA build on this CPU, without NVIDIA's libraries: 0.5 GB to download, 1.2 GB of disk (tests/cuda).
CUDA_VENV ?= .venv-cuda
CUDA_TESTS := tests/cuda tests/engine/test_parity.py tests/engine/test_offload.py tests/engine/test_alone.py

test-cuda: $(STAMP) ## the engine and the Trainer on emulated GPUs
	@if $(PY) -m tests.cuda.build $(CUDA_VENV); then rm -f $(CUDA_VENV)/said; \
	LIGHTNING_ZERO_TEST_DEVICE=cuda LATE_CUDA_HOME=local LATE_CUDA_LOG=$(abspath $(CUDA_VENV))/said \
	$(CUDA_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal --tier=all -m 'not full and not gpu and not slurm' $(if $(ARGS),$(ARGS),$(CUDA_TESTS)); \
	else echo "SKIPPED: no test ran on emulated GPUs: torch's CUDA build, or a compiler, is not here (above)."; fi

# Into an environment of its own, with torch's CPU build: 1.9 GB of disk. Its runner needs nothing but Python.
FIELD_VENV ?= .venv-field

test-field: ## published packages that are built on Lightning, trained beside DDP, in ten minutes
	$(PYTHON) -m tests.field --venv $(FIELD_VENV) $(ARGS)

docs: $(DOCS_STAMP) ## the documentation as a site, in outputs/site
	$(PY) docs/made.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet -f docs/site/mkdocs.yml
	@echo "outputs/site/index.html: open it in a browser."

$(DOCS_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[test,docs]'
	@touch $@

lightning-table: $(STAMP) ## all of Lightning's features beside DDP (docs/lightning.md), in minutes
	$(PY) -m tests.lightning_table $(ARGS)

fuzz: $(STAMP) ## random programs for an hour, with a new seed
	$(PY) -m tests.fuzz $(ARGS)

# On a SLURM of two virtual nodes that is started for it; the packages are installed if they are missing (as root).
test-slurm: $(SLURM_STAMP) ## real jobs on a SLURM of two virtual nodes
	tests/slurm/lab.sh install
	$(PY) -m pytest -m slurm tests/slurm $(ARGS)

$(SLURM_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[test]'
	@touch $@

bench: $(STAMP) ## speed beside DDP and FSDP2 (docs/benchmarks.md)
	$(PY) -m benchmarks.bench $(ARGS)

bench-offload: $(STAMP) ## what offload costs
	$(PY) -m benchmarks.bench_offload $(ARGS)

bench-scale: $(STAMP) ## one rank of up to 4096
	$(PY) -m benchmarks.bench_scale $(ARGS)

bench-checkpoint: $(STAMP) ## saves and loads beside FSDP2
	$(PY) -m benchmarks.checkpoint $(ARGS)

# By a Python whose torch finds a GPU nothing is installed: there may be no index of packages.
gpu-check: ## what one GPU tells, in nine minutes
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; \
	then $(PYTHON) -m benchmarks.gpu $(ARGS); \
	else $(MAKE) --no-print-directory $(STAMP) && $(PY) -m benchmarks.gpu $(ARGS); fi

KIND ?= $(if $(GPU),cuda,cpu)
BASE ?=
TAG ?=
IMAGE_ARGS = $(if $(BASE),--base '$(BASE)') $(if $(TORCH_INDEX_URL),--torch-index-url '$(TORCH_INDEX_URL)')

image: ## an image of the main job (docker/README.md)
	$(PYTHON) docker/image.py --kind $(KIND) $(if $(TAG),--tag '$(TAG)') $(IMAGE_ARGS) $(ARGS)

image-test: ## build an image for CPUs and try it
	$(PYTHON) docker/check_image.py $(IMAGE_ARGS) $(ARGS)

structure: $(STAMP) ## figures of the package
	$(PY) -m tests.structure

lint: $(DEV_STAMP) ## ruff, mypy, hadolint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/hadolint docker/Dockerfile.cpu docker/Dockerfile.cuda

format: $(DEV_STAMP) ## let ruff fix what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove the virtual environment and all outputs
	rm -rf $(VENV) $(CUDA_VENV) $(FIELD_VENV) build dist outputs multirun *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
