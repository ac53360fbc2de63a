"""hip/build.sh: what it says when it cannot build, and the way through hipcc."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from code_objects import ROOT, output_of, require

SCRIPT = ROOT / "hip" / "build.sh"

# hipcc is a driver for a clang that finds ROCm; this one drives a clang that needs none.
HIPCC = """#!/bin/sh
[ "$HIP_PLATFORM" = amd ] || { echo "not told to build for AMD" >&2; exit 1; }
exec clang-19 -nogpuinc -nogpulib -mcode-object-version=5 -DEXPERT_CACHE_HIP_MINIMAL "$@"
"""


def build(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)


def bare_path(folder: Path) -> str:
    """A PATH that has what the script itself needs and no compiler."""
    tools = "bash", "env", "dirname", "realpath", "tr", "sed", "sort", "mktemp", "mkdir", "rm"
    for tool in tools:
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["host"], {"CXX": "no-such-compiler"}, "CXX=no-such-compiler: no such command"),
        (["hip"], {"CLANG": "/no/clang"}, "CLANG=/no/clang: no such command"),
        (["hip"], {"EXPERT_CACHE_ARCHS": "gfx90a sm_90"}, "EXPERT_CACHE_ARCHS: 'sm_90' is not"),
        (["cuda", "--with", "clang"], {}, "--with takes clang or hipcc"),
        (["hip", "--with", "gcc"], {}, "--with takes clang or hipcc"),
    ],
)
def test_a_wrong_setting_is_named(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    done = build(*arguments, tmp_path / "out.so", **environment)
    assert done.returncode == 1
    assert done.stderr.startswith(f"hip/build.sh: {message}") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [
        ("host", r"package g\+\+"),
        ("hip", "packages clang-19 lld-19 clang-tools-19"),
        ("cuda", r"CUDA toolkit|package g\+\+"),  # nvcc is also looked for in /usr/local/cuda
    ],
)
def test_a_missing_compiler_is_named_with_what_brings_it(
    tmp_path: Path, backend: str, remedy: str
) -> None:
    if backend == "hip" and Path("/opt/rocm/bin/hipcc").exists():
        pytest.skip("ROCm is installed, and found without PATH")
    done = build(backend, tmp_path / "out.so", PATH=bare_path(tmp_path))
    assert done.returncode == 1
    assert re.search(remedy, done.stderr) and done.stderr.count("\n") == 1


def test_an_unknown_backend_prints_the_usage() -> None:
    done = build("rocm")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: hip/build.sh host|hip|cuda")


def test_hipcc_s_object_names_no_runtime(tmp_path: Path) -> None:
    require("clang-19", "lld-19", "clang-offload-bundler-19", "llvm-readelf-19", "gcc")
    hipcc = tmp_path / "hipcc"
    hipcc.write_text(HIPCC)
    hipcc.chmod(0o755)
    library = tmp_path / "out.so"
    done = build("hip", "--with", "hipcc", library, HIPCC=str(hipcc), EXPERT_CACHE_ARCHS="gfx942")
    assert done.returncode == 0, done.stderr
    dynamic = output_of("llvm-readelf-19", "-d", library)
    assert re.findall(r"NEEDED.*\[(.*)\]", dynamic) == ["libc.so.6"]
    assert sorted(tmp_path.iterdir()) == [hipcc, library]


def test_a_failed_build_keeps_the_old_library(tmp_path: Path) -> None:
    require("g++")
    library = tmp_path / "out.so"
    library.write_text("the old one")
    done = build("host", library, "-include", "no-such-header.h")
    assert done.returncode != 0
    assert library.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [library]
