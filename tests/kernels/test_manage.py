"""The manage kernel, on emulated workgroups, against the numpy reference after every step.

`library` runs each test in the natural order of work-items and in shuffled ones: the result
must not depend on it.
"""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import routing
from compared_layer import ComparedLayer, scramble
from guarded import Guarded

from expert_cache_shim.native import KernelError
from expert_cache_shim.policy import CODES, MAX_IDS

TRACES = np.load(Path(__file__).parent.parent / "data" / "routing_slice.npz")
MODES = ["rows", "scratch", "skip"]


@pytest.fixture(params=[0, 5, 11], ids=["natural", "shuffled-5", "shuffled-11"])
def library(host_library, request):
    host_library.shuffle(request.param)
    yield host_library
    host_library.shuffle(0)


@pytest.mark.parametrize("policy", CODES)
@pytest.mark.parametrize("kind", routing.KINDS)
def test_kinds_of_routing(library, policy, kind):
    layer = ComparedLayer(library, 64, 16, policy)
    generator = np.random.default_rng(3)
    for ids in islice(routing.KINDS[kind](generator, 64), 40):
        layer.step(ids)


@pytest.mark.parametrize("policy", CODES)
@pytest.mark.parametrize("experts, slots", [
    (2, 1), (3, 1), (3, 2), (31, 1), (31, 7), (31, 30), (128, 1), (128, 32), (128, 127),
    (512, 128), (512, 511), (1024, 1), (1024, 256), (1024, 1023),
])  # fmt: skip
def test_sizes_with_modes_interleaved(library, policy, experts, slots):
    layer = ComparedLayer(library, experts, slots, policy)
    generator = np.random.default_rng(experts + slots)
    steps = [islice(kind(generator, experts), 4) for kind in routing.KINDS.values()]
    for ids in (ids for kind in steps for ids in kind):
        layer.step(ids, generator.choice(MODES, p=[0.5, 0.4, 0.1]))


@pytest.mark.parametrize("policy", CODES)
@pytest.mark.parametrize("trace, experts", [("gpt_oss_20b", 32), ("deepseek_v2_lite", 64)])
def test_real_routing_across_a_change_of_prompt(host_library, policy, trace, experts):
    layer = ComparedLayer(host_library, experts, experts // 4, policy)
    for ids in TRACES[trace][200:400, 1]:
        layer.step(ids.astype(np.int32)[None])


@pytest.mark.parametrize("mode", ["rows", "scratch"])
@pytest.mark.parametrize("policy", CODES)
def test_any_reachable_state(library, policy, mode):
    """Equal scores, ages round the clamp, steps near the wrap, counts about to saturate."""
    generator = np.random.default_rng(17)
    for experts, slots in [(2, 1), (16, 5), (64, 63), (128, 32)]:
        layer = ComparedLayer(library, experts, slots, policy)
        for _ in range(12):
            scramble(layer, generator)
            ids = generator.integers(0, experts, (generator.integers(1, experts), 2))
            layer.step(ids, mode)


@pytest.mark.parametrize("policy", CODES)
def test_the_step_wraps(library, policy):
    layer = ComparedLayer(library, 16, 4, policy)
    layer.reference.step_number = 2**32 - 6
    layer.put_state()
    generator = np.random.default_rng(1)
    for ids in islice(routing.skewed(generator, 16), 14):
        layer.step(ids)
    assert layer.reference.step_number == 8


@pytest.mark.parametrize("policy, decay", [
    ("lrfu", 1), ("lrfu", 32768), ("lrfu", 65535), ("lfu", 1), ("lfu", 3), ("lfu", 2**32 - 1),
])  # fmt: skip
def test_every_decay(library, policy, decay):
    layer = ComparedLayer(library, 32, 8, policy, decay)
    generator = np.random.default_rng(decay)
    for ids in islice(routing.skewed(generator, 32), 20):
        layer.step(ids)


# Ids


@pytest.mark.parametrize("mode", ["rows", "scratch"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_ids_that_name_no_expert(library, dtype, mode):
    layer = ComparedLayer(library, 31, 7, "lrfu")
    strangers = np.array([-1, 31, 2**30, -31, 2**31 - 1, -(2**31)], np.int64).astype(dtype)
    generator = np.random.default_rng(2)
    for _ in range(6):
        ids = generator.integers(0, 31, (5, 4)).astype(dtype)
        chosen = generator.random(ids.shape) < 0.4
        ids[chosen] = generator.choice(strangers, np.count_nonzero(chosen))
        layer.step(ids, mode)
    layer.step(strangers[None], mode)
    assert layer.reference.counters["idle"] == 1


def test_an_int64_id_with_a_dirty_upper_half_is_not_valid(library):
    layer = ComparedLayer(library, 31, 7, "lru")
    ids = np.array([[3, 3 + 2**32, 5 - 2**32, 4 + 2**62, 6 - 2**63]], np.int64)
    rows = layer.step(ids)
    assert rows.tolist() == [[0, *ids[0, 1:]]]
    assert layer.reference.counters["ids"] == 1


def test_an_unsigned_id_of_all_ones_is_not_valid(library):
    layer = ComparedLayer(library, 31, 7, "lru")
    rows = layer.step(np.array([[0xFFFFFFFF, 2]], np.uint32))
    assert rows.tolist() == [[0xFFFFFFFF, 0]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
@pytest.mark.parametrize("form", [
    "contiguous", "padded rows", "every second column", "transposed", "one row repeated",
])  # fmt: skip
def test_strided_ids(library, dtype, form):
    """What lies between the ids names experts too: reading it would show."""
    base = np.random.default_rng(4).integers(0, 64, (12, 12)).astype(dtype)
    ids = {
        "contiguous": base,
        "padded rows": base[:, :5],
        "every second column": base[::3, 1::2],
        "transposed": base[:, :5].T,
        "one row repeated": np.broadcast_to(base[0, :5], (7, 5)),
    }[form]
    layer = ComparedLayer(library, 64, 20, "lrfu")
    layer.step(ids)
    layer.step(ids, "scratch")


@pytest.mark.parametrize("count", [
    1, 2, 63, 64, 65, 255, 256, 257, 511, 513, 1023, 1024, 1025, 4097, MAX_IDS - 1, MAX_IDS,
])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_counts_of_ids(library, count, dtype):
    layer = ComparedLayer(library, 128, 40, "lrfu")
    ids = np.full((1, count), 130, dtype)
    ids[0, : count // 2] = np.arange(count // 2) % 100
    ids[0, -1] = 127  # the last id alone names this expert
    layer.step(ids)
    assert layer.reference.row_of[127] >= 0


def test_more_rows_than_columns_and_the_reverse(library):
    layer = ComparedLayer(library, 16, 4, "lru")
    ids = np.random.default_rng(5).integers(-1, 17, (300, 1))
    layer.step(ids)
    layer.step(np.ascontiguousarray(ids.T))


# Counters


def test_counters_are_64_bit_and_the_mirror_follows(library):
    layer = ComparedLayer(library, 16, 4, "lru")
    layer.reference.counters = dict.fromkeys(layer.reference.counters, 2**32 - 1)
    layer.put_state()
    for first, mode in [(1, "rows"), (3, "scratch"), (8, "skip"), (-9, "rows")]:
        layer.step(np.arange(first, first + 6)[None], mode)
    assert layer.mirror.array.min() >= 2**32


def test_the_mirror_may_be_left_out(library):
    layer = ComparedLayer(library, 16, 4, "lru", mirror=False)
    for mode in MODES:
        layer.step(np.array([[1, 2, 3, 4, 5, 6]]), mode)


def test_equal_histories_give_equal_states(host_library):
    """Two ranks that see the same routing hold the same cache, whatever order they ran in."""
    states = []
    for seed in (0, 1, 2):
        host_library.shuffle(seed)
        layer = ComparedLayer(host_library, 64, 16, "lrfu")
        for ids in islice(routing.skewed(np.random.default_rng(6), 64), 25):
            layer.step(ids)
        states.append(layer.state.array[: 8 + 4 * 64].tolist())
    host_library.shuffle(0)
    assert states[0] == states[1] == states[2]


# Arguments


BAD_ARGUMENTS = [
    (-1, dict(experts=1)),
    (-1, dict(experts=0)),
    (-1, dict(experts=-8)),
    (-1, dict(experts=1025)),
    (-2, dict(slots=0)),
    (-2, dict(slots=-1)),
    (-2, dict(slots=16)),
    (-3, dict(id_rows=0)),
    (-3, dict(id_columns=0)),
    (-3, dict(id_rows=-1)),
    (-3, dict(id_rows=-1, id_columns=-1)),
    (-3, dict(id_rows=1, id_columns=MAX_IDS + 1)),
    (-3, dict(id_rows=MAX_IDS + 1, id_columns=1)),
    (-3, dict(id_rows=2**32, id_columns=2**32)),
    (-3, dict(id_row_stride=-1)),
    (-3, dict(id_column_stride=-1)),
    (-3, dict(id_column_stride=2**62)),  # times three columns it is more than an int64 holds
    (-3, dict(id_column_stride=2**39 + 1)),
    (-3, dict(id_rows=2, id_row_stride=2**40 - 1)),
    (-4, dict(id_type=3)),
    (-4, dict(id_type=-1)),
    (-5, dict(policy=5)),
    (-5, dict(policy=-1)),
    (-6, dict(decay=0)),
    (-6, dict(decay=65536)),
    (-6, dict(policy=CODES["lfu"], decay=0)),
    (-6, dict(policy=CODES["lru"], decay=1)),
    (-6, dict(policy=CODES["fifo"], decay=1)),
    (-6, dict(policy=CODES["slru"], decay=1)),
    (-7, dict(mode=3)),
    (-7, dict(mode=-1)),
    (-8, dict(ids=None)),
    (-8, dict(row_ids=None)),
    (-8, dict(state=None)),
    (-8, dict(counters=None)),
]


@pytest.mark.parametrize("code, changes", BAD_ARGUMENTS)
def test_a_bad_argument_is_refused_and_nothing_is_stored(host_library, code, changes):
    layer = ComparedLayer(host_library, 16, 4, "lrfu")
    ids = np.array([[1, 2, 3]])
    row_ids = Guarded(ids.shape, np.int64)
    layer.set_ids(ids, row_ids, "rows")
    for name, value in changes.items():
        setattr(layer.args, name, value)
    buffers = [layer.state, layer.counters, layer.mirror, row_ids]
    before = [buffer.memory.copy() for buffer in buffers]
    with pytest.raises(KernelError) as error:
        host_library.manage(layer.args)
    assert error.value.code == code
    assert all((b.memory == old).all() for b, old in zip(buffers, before))


@pytest.mark.parametrize("field, offset", [
    ("ids", 4), ("row_ids", 4), ("state", 4), ("state", 8), ("counters", 4),
    ("counters_mirror", 4),
])  # fmt: skip
def test_a_misaligned_pointer_is_refused(host_library, field, offset):
    layer = ComparedLayer(host_library, 16, 4, "lrfu")
    ids = np.array([[1, 2, 3]])
    row_ids = Guarded(ids.shape, np.int64)
    layer.set_ids(ids, row_ids, "rows")
    setattr(layer.args, field, getattr(layer.args, field) + offset)
    with pytest.raises(KernelError) as error:
        host_library.manage(layer.args)
    assert error.value.code == -8


def test_row_ids_in_place_of_the_ids_are_refused(host_library):
    layer = ComparedLayer(host_library, 16, 4, "lrfu")
    row_ids = Guarded((1, 3), np.int64)
    layer.set_ids(row_ids.array, row_ids, "rows")
    with pytest.raises(KernelError) as error:
        host_library.manage(layer.args)
    assert error.value.code == -8


@pytest.mark.parametrize("shift", [-2, -1, 1, 2, 4])
def test_row_ids_that_overlap_the_ids_are_refused(host_library, shift):
    """Ids are read again after the first row ids are stored."""
    layer = ComparedLayer(host_library, 16, 4, "lrfu")
    row_ids = Guarded((1, 9), np.int64)
    layer.set_ids(row_ids.array[:, 2:7:2], row_ids, "rows")
    layer.args.row_ids = layer.args.ids + 8 * shift
    with pytest.raises(KernelError) as error:
        host_library.manage(layer.args)
    assert error.value.code == -8


def test_row_ids_may_lie_next_to_the_ids(host_library):
    layer = ComparedLayer(host_library, 16, 4, "lrfu")
    memory = Guarded((3, 3), np.int64)
    memory.array[:] = 5
    for row in (0, 2):
        layer.set_ids(memory.array[1:2], memory, "rows")
        layer.args.row_ids = memory.address + row * 3 * 8
        host_library.manage(layer.args)
    assert memory.array.tolist() == [[0, 0, 0], [5, 5, 5], [0, 0, 0]]


def test_32_bit_ids_need_no_more_than_their_own_alignment(library):
    layer = ComparedLayer(library, 16, 4, "lrfu")
    layer.step(np.arange(9, dtype=np.int32)[None, 1:])
    with pytest.raises(KernelError) as error:
        layer.args.ids += 2
        library.manage(layer.args)
    assert error.value.code == -8


def test_no_arguments_at_all_are_refused(host_library):
    with pytest.raises(KernelError) as error:
        host_library.manage(None)
    assert error.value.code == -8
