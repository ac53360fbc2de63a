"""Virtual memory of the HIP build against the stand-in, which maps host memory instead.

The order and the sizes of the calls matter: ROCm maps a handle whole or not at all, loses track
of a mapping above 256 MiB, sets access only from the start of a reservation, and unmaps one
mapped chunk a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hip_stand_in
import pytest
from hip_stand_in import StandIn, in_new_process

from expert_cache_shim import native

MIB = 1 << 20
CHUNK = 256 * MIB
PRIVATE, SHARED = 6 * MIB, 600 * MIB
DEVICE = 3
OUT_OF_MEMORY, LAUNCH_FAILURE, NOT_SUPPORTED = 2, 719, 801
NOTHING = {"handles": 0, "reservations": 0, "mappings": 0}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hip_stand_in.build(tmp_path_factory.mktemp("stand_in"))


# ---- what runs in a process of its own ----


def life_of_a_range(folder: Path) -> dict[str, Any]:
    stand_in = StandIn(folder)
    library = native.load("hip")
    found: dict[str, Any] = {"granularity": library.granularity(DEVICE)}

    stand_in.forget()
    memories = [library.create_memory(DEVICE, size) for size in (PRIVATE, SHARED)]
    found["create"] = stand_in.calls("hipMemCreate")

    stand_in.forget()
    range_, found["address"] = library.create_range(DEVICE, memories)
    found["map"] = stand_in.calls(
        "hipMemAddressReserve", "hipMemMap", "hipMemSetAccess", "hipMemUnmap"
    )

    stand_in.forget()
    library.free_range(range_)
    found["unmap"] = stand_in.calls("hipMemUnmap", "hipMemAddressFree", "hipMemRelease")
    found["without range"] = stand_in.live()

    for memory in memories:
        library.free_memory(memory)
    found["at last"] = stand_in.live()
    return found


def two_ranges(folder: Path) -> dict[str, bytes]:
    """Bytes seen through two ranges whose second memory is the same."""
    StandIn(folder)
    library = native.load("hip")
    ours, theirs, shared = (
        library.create_memory(DEVICE, size) for size in (PRIVATE, PRIVATE, SHARED)
    )
    (_, left), (_, right) = (library.create_range(DEVICE, [m, shared]) for m in (ours, theirs))
    last = PRIVATE + SHARED - 5
    ctypes.memmove(left, b"left!", 5)
    ctypes.memmove(right, b"right", 5)
    ctypes.memmove(left + last, b"alias", 5)
    return {
        "left": ctypes.string_at(left, 5),
        "right": ctypes.string_at(right, 5),
        "right, shared": ctypes.string_at(right + last, 5),
    }


def failing_memory(folder: Path, function: str, nth: int, injected: int) -> dict[str, Any]:
    stand_in = StandIn(folder)
    library = native.load("hip")
    stand_in.fail(function, nth, injected)
    found = failure_of(library.create_memory, DEVICE, SHARED)
    found["live"] = stand_in.live()
    library.create_memory(DEVICE, SHARED)
    return found | {"retried": stand_in.live()}


def failing_range(folder: Path, function: str, nth: int) -> dict[str, Any]:
    stand_in = StandIn(folder)
    library = native.load("hip")
    memories = [library.create_memory(DEVICE, size) for size in (PRIVATE, SHARED)]
    before = stand_in.live()
    stand_in.fail(function, nth, LAUNCH_FAILURE)
    found = failure_of(library.create_range, DEVICE, memories)
    found |= {"before": before, "live": stand_in.live()}
    _, address = library.create_range(DEVICE, memories)
    ctypes.memset(address + PRIVATE + SHARED - 1, 1, 1)
    return found


def without_virtual_memory(folder: Path) -> dict[str, Any]:
    StandIn(folder)
    library = native.load("hip")
    library.gather(
        native.Gather(
            tensors=0x1000, state=0x2000, tensor_count=1, experts=8, chunks=1, lanes=1, threads=64
        )
    )
    return failure_of(library.create_memory, DEVICE, PRIVATE)


def failure_of(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """The code and the text of the KernelError that a call raises."""
    try:
        function(*arguments)
    except native.KernelError as error:
        return {"code": error.code, "message": str(error)}
    return {"code": 0, "message": ""}


# ---- tests ----


@pytest.fixture(scope="module")
def life(stand_in: Path) -> dict[str, Any]:
    return in_new_process(life_of_a_range, stand_in)


def test_granularity_is_the_runtime_s(life: dict[str, Any]) -> None:
    assert life["granularity"] == 2 * MIB


def test_memory_is_made_in_chunks_of_at_most_256_mib(life: dict[str, Any]) -> None:
    sizes = [call["size"] for call in life["create"]]
    assert sizes == [PRIVATE, CHUNK, CHUNK, SHARED - 2 * CHUNK]


def test_memory_is_pinned_memory_of_the_device(life: dict[str, Any]) -> None:
    for call in life["create"]:
        assert call["type"] == 1  # hipMemAllocationTypePinned
        assert call["location"] == f"1,{DEVICE}"  # hipMemLocationTypeDevice


def test_a_range_is_one_reservation_every_chunk_whole_and_one_access_over_all(
    life: dict[str, Any],
) -> None:
    reserve, *maps, access = life["map"]
    base = life["address"]
    assert reserve.function == "hipMemAddressReserve"
    assert (reserve["address"], reserve["size"]) == (base, PRIVATE + SHARED)

    assert {call.function for call in maps} == {"hipMemMap"}
    end = base
    for call, made in zip(maps, life["create"], strict=True):
        assert (call["address"], call["size"], call["offset"]) == (end, made["size"], 0)
        assert call["handle"] == made["handle"]
        end += made["size"]
    assert end == base + PRIVATE + SHARED

    assert access.function == "hipMemSetAccess"
    assert (access["address"], access["size"]) == (base, PRIVATE + SHARED)
    assert access["location"] == f"1,{DEVICE}"
    assert (access["access"], access["count"]) == (3, 1)  # read and write


def test_freeing_a_range_unmaps_each_chunk_and_gives_the_addresses_back(
    life: dict[str, Any],
) -> None:
    *unmaps, free = life["unmap"]
    assert {call.function for call in unmaps} == {"hipMemUnmap"}
    mapped = {(call["address"], call["size"]) for call in life["map"][1:-1]}
    assert {(call["address"], call["size"]) for call in unmaps} == mapped
    assert len(unmaps) == len(mapped)
    assert free.function == "hipMemAddressFree"
    assert (free["address"], free["size"]) == (life["address"], PRIVATE + SHARED)


def test_memories_outlive_ranges_and_are_freed_whole(life: dict[str, Any]) -> None:
    assert life["without range"] == {"handles": 4, "reservations": 0, "mappings": 0}
    assert life["at last"] == NOTHING


def test_ranges_share_a_memory_and_only_that(stand_in: Path) -> None:
    assert in_new_process(two_ranges, stand_in) == {
        "left": b"left!",
        "right": b"right",
        "right, shared": b"alias",
    }


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_memory_that_cannot_be_made_leaves_nothing(stand_in: Path, nth: int) -> None:
    found = in_new_process(failing_memory, stand_in, "hipMemCreate", nth, LAUNCH_FAILURE)
    assert found["code"] == LAUNCH_FAILURE and "unspecified launch failure" in found["message"]
    assert found["live"] == NOTHING
    assert found["retried"]["handles"] == 3


@pytest.mark.parametrize(
    ("injected", "code", "text"),
    [(OUT_OF_MEMORY, -12, "out of memory"), (NOT_SUPPORTED, -13, "not supported")],
)
def test_what_the_cache_can_answer_to_has_a_code_of_its_own(
    stand_in: Path, injected: int, code: int, text: str
) -> None:
    found = in_new_process(failing_memory, stand_in, "hipMemCreate", 1, injected)
    assert found["code"] == code and text in found["message"]


@pytest.mark.parametrize(
    ("function", "nth"),
    [
        ("hipMemAddressReserve", 1),
        *(("hipMemMap", piece) for piece in (1, 2, 3, 4)),
        ("hipMemSetAccess", 1),
    ],
)
def test_a_range_that_cannot_be_made_leaves_nothing(
    stand_in: Path, function: str, nth: int
) -> None:
    found = in_new_process(failing_range, stand_in, function, nth)
    assert found["code"] == LAUNCH_FAILURE and "unspecified launch failure" in found["message"]
    assert found["live"] == found["before"]


def test_a_runtime_without_virtual_memory_still_launches(tmp_path: Path) -> None:
    """Old ROCm has no hipMem* mapping functions; the object refers to them weakly."""
    hip_stand_in.build(tmp_path, "-DWITHOUT_VIRTUAL_MEMORY")
    found = in_new_process(without_virtual_memory, tmp_path)
    assert found["code"] == -13 and "not supported" in found["message"]
