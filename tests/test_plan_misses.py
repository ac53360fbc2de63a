"""Expected misses: curves, traces, and the built-in numbers against the recordings."""

from pathlib import Path

import pytest
from start_up import ROOT

from expert_cache_shim.commands import CommandError
from expert_cache_shim.commands.plan_curves import CURVES, FRACTIONS, STREAMS
from expert_cache_shim.commands.plan_misses import (
    Curve,
    count_misses,
    evenly_routed,
    from_curves,
    from_trace,
    read_at_once,
)

np = pytest.importorskip("numpy")

LINE = Curve("line", "kind", "made up", 8, 2, 4, (1, 4), (0.25, 0.5), (2.0, 4.0),
             ((0.6, 0.4), (0.8, 0.6)))  # fmt: skip


@pytest.mark.parametrize(
    "fraction, streams, rate",
    [
        (0.25, 1, 0.6), (0.5, 1, 0.4), (0.375, 1, 0.5),  # on the points, and between
        (0.0, 1, 1.0), (0.125, 1, 0.8), (1.0, 1, 0.0), (0.75, 1, 0.2),  # beyond them
        (0.25, 2, 0.7), (0.5, 4, 0.6), (0.5, 64, 0.6),  # two is half way from one to four
    ],
)  # fmt: skip
def test_a_curve_is_read_along_straight_lines(fraction, streams, rate):
    assert LINE.miss_rate(fraction, streams) == pytest.approx(rate)


def test_another_model_routes_as_unevenly_as_the_curves():
    assert evenly_routed(8, 2, 1) == 2
    assert evenly_routed(8, 2, 2) == 8 * (1 - 0.75**2)
    share = 4.0 / evenly_routed(8, 2, 4)
    assert LINE.routed_experts(128, 8, 4) == pytest.approx(share * evenly_routed(128, 8, 4))
    assert LINE.routed_experts(128, 8, 1) == 8


def test_the_recording_of_the_model_itself_is_taken_where_there_is_one():
    (own,) = from_curves(CURVES, "gpt_oss", 128, 4, 1, [0, 64])
    assert own.source == "gpt-oss-120b"
    assert own.misses == {0: 1.0, 64: 0.0489}
    assert len(from_curves(CURVES, "qwen3_moe", 128, 8, 1, [64])) == len(CURVES)


@pytest.mark.parametrize("curve", CURVES, ids=[curve.name for curve in CURVES])
def test_curves_fall_with_slots_and_rise_with_streams(curve):
    misses = np.array(curve.misses)
    assert misses.shape == (len(STREAMS), len(FRACTIONS))
    assert (np.diff(misses, axis=1) < 0).all() and (misses > 0).all() and (misses < 1).all()
    half = FRACTIONS.index(0.5)
    assert (np.diff(misses[:, : half + 1], axis=0) > 0).all()
    assert (np.diff(curve.routed) > 0).all() and curve.routed[0] == curve.top_k


RECORDED = {
    "gpt-oss-120b": "gpt_oss_120b.npz", "gpt-oss-20b": "gpt_oss_20b.npz", "OLMoE": "olmoe.npz",
    "DeepSeek-V2-Lite": "deepseek_v2_lite.npz",
}  # fmt: skip


@pytest.mark.parametrize("curve", CURVES, ids=[curve.name for curve in CURVES])
def test_a_curve_is_what_its_recording_gives(curve):
    """At some of its points: tools/make_miss_curves.py makes them all."""
    from expert_cache_shim import trace

    path = ROOT / "bench" / "data" / RECORDED[curve.name]
    recorded = trace.load(path).first(1396)
    assert (recorded.experts, recorded.top_k, recorded.layers) == (
        curve.experts, curve.top_k, curve.layers,
    )  # fmt: skip
    points = [FRACTIONS.index(share) for share in (0.25, 0.5)]
    slots = [round(FRACTIONS[point] * curve.experts) for point in points]
    for streams in (1, 4):
        row = STREAMS.index(streams)
        routed, misses = count_misses(recorded, streams, slots)
        assert routed == pytest.approx(curve.routed[row], abs=0.01)
        assert misses == pytest.approx([curve.misses[row][p] for p in points], abs=1e-4)


def trace_of(ids, experts, step=None):
    from expert_cache_shim.trace import Trace

    ids = np.array(ids, np.uint16)
    tokens = len(ids)
    steps = np.arange(tokens) if step is None else np.array(step)
    return Trace(ids, np.zeros(tokens, np.int32), steps, {"num_experts": experts})


def test_streams_read_a_trace_at_places_evenly_apart():
    recorded = trace_of([[[token]] for token in range(6)], 8)
    together = read_at_once(recorded, 3)
    assert together.ids.ravel().tolist() == [0, 2, 4, 1, 3, 5, 2, 4, 0, 3, 5, 1, 4, 0, 2, 5, 1, 3]
    assert together.step.tolist() == [s for s in range(6) for _ in range(3)]


def test_a_trace_that_a_cache_can_hold_and_one_that_it_cannot():
    ids = [[[token % 4]] for token in range(400)]
    routed, (two, four) = count_misses(trace_of(ids, 8), 1, [2, 4])
    assert routed == 1
    assert two == 1.0  # a circle of four through two slots
    assert four == 0.0  # warm


def test_steps_of_more_tokens_are_replayed_as_recorded():
    ids = [[[token % 4]] for token in range(400)]
    recorded = trace_of(ids, 8, step=[token // 2 for token in range(400)])
    routed, (two, four) = count_misses(recorded, 16, [2, 4])
    assert (routed, two, four) == (2.0, 1.0, 0.0)


def test_a_trace_file_of_another_model_or_of_nothing_is_named(tmp_path):
    from expert_cache_shim import trace

    trace.save(trace_of([[[200]]], 256), tmp_path / "wide.npz")
    with pytest.raises(CommandError, match=r"wide\.npz: .* 1 of 256 experts, .* 1 of 128"):
        from_trace(str(tmp_path / "wide.npz"), 128, 1, 1, [64])
    with pytest.raises(CommandError, match="routes to 1 of 256 experts, this one to 8 of 256"):
        from_trace(str(tmp_path / "wide.npz"), 256, 8, 1, [64])
    (tmp_path / "none.npz").write_text("nothing")
    with pytest.raises(CommandError, match=r"none\.npz: is not a routing trace"):
        from_trace(str(tmp_path / "none.npz"), 128, 1, 1, [64])
    with pytest.raises(CommandError, match="No such file"):
        from_trace(str(Path("/no/such/file")), 128, 1, 1, [64])


def test_a_short_trace_is_enough(tmp_path):
    from expert_cache_shim import trace

    trace.save(trace_of([[[3]]], 8), tmp_path / "one.npz")
    found = from_trace(str(tmp_path / "one.npz"), 8, 1, 2, [1, 7])
    assert found.misses[0] == 1.0 and set(found.misses) == {0, 1, 7}
