"""preload, the step after it, and the copies of both, on emulated workgroups."""

from itertools import islice

import numpy as np
import pytest
import routing
from compared_layer import ComparedLayer, scramble
from compared_tensors import ComparedTensors, Shape, state_with

from expert_cache_shim.native import KernelError, Preload
from expert_cache_shim.policy import CODES, Reference

SIZES = [(2, 1), (31, 7), (31, 30), (128, 32), (512, 511), (1024, 256)]


@pytest.fixture(params=[0, 5], ids=["natural", "shuffled"])
def library(host_library, request):
    host_library.shuffle(request.param)
    yield host_library
    host_library.shuffle(0)


def wide(generator: np.random.Generator, experts: int) -> np.ndarray:
    """Ids that name most experts, and some that name none."""
    return generator.integers(-1, experts + 1, (experts, 3))


@pytest.mark.parametrize("policy", CODES)
@pytest.mark.parametrize("experts, slots", SIZES)
def test_preloaded_steps_among_others(library, policy, experts, slots):
    layer = ComparedLayer(library, experts, slots, policy)
    generator = np.random.default_rng(experts + slots)
    for ids in islice(routing.random(generator, experts), 8):
        layer.step(ids)
        layer.preload()
        layer.step(wide(generator, experts), preloaded=True)
    counters = layer.reference.counters
    assert counters["steps"] + counters["idle"] == 16


@pytest.mark.parametrize("policy", CODES)
def test_any_reachable_state(library, policy):
    generator = np.random.default_rng(17)
    for experts, slots in [(2, 1), (16, 5), (64, 63), (128, 32)]:
        layer = ComparedLayer(library, experts, slots, policy)
        for _ in range(12):
            scramble(layer, generator)
            layer.preload()
            ids = generator.integers(0, experts, (generator.integers(1, experts), 2))
            layer.step(ids, preloaded=True)


@pytest.mark.parametrize("mode", ["rows", "scratch", "skip"])
def test_what_was_preloaded_for_nothing_is_forgotten(library, mode):
    layer = ComparedLayer(library, 31, 7, "lrfu")
    generator = np.random.default_rng(1)
    layer.step(wide(generator, 31))
    layer.preload()
    assert (layer.reference.row_of >= 7).sum() == 24
    layer.step(wide(generator, 31), mode)
    layer.preload()
    layer.step(np.full((2, 2), -1), preloaded=True)
    assert (layer.reference.row_of < 7).all()


def test_nothing_is_preloaded_while_a_slot_is_empty(library):
    layer = ComparedLayer(library, 31, 7, "lru")
    layer.step(np.arange(6)[None])
    layer.preload()
    assert len(layer.reference.copies) == 0
    layer.step(np.arange(20)[None], preloaded=True)
    assert len(layer.reference.copies) == 14


@pytest.mark.parametrize("policy", CODES)
def test_residents_scores_and_counters_are_those_of_a_step_without_it(policy):
    ahead, usual = Reference(64, 16, policy), Reference(64, 16, policy)
    generator = np.random.default_rng(4)
    for ids in islice(routing.random(generator, 64), 60):
        ahead.preload()
        ahead.step(ids, preloaded=True)
        usual.step(ids)
        assert np.array_equal(ahead.expert_at[:16], usual.expert_at[:16])
        assert np.array_equal(ahead.score, usual.score)
        assert np.array_equal(ahead.last, usual.last)
        assert ahead.counters == usual.counters


def test_every_routed_record_lies_in_its_row(library):
    """The copies of preload and of the step after it, with records that overflow rows share."""
    experts, slots = 31, 7
    layer = ComparedLayer(library, experts, slots, "lrfu")
    tensors = ComparedTensors.filled(experts, [Shape(4100, 4112), Shape(17, 17, 1)], False)
    generator = np.random.default_rng(6)

    def gather():
        copies = layer.reference.copies
        tensors.gather(library, copies, state_with(copies, experts))

    layer.step(np.arange(slots)[None])  # no slot is empty from here on
    gather()
    for _ in range(20):
        layer.step(generator.integers(0, experts, (1, 4)))
        gather()
        layer.preload()
        gather()
        ids = generator.integers(0, experts, (20, 2))
        rows = layer.step(ids, preloaded=True)
        from_host = layer.reference.copies[:, 1] < 0
        assert (layer.reference.copies[from_host, 2] < 0).all(), "fetched a second time"
        gather()
        for expert, row in zip(ids.flat, rows.flat):
            for index in range(2):
                assert tensors.holds(tensors.rows, index, row, expert)


@pytest.mark.parametrize("code, changes", [
    (-1, dict(experts=1)), (-1, dict(experts=1025)), (-2, dict(slots=0)), (-2, dict(slots=16)),
    (-8, dict(state=None)), (-8, dict(state=8)),
])  # fmt: skip
def test_a_bad_argument_is_refused(host_library, code, changes):
    layer = ComparedLayer(host_library, 16, 4, "lrfu")
    fields = {"state": layer.state.address, "experts": 16, "slots": 4, **changes}
    with pytest.raises(KernelError) as error:
        host_library.preload(Preload(**fields))
    assert error.value.code == code


@pytest.mark.parametrize(
    "mode, preloaded", [("rows", 2), ("rows", -1), ("scratch", 1), ("skip", 1)]
)
def test_preloaded_goes_with_mode_rows_alone(host_library, mode, preloaded):
    layer = ComparedLayer(host_library, 16, 4, "lrfu")
    ids = np.array([[1, 2, 3]])
    layer.set_ids(ids, layer.state, mode)
    layer.args.preloaded = preloaded
    with pytest.raises(KernelError) as error:
        host_library.manage(layer.args)
    assert error.value.code == -7
