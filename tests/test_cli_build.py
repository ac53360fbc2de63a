"""`expert-cache build`: what it chooses, what it puts where, and what it says when it cannot."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from command_line import Image, make_image, put_torch
from test_native import stand_in

from expert_cache_shim import native
from expert_cache_shim.commands import CommandError
from expert_cache_shim.commands import build as builder

# hipcc is a driver for a clang that finds ROCm; this one drives a clang that needs none.
HIPCC = """#!/bin/sh
exec clang-19 -nogpuinc -nogpulib -mcode-object-version=5 -DEXPERT_CACHE_HIP_MINIMAL "$@"
"""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture
def image(tmp_path) -> Image:
    return make_image(tmp_path, with_sources=True)


def library(image: Image, backend: str) -> Path:
    return image.package / "lib" / f"libexpertcache_{backend}.so"


def left_over(folder: Path) -> list[Path]:
    return list(folder.glob(".build-*"))


# --- What is built ---


@needs_compiler
def test_a_library_goes_where_it_is_wanted(image, tmp_path):
    out = tmp_path / "kernels.so"
    outcome = image.call("build", "--arch", "host", "--output", str(out))
    assert (outcome.status, outcome.err) == (0, "")
    begun, done, use = outcome.out.splitlines()
    assert begun == "building for the CPU (as asked)"
    assert done.startswith(f"built {out}: loads, ABI version {native.ABI_VERSION}, ")
    assert use == f"to use it: export EXPERT_CACHE_LIB={out}"
    assert native.load("host", out).backend == "host"
    assert not library(image, "host").exists() and left_over(tmp_path) == []


@pytest.mark.skipif(
    not all(map(shutil.which, ("clang-19", "lld-19", "clang-offload-bundler-19", "gcc"))),
    reason="no clang-19 with lld and its offload bundler",
)
def test_hipcc_is_found_and_its_library_looked_at_without_rocm(image, tmp_path):
    hipcc = tmp_path / "rocm" / "bin" / "hipcc"
    hipcc.parent.mkdir(parents=True)
    hipcc.write_text(HIPCC)
    hipcc.chmod(0o755)
    words = ["build", "--with", "hipcc", "--arch", "gfx1100,gfx90a"]
    outcome = image.call(*words, HIP_PATH=str(tmp_path / "rocm"))
    built = library(image, "hip")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == (
        "building for gfx1100 gfx90a (as asked)\n"
        f"built {built}: gfx1100 gfx90a; not loaded, which takes a ROCm build of torch\n"
    )
    checksum = hashlib.sha256(built.read_bytes()).hexdigest()
    beside = built.with_name(f"{built.name}.sha256").read_text()
    assert beside == f"{checksum}  libexpertcache_hip.so\n"


# --- What is chosen ---


@pytest.fixture
def here(monkeypatch):
    """Sets what the machine has."""

    def set_machine(torch=None, amd=(), nvidia=(), compilers=()):
        monkeypatch.setattr(builder, "torch_backend", lambda: (torch, "2.99" if torch else ""))
        monkeypatch.setattr(builder, "amd_architectures", lambda: amd)
        monkeypatch.setattr(builder, "nvidia_architectures", lambda: nvidia)
        monkeypatch.setattr(builder, "_has_compiler", compilers.__contains__)

    set_machine()
    return set_machine


@pytest.mark.parametrize("archs, compiler, backend", [
    (["gfx1100"], "", "hip"), (["gfx90a", "gfx942"], "hipcc", "hip"), ([], "clang", "hip"),
    (["sm_90", "sm_120a"], "", "cuda"), ([], "nvcc", "cuda"), (["host"], "", "host"),
])  # fmt: skip
def test_what_is_asked_for_wins(here, archs, compiler, backend):
    here(torch="cuda" if backend == "hip" else "hip", amd=("gfx942",), nvidia=("sm_90",))
    assert builder.choose_backend(archs, compiler) == (backend, "as asked")


@pytest.mark.parametrize("machine, backend, why", [
    (dict(torch="hip", nvidia=("sm_90",)), "hip", "for torch 2.99"),
    (dict(torch="cuda", amd=("gfx1036",)), "cuda", "for torch 2.99"),
    (dict(torch="host", amd=("gfx942",), compilers=("cuda",)), "hip", "the GPU found here"),
    (dict(nvidia=("sm_90",)), "cuda", "the GPU found here"),
    (dict(compilers=("cuda",)), "cuda", "the one compiler found here, no GPU"),
])  # fmt: skip
def test_else_pytorch_then_the_gpu_then_the_compiler_decides(here, machine, backend, why):
    here(**machine)
    assert builder.choose_backend([], "") == (backend, why)


@pytest.mark.parametrize("machine, archs, compiler, line", [
    ({}, ["gfx942", "sm_90"], "", "--arch gfx942, --arch sm_90: one library is for one kind"),
    ({}, ["sm_90"], "hipcc", "--arch sm_90, --with hipcc: one library is for one kind"),
    ({}, ["mi300"], "", "--arch mi300: must be like gfx942 (AMD), sm_90 (NVIDIA), or host"),
    ({}, [], "gcc", "--with gcc: must be one of clang, hipcc, nvcc"),
    (dict(amd=("gfx942",), nvidia=("sm_90",)), [], "", "GPUs of AMD and of NVIDIA are here"),
    (dict(compilers=("hip", "cuda")), [], "", "no GPU is here, and compilers for both"),
    ({}, [], "", "no GPU is here and no compiler"),
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused(here, machine, archs, compiler, line):
    here(**machine)
    with pytest.raises(CommandError) as error:
        builder.choose_backend(archs, compiler)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_an_installed_pytorch_is_recognised_by_its_version_file(image):
    put_torch(image.python, hip="6.4")
    # It is imported only to ask for GPUs; this one cannot be.
    (image.python.site_packages / "torch" / "__init__.py").write_text("raise ImportError('no')")
    outcome = image.call("build", CLANG="/no/clang")
    assert outcome.out == (
        "building for the usual hip architectures, as no GPU is here (for torch 2.99)\n"
    )
    assert "CLANG=/no/clang: no such command" in outcome.err


def test_pytorch_is_asked_for_gpus_that_the_driver_does_not_list(image):
    code = (
        "class version: hip = '6.4'\n"
        "class cuda:\n"
        " is_available = lambda: True\n"
        " device_count = lambda: 1\n"
        " def get_device_properties(index):\n"
        "  class gpu: name, gcnArchName, total_memory = 'x', 'gfx1151:xnack-', 1\n"
        "  gpu.major, gpu.minor = 11, 5\n"
        "  return gpu\n"
    )
    put_torch(image.python, code, hip="6.4")
    outcome = image.call("build", CLANG="/no/clang")
    assert outcome.out == "building for gfx1151 (for torch 2.99)\n"


# --- What goes wrong ---


@needs_compiler
def test_a_library_that_does_not_compile_leaves_the_old_one(image):
    source = image.package / "hip" / "expert_cache.hip.cpp"
    source.write_text("#error broken on purpose\n" + source.read_text())
    library(image, "host").write_text("the old one")
    line = image.refusal("build", "--arch", "host")
    assert line.startswith("the compiler failed: ") and "broken on purpose" in line
    command = f"bash {image.package}/hip/build.sh host /tmp/out.so"
    assert line.endswith(f"`{command}` shows all that it says")
    assert library(image, "host").read_text() == "the old one"
    assert left_over(image.package / "lib") == []


@pytest.mark.parametrize("wrong, said", [
    ({"abi": 7}, "what was built does not load: has ABI version 7, but this package needs"),
    ({"backend": "cuda"}, "what was built does not load: is a cuda library, but this device"),
    ({"without": ["expert_cache_gather"]}, "what was built is of no use: has no function expert_c"),
])  # fmt: skip
def test_a_library_that_is_of_no_use_is_not_put_into_place(image, tmp_path, wrong, said):
    made = stand_in(tmp_path / "made.so", **wrong)
    script = image.package / "hip" / "build.sh"
    script.write_text(f'cp {made} "$2"\n')
    library(image, "host").write_text("the old one")
    assert image.refusal("build", "--arch", "host").startswith(said)
    assert library(image, "host").read_text() == "the old one"


def test_what_the_build_script_misses_is_passed_on(image):
    line = image.refusal("build", "--arch", "host", CXX="/no/compiler")
    assert line == "CXX=/no/compiler: no such command"


def test_a_package_without_sources_says_where_they_belong(image):
    shutil.rmtree(image.package / "hip")
    line = image.refusal("build", "--arch", "host")
    assert line.startswith(f"{image.package}: has no kernel sources")


@pytest.mark.parametrize("output, said", [
    ("/no/such/folder/x.so", "/no/such/folder: no such folder"),
    ("/proc/x.so", "/proc: cannot be written; `--output FILE` builds elsewhere"),
    ("/tmp", "--output /tmp: is a folder; name the file"),
])  # fmt: skip
def test_a_place_that_is_none_is_refused_before_compiling(image, output, said):
    line = image.refusal("build", "--arch", "host", "--output", output, CXX=os.devnull)
    assert line.startswith(said)
