"""The CUDA build, as nvcc's assembler and the disassembler show it. Needs no NVIDIA GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {
    "expert_cache_manage_kernel",
    "expert_cache_manage_general_kernel",
    "expert_cache_gather_kernel",
    "expert_cache_preload_kernel",
}


def find_cuobjdump() -> str:
    """cuobjdump from PATH, else the one in triton's wheel; skips when there is none."""
    found = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")
    if not found and triton and triton.origin:
        tools = Path(triton.origin).parent / "backends" / "nvidia" / "bin"
        found = shutil.which("cuobjdump", path=str(tools))
    if not found:
        pytest.skip("no cuobjdump, neither on PATH nor in a triton wheel")
    return str(found)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library for sm_90 and what the assembler said while building it."""
    if not shutil.which("nvcc") and not Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("no nvcc; the CUDA toolkit brings it")
    library = tmp_path_factory.mktemp("cuda") / "libexpertcache_cuda.so"
    done = subprocess.run(
        [ROOT / "hip" / "build.sh", "cuda", library, "-Xptxas", "-v"],
        env=os.environ | {"CUDA_ARCHS": "sm_90"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return library, done.stdout + done.stderr


def test_no_kernel_spills(build: tuple[Path, str]) -> None:
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", build[1])
    assert len(spills) == len(KERNELS)
    assert set(spills) == {("0", "0", "0")}


def test_build_has_no_warnings(build: tuple[Path, str]) -> None:
    assert not re.search(r"warning", build[1], re.I)


def test_library_names_its_machine_code_and_its_ptx(build: tuple[Path, str]) -> None:
    library = ctypes.CDLL(str(build[0]))
    library.expert_cache_backend.restype = ctypes.c_char_p
    library.expert_cache_architectures.restype = ctypes.c_char_p
    assert library.expert_cache_backend() == b"cuda"
    assert library.expert_cache_architectures() == b"sm_90 compute_90"


def test_library_needs_no_cuda_runtime_of_a_certain_version(build: tuple[Path, str]) -> None:
    readelf = shutil.which("readelf") or shutil.which("llvm-readelf-19")
    if readelf is None:
        pytest.skip("no readelf; Debian's package binutils brings it")
    dynamic = subprocess.check_output([readelf, "-d", build[0]], text=True)
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert "libc.so.6" in needed
    assert not [name for name in needed if "cuda" in name]


def test_gather_moves_sixteen_bytes_a_thread(build: tuple[Path, str]) -> None:
    sass = subprocess.check_output([find_cuobjdump(), "-sass", build[0]], text=True)
    code = dict(re.findall(r"Function : (\w+)\n(.*?)(?=\n\s+Function : |\Z)", sass, re.S))
    assert set(code) == KERNELS
    gather, manage = code["expert_cache_gather_kernel"], code["expert_cache_manage_kernel"]
    assert re.search(r"\bLDG\.E\.(\w+\.)*128\b", gather)
    assert re.search(r"\bSTG?\.E\.(\w+\.)*128\b", gather)
    assert not re.search(r"\b(ATOM|ATOMG|ATOMS|RED|SHFL|VOTE)\b", gather + manage)
    assert re.search(r"\bBAR\.SYNC\b", manage)
