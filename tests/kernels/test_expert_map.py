"""manage with an expert map, as expert parallelism has it, against the numpy reference.

Most steps name experts of other ranks, and the kernel that runs next goes on using its own map:
what counts is the row to which that map takes a rewritten id.
"""

from itertools import islice

import numpy as np
import pytest
import routing
from compared_layer import ComparedLayer
from guarded import Guarded

from expert_cache_shim.native import KernelError
from expert_cache_shim.policy import CODES, Reference, ids_of_experts


@pytest.fixture(params=[0, 5], ids=["natural", "shuffled"])
def library(host_library, request):
    host_library.shuffle(request.param)
    yield host_library
    host_library.shuffle(0)


@pytest.fixture(params=routing.PLACEMENTS.values(), ids=routing.PLACEMENTS)
def placement(request):
    return request.param


def expert_of(expert_map, ids):
    """The expert that each id names, or -1; with no help of the reference."""
    return np.array([
        [expert_map[id] if 0 <= id < len(expert_map) else -1 for id in row] for row in ids.tolist()
    ])  # fmt: skip


@pytest.mark.parametrize("policy", CODES)
def test_kinds_of_routing_with_modes_interleaved(library, placement, policy):
    generator = np.random.default_rng(3)
    layer = ComparedLayer(library, 32, 8, policy, expert_map=placement(generator, 32))
    everywhere = len(layer.expert_map)
    for kind in routing.KINDS.values():
        for ids in islice(kind(generator, everywhere), 8):
            layer.step(ids, generator.choice(["rows", "scratch", "skip"], p=[0.6, 0.3, 0.1]))
    assert layer.reference.counters["hits"] > 0


def test_a_step_that_was_preloaded(library, placement):
    generator = np.random.default_rng(11)
    layer = ComparedLayer(library, 32, 8, "lrfu", expert_map=placement(generator, 32))
    for number in range(12):
        if number % 3:
            layer.preload()
        layer.step(generator.integers(0, len(layer.expert_map), (40, 4)), preloaded=number % 3 > 0)
    assert layer.reference.counters["overflow"] > 0


@pytest.mark.parametrize("experts, slots", [(2, 1), (31, 30), (128, 32), (512, 511), (1024, 1)])
def test_sizes(library, placement, experts, slots):
    generator = np.random.default_rng(experts)
    layer = ComparedLayer(library, experts, slots, "lrfu", expert_map=placement(generator, experts))
    for ids in islice(routing.independent(generator, len(layer.expert_map)), 6):
        layer.step(ids)


def test_the_map_takes_new_ids_to_the_rows_of_a_layer_that_has_only_these_experts(
    library, placement
):
    """The same history, once by ids of all ranks and once by the numbers of this rank's experts."""
    generator = np.random.default_rng(7)
    mapped = ComparedLayer(library, 24, 6, "lrfu", expert_map=placement(generator, 24))
    local = ComparedLayer(library, 24, 6, "lrfu")
    expert_map = mapped.expert_map
    for ids in islice(routing.random(generator, len(expert_map)), 30):
        experts = expert_of(expert_map, ids)
        experts[(experts < 0) | (experts >= 24)] = -1
        new_ids, rows = mapped.step(ids), local.step(experts)
        mine = experts >= 0
        assert (expert_map[new_ids[mine]] == rows[mine]).all()
        assert (new_ids[~mine] == ids[~mine]).all()
        assert (mapped.state.array[: 8 + 4 * 24] == local.state.array[: 8 + 4 * 24]).all()


def test_an_identity_map_changes_nothing(library):
    generator = np.random.default_rng(8)
    mapped = ComparedLayer(library, 16, 4, "lfu", expert_map=np.arange(16))
    plain = ComparedLayer(library, 16, 4, "lfu")
    for ids in islice(routing.random(generator, 16), 20):
        assert (mapped.step(ids) == plain.step(ids)).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_ids_that_the_map_does_not_know(library, dtype):
    layer = ComparedLayer(library, 8, 3, "lru", expert_map=np.r_[np.arange(8), [-1] * 15])
    strangers = np.array([[-1, 23, 2**30, -23, 2**31 - 1, -(2**31)]], np.int64).astype(dtype)
    assert (layer.step(strangers) == strangers).all()
    assert layer.reference.counters["idle"] == 1


def test_an_int64_id_with_a_dirty_upper_half_is_not_looked_up(library):
    layer = ComparedLayer(library, 8, 3, "lru", expert_map=np.r_[np.arange(8)[::-1], [-1] * 8])
    ids = np.array([[3, 3 + 2**32, 5 - 2**32, 4 + 2**62, 6 - 2**63]], np.int64)
    assert layer.step(ids)[0, 1:].tolist() == ids[0, 1:].tolist()
    assert layer.reference.counters["ids"] == 1


@pytest.mark.parametrize("ids", [np.full((4, 2), -1), np.array([[8, 15], [9, 8]])],
                         ids=["padding", "experts of another rank"])  # fmt: skip
def test_a_step_without_an_expert_of_this_rank_is_idle(library, ids):
    layer = ComparedLayer(library, 8, 3, "lrfu", expert_map=np.r_[np.arange(8), [-1] * 8])
    layer.step(np.array([[1, 2]]))
    assert (layer.step(ids) == ids).all()
    counters = layer.reference.counters
    assert (counters["steps"], counters["idle"], layer.reference.step_number) == (1, 1, 1)


def test_a_slice_of_a_wider_buffer(library, placement):
    """Ids of fused shared experts lie beside those of routed ones, in one persistent buffer."""
    generator = np.random.default_rng(4)
    expert_map = placement(generator, 20)
    buffer = generator.integers(0, len(expert_map), (9, 6)).astype(np.int32)
    before = buffer.copy()
    layer = ComparedLayer(library, 20, 6, "lrfu", expert_map=expert_map)
    for ids in (buffer[:5], buffer[:, :4], buffer[2:7, 1:], buffer[::2, ::3]):
        layer.step(ids)
    assert (buffer == before).all()


@pytest.mark.parametrize("count", [1, 255, 257, 4097, 100_000])
def test_counts_of_ids(library, placement, count):
    generator = np.random.default_rng(count)
    layer = ComparedLayer(library, 64, 20, "lrfu", expert_map=placement(generator, 64))
    layer.step(generator.integers(-1, len(layer.expert_map) + 1, (1, count)))


def test_two_ranks_share_the_ids_of_a_step(library):
    """Each id is rewritten by the rank that has the expert and by no other."""
    maps = [np.r_[np.arange(8), [-1] * 8], np.r_[[-1] * 8, np.arange(8)]]
    ranks = [ComparedLayer(library, 8, 3, "lrfu", expert_map=m) for m in maps]
    for ids in islice(routing.independent(np.random.default_rng(2), 16), 20):
        first, second = (rank.step(ids) for rank in ranks)
        assert (first[ids >= 8] == ids[ids >= 8]).all() and (first[ids < 8] < 8).all()
        assert (second[ids < 8] == ids[ids < 8]).all() and (second[ids >= 8] >= 8).all()


@pytest.mark.parametrize("code, changes", [
    (-8, dict(expert_ids=None)),
    (-14, dict(expert_map=None)),
    (-14, dict(expert_map=None, expert_ids=None)),
    (-14, dict(expert_map=None, map_length=0)),
    (-14, dict(map_length=0)),
    (-14, dict(map_length=7)),
    (-14, dict(map_length=-1)),
])  # fmt: skip
@pytest.mark.parametrize("mode", ["rows", "skip"])
def test_half_a_map_or_a_short_one_is_refused(host_library, code, changes, mode):
    layer = ComparedLayer(host_library, 8, 3, "lrfu", expert_map=np.arange(8))
    ids = np.array([[1, 2]])
    layer.set_ids(ids, Guarded(ids.shape, np.int64), mode)
    for name, value in changes.items():
        setattr(layer.args, name, value)
    with pytest.raises(KernelError) as error:
        host_library.manage(layer.args)
    assert error.value.code == code


@pytest.mark.parametrize("field", ["expert_map", "expert_ids"])
def test_a_misaligned_map_is_refused(host_library, field):
    layer = ComparedLayer(host_library, 8, 3, "lrfu", expert_map=np.arange(8))
    ids = np.array([[1, 2]])
    layer.set_ids(ids, Guarded(ids.shape, np.int64), "rows")
    setattr(layer.args, field, getattr(layer.args, field) + 2)
    with pytest.raises(KernelError) as error:
        host_library.manage(layer.args)
    assert error.value.code == -8


def test_the_inverse_of_a_map():
    assert ids_of_experts(np.array([-1, 2, 0, -1, 1, 7]), 3).tolist() == [2, 4, 1]


@pytest.mark.parametrize("expert_map", [[0, 1], [0, 1, 1], [0, 1, 2, 2], [-1, -1, -1]])
def test_a_map_that_misses_an_expert_or_names_one_twice_is_an_error(expert_map):
    with pytest.raises(ValueError, match="it must take one to each"):
        Reference(3, 1, expert_map=np.array(expert_map))
