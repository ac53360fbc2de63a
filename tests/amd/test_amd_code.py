"""The device code of every architecture, as the disassembler shows it."""

from __future__ import annotations

import re

import pytest
from code_objects import ARCHITECTURES, LIBRARY, Kernel, extract, output_of, require

# gfx9 and gfx12 name the same instructions differently.
LOAD_16 = r"global_load_(dwordx4|b128)\b"
STORE_16 = r"global_store_(dwordx4|b128)\b"
BARRIER = r"s_barrier\b|s_barrier_wait\b"
# Memory access whose address space is only known at run time.
GENERIC = r"flat_(load|store|atomic)"
ATOMIC = (
    r"(global|flat|buffer)_atomic"
    r"|ds_(add|sub|rsub|inc|dec|min|max|and|or|xor|cmpst|cmpstore|wrxchg|storexchg)_"
)
# Exchange between the work-items of a wave, and anything that counts them: its result depends on
# whether a wave is 32 or 64 wide. readfirstlane (a uniform value moves to a scalar) is not one.
WAVE = (
    r"ds_(b?permute|swizzle|bpermute_fi)|v_(permlane|readlane|writelane|mbcnt)"
    r"|\S+_dpp\b|.*\b(row_(shl|shr|ror|share|xmask|bcast|newbcast|mirror)|quad_perm|wave_sh)"
)
LDS_LIMIT = 64 * 1024


def spills(kernel: Kernel) -> list[str]:
    """The metadata fields that tell of memory used as registers."""
    fields = (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count")
    return [field for field in fields if kernel.metadata[field] != 0]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Kernel]:
    """Kernels by (architecture, kernel)."""
    objects = extract(LIBRARY, tmp_path_factory.mktemp("code"))
    return {
        (architecture, name.removeprefix("expert_cache_").removesuffix("_kernel")): kernel
        for architecture, code_object in objects.items()
        for name, kernel in code_object.kernels.items()
    }


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["manage", "manage_general"])
def manage(
    kernels: dict[tuple[str, str], Kernel], architecture: str, request: pytest.FixtureRequest
) -> Kernel:
    return kernels[architecture, request.param]


@pytest.fixture
def gather(kernels: dict[tuple[str, str], Kernel], architecture: str) -> Kernel:
    return kernels[architecture, "gather"]


def test_no_kernel_spills(manage: Kernel, gather: Kernel) -> None:
    assert spills(manage) == spills(gather) == []


def test_shared_memory_fits_every_architecture(manage: Kernel, gather: Kernel) -> None:
    assert 0 < manage.metadata[".group_segment_fixed_size"] < LDS_LIMIT
    assert gather.metadata[".group_segment_fixed_size"] == 0


def test_workgroups_of_1024_are_allowed(manage: Kernel, gather: Kernel) -> None:
    for kernel in (manage, gather):
        assert kernel.metadata[".max_flat_workgroup_size"] == 1024


def test_wave_width_is_the_architecture_s_own(manage: Kernel, architecture: str) -> None:
    expected = 32 if architecture.startswith("gfx12") else 64
    assert manage.metadata[".wavefront_size"] == expected


def test_manage_has_barriers(manage: Kernel) -> None:
    assert manage.count(BARRIER) > 0


def test_no_instruction_depends_on_the_wave_width(manage: Kernel, gather: Kernel) -> None:
    assert manage.count(WAVE) == gather.count(WAVE) == 0


def test_no_kernel_uses_atomics(manage: Kernel, gather: Kernel) -> None:
    """Every rank must evolve the same cache, so no result may depend on who came first."""
    assert manage.count(ATOMIC) == gather.count(ATOMIC) == 0


def test_gather_moves_sixteen_bytes_a_lane(gather: Kernel) -> None:
    assert gather.count(LOAD_16) > 0
    assert gather.count(STORE_16) > 0


def test_gather_has_eight_loads_in_flight(gather: Kernel) -> None:
    """Eight 16-byte loads are issued before the first of their results is waited for."""
    runs = re.split(r"s_waitcnt vmcnt|s_wait_loadcnt", "\n".join(gather.code))
    assert max(len(re.findall(LOAD_16, run)) for run in runs) >= 8


def test_gather_knows_its_pointers_are_global(gather: Kernel) -> None:
    assert gather.count(GENERIC) == 0


# The rules above find nothing in good kernels. These kernels break each on purpose.
BAD_KERNELS = r"""
#include "hip_minimal.h"
extern "C" __global__ void generic(int **table) { *table[0] += 1; }
extern "C" __global__ void atomic(int *p) {
  __hip_atomic_fetch_add(p, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
extern "C" __global__ void shared_atomic(int *p) {
  __shared__ int sum;
  __hip_atomic_fetch_max(&sum, p[threadIdx.x], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  p[0] = sum;
}
extern "C" __global__ void permute(int *p) { p[0] = __builtin_amdgcn_ds_bpermute(p[1], p[2]); }
extern "C" __global__ void lanes(int *p) { p[0] = __builtin_amdgcn_mbcnt_lo(p[1], 0); }
extern "C" __global__ void dpp(int *p) {
  p[threadIdx.x] = __builtin_amdgcn_update_dpp(0, p[threadIdx.x], 0x111, 0xf, 0xf, true);
}
extern "C" __global__ void scratch(int *p) {
  volatile int local[64];
  for (int i = 0; i < 64; i++) local[i] = p[i];
  p[0] = local[p[1]];
}
"""


@pytest.fixture(scope="module")
def bad_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Kernel]]:
    """Kernels that break the rules, by architecture and name."""
    require("clang-19", "lld-19", "clang-offload-bundler-19")
    folder = tmp_path_factory.mktemp("bad")
    (folder / "bad.hip").write_text(BAD_KERNELS)
    output_of(
        "clang-19", "-x", "hip", "-O1", "-std=c++17", "-fPIC", "-shared", "-fuse-ld=lld",
        "-nogpuinc", "-nogpulib", "-no-hip-rt", "-mcode-object-version=5",
        f"-I{LIBRARY.parents[2] / 'hip'}", *(f"--offload-arch={name}" for name in ARCHITECTURES),
        folder / "bad.hip", "-o", folder / "bad.so",
    )  # fmt: skip
    objects = extract(folder / "bad.so", folder)
    return {name: code_object.kernels for name, code_object in objects.items()}


@pytest.mark.parametrize(
    ("kernel", "rule"),
    [
        ("generic", GENERIC),
        ("atomic", ATOMIC),
        ("shared_atomic", ATOMIC),
        ("permute", WAVE),
        ("lanes", WAVE),
        ("dpp", WAVE),
    ],
)
def test_a_bad_kernel_is_noticed(
    bad_kernels: dict[str, dict[str, Kernel]], architecture: str, kernel: str, rule: str
) -> None:
    assert bad_kernels[architecture][kernel].count(rule) > 0


def test_scratch_memory_is_noticed(
    bad_kernels: dict[str, dict[str, Kernel]], architecture: str
) -> None:
    assert ".private_segment_fixed_size" in spills(bad_kernels[architecture]["scratch"])
