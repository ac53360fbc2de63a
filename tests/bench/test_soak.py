"""The soak on emulated kernels: a short run, and what it must notice."""

from __future__ import annotations

import pytest

from bench import soak
from bench.device_layer import Difference


@pytest.fixture
def small(host_library) -> soak.Soak:
    return soak.Soak(experts=8, record=4096, seed=3, library=host_library)


def test_every_kind_of_event_comes_and_the_steps_add_up(small, monkeypatch):
    for odds, value in (("RESET", 0.1), ("RELOAD", 0.1), ("REBUILD", 0.05), ("SKIPPED", 0.1)):
        monkeypatch.setattr(soak, odds, value)
    counts = soak.run(small, 150)
    happened = ("resets", "reloads", "rebuilds", "steps on the scratch", "read_through")
    assert not [name for name in happened if not counts.get(name)]
    assert not [n for n in ("hits", "misses", "overflow", "evictions") if not counts[n]]


@pytest.mark.parametrize("number", [0, 3], ids=["virtual", "plain"])
def test_a_reload_that_nobody_hears_of_is_noticed(small, monkeypatch, number):
    layer = small.layers[number]
    for _ in range(3):
        layer.step(small._draw((2, 8), 0, plain=True), in_graph=False)
    small.settle()
    monkeypatch.setattr(layer.cache, "restore", lambda: None)
    layer.reload()
    layer.steps = layer.cache.calls()
    layer.step(small._draw((2, 8), 0, plain=True), in_graph=False)
    with pytest.raises(Difference, match=f"layer {number} .* slots that do not hold"):
        small.settle()


def test_wrong_row_ids_are_noticed(small, monkeypatch):
    layer = small.layers[0]
    run = layer.cache.run
    monkeypatch.setattr(layer.cache, "run", lambda ids, mode: run(ids, mode).roll(1))
    layer.step(small._draw((2, 8), 0, plain=True), in_graph=False)
    with pytest.raises(Difference, match=r"[1-9][0-9]* wrong row ids"):
        small.settle()


def test_a_step_that_is_not_counted_is_noticed(small):
    small.layers[0].steps += 1
    with pytest.raises(Difference, match="0 steps were counted, 1 were made"):
        small.settle()
