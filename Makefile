# Offramp. `make help` lists everything; CI runs the same targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
CODE := core operator worker cli lab tests bench cluster images crds website
BIN := $(VENV)/bin
export OFFRAMP_DATA ?= ../shared/data
# Many processes are started here: each would compile again what it imports (the operator's start takes twice as long).
unexport PYTHONDONTWRITEBYTECODE
CHECKS := check-types check-generated check-style check-imports check-site
STAMP := $(VENV)/.offramp-$(shell sha256sum requirements.lock pyproject.toml 2>/dev/null | sha256sum | cut -c1-16)

.PHONY: help setup fmt check $(CHECKS) gen sbom docs test-fast test test-gpu bench-gpu bench-gpu-pack coverage outages cluster cluster-down demo demo-generate demo-vllm demo-cluster demo-fleet bench soak soak-control clean

help: ## List the targets
	@awk 'BEGIN{FS=":.*## "} /^[a-z-]+:.*## /{printf "  \033[1m%-14s\033[0m %s\n",$$1,$$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with everything in it (pinned, hashed)
$(STAMP): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@rm -f $(VENV)/.offramp-*; touch $@

fmt: setup ## Format the code
	@$(BIN)/ruff format $(CODE); $(BIN)/ruff check --fix $(CODE)

check: setup ## Lint, strict types, import rules, generated files in step
	@$(MAKE) --no-print-directory --jobs=$$(nproc) --output-sync=target $(CHECKS)

check-types:
	@$(BIN)/mypy --no-error-summary

check-style:
	@$(BIN)/ruff format --check --quiet $(CODE)
	@$(BIN)/ruff check --quiet $(CODE)

check-imports:
	@$(BIN)/lint-imports --no-cache > /dev/null || $(BIN)/lint-imports --no-cache

check-generated:
	@scripts/gen --check

check-site:
	@$(BIN)/python -m website.build

gen: setup ## Write generated files: chart's CRDs, install manifest, lock file
	@scripts/gen

docs: setup ## The documentation site in build/site, every link followed
	@$(BIN)/python -m website.build

test-fast: setup ## The inner loop: everything that needs no cluster and is not slow, with fewer random examples
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not slow and not cluster and not gpu" --hypothesis-profile=fast -n $(shell nproc) --dist loadfile --no-loadscope-reorder

test: check ## Everything: unit, property, API server, real cluster
	@scripts/test

test-gpu: setup ## What runs on GPUs, on this machine's or else on one in software
	@scripts/test-gpu

bench-gpu: ## Figures of a GPU (20 minutes), after its tests; of one in software where there is no other
	@test -f build/gpu-pack/packages.tar.xz || $(MAKE) --no-print-directory setup
	@scripts/bench-gpu --tests

bench-gpu-pack: setup ## What that needs on a machine without a network: build/gpu-pack, at most 64 MiB (PYTHON_VERSION=3.12 ARCH=90)
	@$(BIN)/uv run --quiet --no-project --with zstandard==0.25.0 bench/gpu/pack.py --python $(or $(PYTHON_VERSION),3.12) --arch $(or $(ARCH),90)

coverage: setup ## Which lines the tests of `make test-fast` leave out: build/coverage/index.html
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not slow and not cluster and not gpu" -n 4 --dist loadfile --no-loadscope-reorder --cov --cov-report=html:build/coverage

outages: setup cluster ## The outages of `make test` alone, on a real Kubernetes
	@$(BIN)/pytest -q -n 3 --durations=20 tests/cluster/outages

cluster: setup ## A real Kubernetes on this machine
	@cluster/up

cluster-down: ## Remove it; leaves nothing behind
	@cluster/down

demo: setup ## The main job on this machine: tune, certify, canary, promote, drift, roll back
	@$(BIN)/python -m bench.demo.embedded

demo-generate: setup ## A model that generates, through the same loop: drafts, a certified plan, its canary, and back
	@$(BIN)/python -m bench.demo.generate $(if $(MODEL),--model $(MODEL))

demo-vllm: setup ## A model that vLLM computes, through the same loop (7 to 10 minutes where little else runs); installs vLLM for CPUs once (5 GB)
	@$(BIN)/python -m bench.demo.vllm

demo-cluster: setup cluster ## The same story on a real Kubernetes, installed with Helm
	@$(BIN)/python -m bench.demo.cluster

demo-fleet: setup cluster ## A day of Twitter's trace in five minutes, on two pools of a real Kubernetes that the operator plans
	@$(BIN)/python -m bench.demo.fleet

bench: setup ## Measure everything and make docs/benchmarks.md again (hours; kept by content)
	@$(BIN)/python -m bench.run

soak: setup ## Ten minutes at twice a worker's capacity: right, in time, refused at once, memory flat
	@$(BIN)/python -m bench.soak

soak-control: setup cluster ## Ten minutes of tuning without rest on a real Kubernetes: Ready, `kubectl diff` and requests do not notice
	@OFFRAMP_SOAK_SECONDS=600 $(BIN)/pytest -q -p no:xdist --durations=3 tests/cluster/outages/test_continuous_tuning.py

sbom: setup ## Bills of materials of both images (CycloneDX), reproducible: build/sbom
	@$(BIN)/python images/sbom.py

clean: cluster-down ## Remove build products
	@rm -rf build dist
