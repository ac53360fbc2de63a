"""hip_minimal.h against AMD's own HIP headers, where there are any (ROCm, or triton's wheel)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

import pytest
from code_objects import ARCHITECTURES, ROOT, output_of, require

# Everything that crosses the border to the runtime by its layout or its value.
LAYOUT = """
#include <stddef.h>
#if defined(EXPERT_CACHE_HIP_MINIMAL)
#include "hip_minimal.h"
#else
#include <hip/hip_runtime.h>
#endif
#define FIELD(type, field) offsetof(type, field), sizeof(((type *)0)->field)
extern "C" __attribute__((visibility("default"))) const size_t layout[] = {
    sizeof(dim3), FIELD(dim3, x), FIELD(dim3, y), FIELD(dim3, z),
    sizeof(hipError_t), sizeof(hipStream_t), sizeof(hipMemGenericAllocationHandle_t),
    sizeof(hipPointerAttribute_t), FIELD(hipPointerAttribute_t, type),
    FIELD(hipPointerAttribute_t, device), FIELD(hipPointerAttribute_t, devicePointer),
    FIELD(hipPointerAttribute_t, hostPointer), FIELD(hipPointerAttribute_t, isManaged),
    FIELD(hipPointerAttribute_t, allocationFlags),
    sizeof(hipMemLocation), FIELD(hipMemLocation, type), FIELD(hipMemLocation, id),
    sizeof(hipMemAllocationProp), FIELD(hipMemAllocationProp, type),
    FIELD(hipMemAllocationProp, requestedHandleType), FIELD(hipMemAllocationProp, location),
    FIELD(hipMemAllocationProp, win32HandleMetaData), FIELD(hipMemAllocationProp, allocFlags),
    sizeof(hipMemAccessDesc), FIELD(hipMemAccessDesc, location), FIELD(hipMemAccessDesc, flags),
    hipSuccess, hipErrorInvalidValue, hipErrorOutOfMemory, hipErrorNotSupported,
    hipMemAllocationTypePinned, hipMemLocationTypeDevice, hipMemAllocationGranularityMinimum,
    hipMemAccessFlagsProtReadWrite,
};
extern "C" __attribute__((visibility("default"))) const size_t layout_size =
    sizeof(layout) / sizeof(layout[0]);
"""


@pytest.fixture(scope="module")
def with_amd_headers() -> list[str]:
    """A compiler command that finds AMD's headers. The library of complex numbers that they pull
    in does not compile with clang-19; nothing here uses it."""
    require("clang-19")
    folders = [Path(os.environ.get("ROCM_PATH", "/opt/rocm"))]
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        folders.append(Path(triton.origin).parent / "backends" / "amd")
    for folder in folders:
        if (folder / "include" / "hip" / "hip_runtime.h").exists():
            return [
                "clang-19", "-x", "hip", "-std=c++17", "-nogpulib", "-D__HIP_PLATFORM_AMD__",
                "-D__CLANG_CUDA_COMPLEX_BUILTINS", f"--rocm-path={folder}",
                f"-I{folder / 'include'}", f"-I{ROOT / 'hip'}",
            ]  # fmt: skip
    pytest.skip(f"no HIP headers in {' or '.join(map(str, folders))}")


def layout(command: list[str], folder: Path) -> list[int]:
    source, library = folder / "layout.hip", folder / "layout.so"
    source.write_text(LAYOUT)
    options = ["--offload-host-only", "-no-hip-rt", "-fPIC", "-shared"]
    output_of(*command, *options, source, "-o", library)
    loaded = ctypes.CDLL(str(library))
    count = ctypes.c_size_t.in_dll(loaded, "layout_size").value
    return list((ctypes.c_size_t * count).in_dll(loaded, "layout"))


def test_types_and_values_are_amd_s(with_amd_headers: list[str], tmp_path: Path) -> None:
    minimal = [
        "clang-19", "-x", "hip", "-std=c++17", "-nogpuinc", "-nogpulib",
        "-DEXPERT_CACHE_HIP_MINIMAL", f"-I{ROOT / 'hip'}",
    ]  # fmt: skip
    for name in ("ours", "amd's"):
        (tmp_path / name).mkdir()
    ours = layout(minimal, tmp_path / "ours")
    assert len(ours) > 40
    assert ours == layout(with_amd_headers, tmp_path / "amd's")


def test_the_source_compiles_with_amd_s_headers(with_amd_headers: list[str]) -> None:
    """The way that hipcc takes: prototypes and device functions are AMD's."""
    output_of(
        *with_amd_headers, "-fsyntax-only", *(f"--offload-arch={name}" for name in ARCHITECTURES),
        '-DEXPERT_CACHE_ARCHITECTURES=""', ROOT / "hip" / "expert_cache.hip.cpp",
    )  # fmt: skip
