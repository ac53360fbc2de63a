"""The committed object against the stand-in runtime: loading, registration, launches, errors.

Kernels do not run here: what is checked is everything up to the runtime's door.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import hip_stand_in
import pytest
from code_objects import LIBRARY, extract
from hip_stand_in import StandIn, in_new_process

from expert_cache_shim import native

EXPERTS, SLOTS, STREAM = 128, 32, 0x5EA
MANAGE, MANAGE_GENERAL, GATHER, PRELOAD = (
    f"expert_cache_{name}_kernel" for name in ("manage", "manage_general", "gather", "preload")
)
INVALID_VALUE, LAUNCH_FAILURE = 1, 719


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hip_stand_in.build(tmp_path_factory.mktemp("stand_in"))


@pytest.fixture(scope="module")
def argument_sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, ...]]:
    """Bytes of each kernel's arguments, equal in every architecture's code object."""
    objects = extract(LIBRARY, tmp_path_factory.mktemp("code")).values()
    sizes = [{name: kernel.arguments for name, kernel in o.kernels.items()} for o in objects]
    assert all(other == sizes[0] for other in sizes)
    return sizes[0]


def manage_arguments() -> native.Manage:
    """Addresses are never followed: the stand-in launches nothing."""
    return native.Manage(
        ids=0x10000, row_ids=0x20000, id_rows=4, id_columns=8, id_row_stride=16, id_column_stride=1,
        state=0x30000, counters=0x40000, counters_mirror=0x50000, id_type=native.INT64,
        experts=EXPERTS, slots=SLOTS, policy=0, decay=63670, mode=0,
    )  # fmt: skip


def gather_arguments() -> native.Gather:
    return native.Gather(
        tensors=0x60000, state=0x30000, tensor_count=6, experts=EXPERTS, chunks=2, lanes=8,
        threads=512,
    )  # fmt: skip


def preload_arguments() -> native.Preload:
    return native.Preload(state=0x30000, experts=EXPERTS, slots=SLOTS)


# ---- what runs in a process of its own ----


def plain_load(folder: Path | None) -> str:
    """The loader's message when nobody made the runtime's symbols global."""
    if folder:
        StandIn(folder)
    try:
        ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return str(error)
    return ""


def load_without_runtime() -> str:
    try:
        native.load("hip")
    except native.LibraryError as error:
        return str(error)
    return ""


def load(folder: Path) -> dict[str, Any]:
    stand_in = StandIn(folder)
    library = native.load("hip")
    return {
        "calls": stand_in.calls(),
        "backend": library.backend,
        "architectures": library.architectures,
        "maps": {
            os.path.basename(line.split()[-1])
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "amdhip64" in line
        },
    }


def launch(folder: Path, sizes: dict[str, tuple[int, ...]]) -> list[hip_stand_in.Call]:
    stand_in = StandIn(folder)
    library = native.load("hip")
    for kernel, argument_sizes in sizes.items():
        stand_in.describe_arguments(kernel, argument_sizes)
    library.manage(manage_arguments(), STREAM)
    library.gather(gather_arguments(), STREAM)
    library.preload(preload_arguments(), STREAM)
    return stand_in.calls("hipLaunchKernel")


def fail_to_launch(folder: Path) -> dict[str, Any]:
    """A launch that fails, its message, and what it leaves behind."""
    stand_in = StandIn(folder)
    library = native.load("hip")
    stand_in.fail("hipLaunchKernel", 1, LAUNCH_FAILURE)
    try:
        library.gather(gather_arguments(), STREAM)
        message, code = "", 0
    except native.KernelError as error:
        message, code = str(error), error.code
    return {"message": message, "code": code, "left": stand_in.last_error()}


def refuse_arguments(folder: Path) -> tuple[int, int]:
    """The code for a bad argument, and how many launches it led to."""
    stand_in = StandIn(folder)
    library = native.load("hip")
    arguments = manage_arguments()
    arguments.slots = EXPERTS
    try:
        library.manage(arguments, STREAM)
    except native.KernelError as error:
        return error.code, len(stand_in.calls("hipLaunchKernel"))
    return 0, 0


def kinds_of_pointers(folder: Path, answers: list[tuple[int, int, int]]) -> list[int]:
    """pointer_kind() for each (runtime version, hipMemoryType, error to inject)."""
    stand_in = StandIn(folder)
    library = native.load("hip")
    found = []
    for version, type_, error in answers:
        stand_in.set_version(version)
        stand_in.set_pointer_type(type_)
        if error:
            stand_in.fail("hipPointerGetAttributes", 1, error)
        found.append(library.pointer_kind(0x1000))
    return found


def register_host(folder: Path) -> dict[str, Any]:
    """Registers twice, refused at first; the calls, the refusal, and the error that it left."""
    stand_in = StandIn(folder)
    library = native.load("hip")
    stand_in.fail("hipHostRegister", 1, INVALID_VALUE)
    found: dict[str, Any] = {}
    try:
        library.register_host(0x1000, 8192)
    except native.KernelError as error:
        found["code"] = error.code
    found["left"] = stand_in.last_error()
    library.register_host(0x1000, 8192)
    library.unregister_host(0x1000)
    found["calls"] = stand_in.calls("hipHostRegister", "hipHostUnregister")
    return found


# ---- tests ----


def test_plain_load_fails_without_a_runtime() -> None:
    assert "undefined symbol: " in in_new_process(plain_load, None)


def test_plain_load_fails_when_torch_keeps_the_runtime_private(stand_in: Path) -> None:
    message = in_new_process(plain_load, stand_in)
    assert "undefined symbol: " in message and "hip" in message


def test_load_without_a_runtime_says_what_is_missing() -> None:
    message = in_new_process(load_without_runtime)
    assert "libamdhip64" in message and "torch" in message


def test_load_promotes_the_runtime_that_torch_brought(stand_in: Path) -> None:
    found = in_new_process(load, stand_in)
    assert found["backend"] == "hip"
    assert found["architectures"] == ("gfx90a", "gfx942", "gfx1201")
    assert found["maps"] == {hip_stand_in.RUNTIME}  # no second runtime came in


def test_load_registers_one_bundle_and_every_kernel(stand_in: Path) -> None:
    binary, *functions = in_new_process(load, stand_in)["calls"]
    assert binary.function == "__hipRegisterFatBinary"
    assert binary["magic"] == 0x48495046 and binary["version"] == 1
    assert binary["bundle"] == "__CLANG_OFFLOAD_BUNDLE__"
    assert {call.function for call in functions} == {"__hipRegisterFunction"}
    every = [MANAGE, MANAGE_GENERAL, GATHER, PRELOAD]
    assert sorted(call["name"] for call in functions) == sorted(every)


def test_launches_arrive_as_asked(
    stand_in: Path, argument_sizes: dict[str, tuple[int, ...]]
) -> None:
    manage, gather, preload = in_new_process(launch, stand_in, argument_sizes)

    assert manage["name"] == MANAGE
    assert manage["grid"] == "1,1,1"
    threads, *rest = (int(size) for size in manage["block"].split(","))
    assert EXPERTS <= threads <= 1024 and threads % 64 == 0 and rest == [1, 1]
    assert manage["arguments"] == f"{bytes(manage_arguments()).hex()},"

    assert gather["name"] == GATHER
    assert gather["grid"] == "2,8,1"
    assert gather["block"] == "512,1,1"
    assert gather["arguments"] == f"{bytes(gather_arguments()).hex()},"

    assert preload["name"] == PRELOAD
    assert preload["grid"] == "1,1,1"
    assert preload["arguments"] == f"{bytes(preload_arguments()).hex()},"

    assert manage["stream"] == gather["stream"] == STREAM
    assert manage["shared"] == gather["shared"] == 0


def test_a_failed_launch_raises_with_the_runtime_s_words(stand_in: Path) -> None:
    found = in_new_process(fail_to_launch, stand_in)
    assert found["code"] == LAUNCH_FAILURE
    assert "expert_cache_gather" in found["message"]
    assert "unspecified launch failure" in found["message"]
    assert found["left"] == 0


def test_bad_arguments_launch_nothing(stand_in: Path) -> None:
    assert in_new_process(refuse_arguments, stand_in) == (-2, 0)


def test_host_memory_is_registered_and_a_refusal_leaves_no_error(stand_in: Path) -> None:
    """torch shares the runtime, and would raise what is left there at its next launch."""
    found = in_new_process(register_host, stand_in)
    assert found["code"] == INVALID_VALUE and found["left"] == 0
    register, unregister = found["calls"]
    mapped = 2  # hipHostRegisterMapped
    assert (register["pointer"], register["size"], register["flags"]) == (0x1000, 8192, mapped)
    assert unregister.function == "hipHostUnregister" and unregister["pointer"] == 0x1000


def test_pointer_kinds_follow_the_numbering_of_the_runtime(stand_in: Path) -> None:
    """hipMemoryType is {host 0, device 1} before ROCm 6, {none 0, host 1, device 2} since."""
    rocm_5, rocm_7, unknown_pointer = 50731921, 70051831, 1
    expected = {
        (rocm_5, 0, 0): native.HOST_READABLE,
        (rocm_5, 1, 0): native.DEVICE,
        (rocm_5, 0, unknown_pointer): native.HOST_UNREADABLE,
        (rocm_7, 0, 0): native.HOST_UNREADABLE,
        (rocm_7, 1, 0): native.HOST_READABLE,
        (rocm_7, 2, 0): native.DEVICE,
        (rocm_7, 3, 0): native.DEVICE,  # managed
        (rocm_7, 0, unknown_pointer): native.HOST_UNREADABLE,
    }
    found = in_new_process(kinds_of_pointers, stand_in, list(expected))
    assert found == list(expected.values())
