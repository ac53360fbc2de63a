"""What the GPU tests share. Without a GPU every one of them is skipped."""

import gc
import os
import subprocess
from pathlib import Path

import pytest
import torch

from bench.device_layer import load_library
from expert_cache_shim import native

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def library(device: torch.device) -> native.Library:
    """The package's kernel library for this GPU; that for NVIDIA is built here if it is missing
    or older than its sources."""
    file = ROOT / "expert_cache_shim" / "lib" / "libexpertcache_cuda.so"
    newest = max(path.stat().st_mtime for path in (ROOT / "hip").iterdir())
    if not torch.version.hip and (not file.exists() or file.stat().st_mtime < newest):
        command = [str(ROOT / "hip" / "build.sh"), "cuda"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
    return load_library(os.environ.get("EXPERT_CACHE_LIB"))


@pytest.fixture
def used_bytes(device: torch.device):
    """Device memory in use, of whatever allocator, when nothing is left to be freed."""

    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    return used
