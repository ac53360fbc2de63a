"""Fixtures that several test folders share."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from expert_cache_shim import native

ROOT = Path(__file__).parent.parent
HOST_LIBRARY = ROOT / "expert_cache_shim" / "lib" / "libexpertcache_host.so"


@pytest.fixture(scope="session")
def build_host_library() -> Callable[..., None]:
    """Calls `hip/build.sh host`; skips the test where there is no C++ compiler."""

    def build(*arguments: str | Path) -> None:
        compilers = (os.environ.get("CXX", "g++"), "g++", "clang++", "clang++-19")
        if not any(map(shutil.which, compilers)):
            pytest.skip("no C++ compiler to build the emulated kernels with")
        command = [str(ROOT / "hip" / "build.sh"), "host", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"

    return build


@pytest.fixture(scope="session")
def host_library_path(build_host_library) -> Path:
    """The kernel library for the CPU, built if it is missing or older than its sources."""
    sources = [path.stat().st_mtime for path in (ROOT / "hip").iterdir() if path.is_file()]
    if not HOST_LIBRARY.exists() or HOST_LIBRARY.stat().st_mtime < max(sources):
        build_host_library()
    return HOST_LIBRARY


@pytest.fixture(scope="session")
def host_library(host_library_path: Path) -> native.Library:
    return native.load("host", host_library_path)


# Left out by `make test-fast`: what needs vLLM, compiles, installs, starts interpreters by the
# dozen, or fails at every line in turn.
SLOW = (
    "amd/", "contract/", "docker/", "engine/", "faults/", "nvidia/", "kernels/test_faults.py",
    "kernels/test_fuzz.py", "kernels/test_sanitizers.py", "test_arming_failures.py",
    "test_bootstrap", "test_cli", "test_packaging.py", "test_ranks.py",
    "test_hostile_", "test_sitecustomize.py",
)  # fmt: skip


# Left out by `make test` and run by `make test-long`: engines that take minutes each, and what
# `make test-release` runs anyway.
LONG = (
    "engine/test_compile_cache.py", "engine/test_compiled.py", "engine/test_draft_heads.py",
    "engine/test_dummy_steps.py",
    "engine/test_installed.py", "engine/test_lifecycle.py", "engine/test_lora.py",
    "engine/test_pipeline.py", "engine/test_quantised.py", "engine/test_schemes.py",
    "engine/test_second_engine.py", "engine/test_speculative.py",
    "engine/test_processes.py::test_two_expert_parallel",
    "engine/test_processes.py::test_wrong_experts_of_a_rank",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(Path(__file__).parent).as_posix()
        if place.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if f"{place}::{item.name}".startswith(LONG):
            item.add_marker(pytest.mark.long)
