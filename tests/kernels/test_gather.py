"""The gather kernel, on emulated workgroups: every byte of every buffer against a numpy copy."""

import numpy as np
import pytest
import routing
from compared_layer import ComparedLayer
from compared_tensors import (
    ComparedTensors,
    Shape,
    copies_to_rows,
    copies_to_scratch,
    state_with,
)

from expert_cache_shim.native import KernelError

RECORDS = [1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 33, 64, 255, 4096, 4100, 65537]


@pytest.fixture(params=[0, 5], ids=["natural", "shuffled"])
def library(host_library, request):
    host_library.shuffle(request.param)
    yield host_library
    host_library.shuffle(0)


def both_forms(library, experts, shapes, count, **grid):
    """Gathers as mode rows and as mode scratch do."""
    generator = np.random.default_rng(count)
    copies = copies_to_rows(generator, experts, count)
    tensors = ComparedTensors.filled(experts, shapes, scratch=False)
    tensors.gather(library, copies, state_with(copies, experts), **grid)
    copies = copies_to_scratch(generator, experts, count)
    tensors = ComparedTensors.filled(experts, shapes, scratch=True)
    tensors.gather(library, copies, state_with(copies, experts), **grid)


@pytest.mark.parametrize("record", RECORDS)
def test_record_sizes(library, record):
    both_forms(library, 9, [Shape(record, record)], 7)


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("gap", [1, 2, 3, 4, 12, 16, 20])
def test_bytes_between_record_and_stride_stay(library, record, gap):
    both_forms(library, 5, [Shape(record, record + gap)], 5)


@pytest.mark.parametrize("source, slots, rows", [
    (4, 4, 4), (8, 8, 8), (1, 1, 1), (2, 2, 2), (0, 4, 8), (4, 0, 0), (0, 4, 0), (0, 0, 4),
    (1, 0, 0), (0, 1, 0), (0, 0, 1), (15, 13, 11), (0, 2, 0), (0, 0, 12),
])  # fmt: skip
@pytest.mark.parametrize("record, stride", [(4100, 4112), (64, 64), (33, 36), (4096, 4097)])
def test_misaligned_bases(library, record, stride, source, slots, rows):
    both_forms(library, 6, [Shape(record, stride, source, slots, rows)], 6)


@pytest.mark.parametrize("tensors", [1, 2, 3, 7, 20, 256])
def test_many_tensors_of_unlike_sizes(library, tensors):
    generator = np.random.default_rng(tensors)
    shapes = []
    for _ in range(tensors):
        record = int(generator.choice(RECORDS[:-2]))
        stride = record + int(generator.choice([0, 0, 1, 4, 16]))
        shapes.append(Shape(record, stride, *generator.choice([0, 0, 4, 1], 3).tolist()))
    both_forms(library, 8, shapes, 6)


@pytest.mark.parametrize("chunks, lanes, threads", [
    (1, 1, 64), (1, 1, 1024), (2, 8, 512), (16, 64, 0), (3, 5, 128), (7, 1, 256), (1, 100, 64),
    (300, 1, 64), (15, 4096, 64), (4096, 15, 64),
])  # fmt: skip
def test_grids(host_library, chunks, lanes, threads):
    shapes = [Shape(4100, 4112), Shape(3, 3), Shape(65536, 65536)]
    both_forms(host_library, 9, shapes, 8, chunks=chunks, lanes=lanes, threads=threads)


@pytest.mark.parametrize("count", [0, 1, 2, 8, 9])
@pytest.mark.parametrize("lanes, device_lanes", [(1, 1), (1, 8), (3, 2), (1, 100)])
def test_lanes_of_their_own_for_copies_of_hits(library, lanes, device_lanes, count):
    shapes = [Shape(4100, 4112), Shape(3, 3)]
    both_forms(library, 9, shapes, count, lanes=lanes, device_lanes=device_lanes)


@pytest.mark.parametrize("experts, count", [(2, 0), (2, 2), (31, 31), (1024, 1), (1024, 1024)])
def test_numbers_of_copies(library, experts, count):
    both_forms(library, experts, [Shape(20, 20), Shape(32, 32)], count)


@pytest.mark.parametrize("policy", ["lrfu", "slru"])
def test_manage_and_gather_keep_every_slot_true(library, policy):
    """After any step a resident's record lies in its slot, and a routed one's in its row."""
    experts, slots = 31, 7
    generator = np.random.default_rng(8)
    layer = ComparedLayer(library, experts, slots, policy)
    by_mode = {"scratch": ComparedTensors.filled(experts, [Shape(100, 112), Shape(3, 3)], True)}
    by_mode["rows"] = by_mode["scratch"].over_slots()
    steps = routing.random(generator, experts)
    for _ in range(60):
        mode = generator.choice(["rows", "scratch", "skip"], p=[0.5, 0.4, 0.1])
        ids = next(steps)
        rows = layer.step(ids, mode)
        if mode == "skip":
            continue
        tensors = by_mode[mode]
        own_lanes = 3 if mode == "scratch" else 0
        tensors.gather(library, layer.reference.copies, layer.state, device_lanes=own_lanes)
        valid = (ids >= 0) & (ids < experts)
        held = [(e, s) for s, e in enumerate(layer.reference.expert_at[:slots]) if e >= 0]
        for index in range(len(tensors.shapes)):
            for expert, slot in held:
                assert tensors.holds(tensors.slots, index, slot, expert)
            for expert, row in zip(ids[valid], rows[valid]):
                assert tensors.holds(tensors.rows, index, row, expert)


# Arguments


@pytest.mark.parametrize("code, changes", [
    (-9, dict(tensor_count=0)),
    (-9, dict(tensor_count=-1)),
    (-9, dict(tensor_count=257)),
    (-1, dict(experts=1)),
    (-1, dict(experts=1025)),
    (-10, dict(chunks=0)),
    (-10, dict(chunks=-1)),
    (-10, dict(chunks=4097)),
    (-10, dict(lanes=0)),
    (-10, dict(lanes=4097)),
    (-10, dict(chunks=256, lanes=256)),
    (-10, dict(device_lanes=-1)),
    (-10, dict(device_lanes=4097)),
    (-10, dict(chunks=256, device_lanes=256)),
    (-10, dict(chunks=4096, lanes=4096)),
    (-10, dict(threads=32)),
    (-10, dict(threads=-64)),
    (-10, dict(threads=96)),
    (-10, dict(threads=2048)),
    (-8, dict(tensors=None)),
    (-8, dict(state=None)),
])  # fmt: skip
def test_a_bad_argument_is_refused(host_library, code, changes):
    copies = copies_to_rows(np.random.default_rng(0), 4, 4)
    state = state_with(copies, 4)
    tensors = ComparedTensors.filled(4, [Shape(16, 16)], scratch=False)
    before = tensors.slots[0].memory.copy()
    args = tensors.arguments(state, 1, 1, 64)
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(KernelError) as error:
        host_library.gather(args)
    assert error.value.code == code
    assert (tensors.slots[0].memory == before).all()


@pytest.mark.parametrize("field, offset", [("state", 4), ("tensors", 4)])
def test_a_misaligned_pointer_is_refused(host_library, field, offset):
    copies = copies_to_rows(np.random.default_rng(0), 4, 4)
    state = state_with(copies, 4)
    tensors = ComparedTensors.filled(4, [Shape(16, 16)], scratch=False)
    args = tensors.arguments(state, 1, 1, 64)
    setattr(args, field, getattr(args, field) + offset)
    with pytest.raises(KernelError) as error:
        host_library.gather(args)
    assert error.value.code == -8


def test_no_arguments_at_all_are_refused(host_library):
    with pytest.raises(KernelError) as error:
        host_library.gather(None)
    assert error.value.code == -8
