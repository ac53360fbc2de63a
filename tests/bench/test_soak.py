"""The soak on emulated kernels: a short run, and what it must notice."""

from __future__ import annotations

import os
import signal

import pytest

from bench import soak
from bench.device_layer import Difference
from expert_cache_shim import native


@pytest.fixture
def small(host_library) -> soak.Soak:
    return soak.Soak(experts=8, record=4096, seed=3, library=host_library)


def test_every_kind_of_event_comes_and_the_steps_add_up(small, monkeypatch):
    for odds, value in (("RESET", 0.1), ("RELOAD", 0.1), ("REBUILD", 0.05), ("SKIPPED", 0.1)):
        monkeypatch.setattr(soak, odds, value)
    counts = soak.run(small, 150)
    happened = (
        "resets", "reloads", "rebuilds", "preloaded steps", "steps on the scratch", "read_through",
        "idle",
    )  # fmt: skip
    assert not [name for name in happened if not counts.get(name)]
    assert not [n for n in ("hits", "misses", "overflow", "evictions") if not counts[n]]


@pytest.mark.parametrize("number", [0, 5], ids=["virtual", "plain"])
def test_a_reload_that_nobody_hears_of_is_noticed(small, monkeypatch, number):
    layer = small.layers[number]
    for _ in range(3):
        layer.step(small._draw(layer, (2, 8), 0, plain=True), in_graph=False)
    small.settle()
    monkeypatch.setattr(layer.cache, "restore", lambda: None)
    layer.reload()
    layer.steps = layer.cache.calls()
    layer.step(small._draw(layer, (2, 8), 0, plain=True), in_graph=False)
    with pytest.raises(Difference, match=f"layer {number} .* slots that do not hold"):
        small.settle()


def test_wrong_row_ids_are_noticed(small, monkeypatch):
    layer = small.layers[0]
    run = layer.cache.run
    monkeypatch.setattr(layer.cache, "run", lambda ids, *more: run(ids, *more).roll(1))
    layer.step(small._draw(layer, (2, 8), 0, plain=True), in_graph=False)
    with pytest.raises(Difference, match=r"[1-9][0-9]* wrong row ids"):
        small.settle()


def test_a_step_that_is_not_counted_is_noticed(small):
    small.layers[0].steps += 1
    with pytest.raises(Difference, match="0 steps were counted, 1 were made"):
        small.settle()


def test_rows_that_were_fetched_ahead_and_lost_are_noticed(small):
    layer = small.layers[0]
    for _ in range(3):  # until every slot is occupied
        layer.step(small._draw(layer, (512, 8), 0, plain=True), in_graph=False)
    ids = small._draw(layer, (512, 8), 0, plain=True)
    small.preloader.start(layer.cache, ids)
    for placement in layer.cache.storage.placements:
        placement.slots[layer.plan.slots :].zero_()
    assert small.preloader.finish(layer.cache)
    layer.step(ids, in_graph=False, preloaded=True)
    with pytest.raises(Difference, match=r"layer 0 .* [1-9][0-9]* rows and"):
        small.settle()


@pytest.mark.parametrize("number", [1, 6], ids=["virtual", "plain"])
def test_rows_in_place_of_ids_of_a_map_are_noticed(small, monkeypatch, number):
    layer = small.layers[number]
    manage = layer.cache.library.manage

    def give_rows(args, stream=0):
        args.expert_ids = args.state + 4 * native.STATE_HEADER  # row_of, for one
        manage(args, stream)

    monkeypatch.setattr(layer.cache.library, "manage", give_rows)
    for _ in range(5):
        layer.step(small._draw(layer, (1, 1), 0, plain=True), in_graph=False)
    with pytest.raises(Difference, match=r"[1-9][0-9]* wrong row ids"):
        small.settle()


@pytest.fixture
def main(monkeypatch, host_library):
    """The command, with something in place of its steps: its status."""
    monkeypatch.setattr("sys.argv", ["soak", "--experts", "4", "--record", "256"])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def run(steps) -> int:
        monkeypatch.setattr(soak, "run", steps)
        try:
            return soak.main()
        except SystemExit as end:
            return end.code

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def differs(*_) -> None:
    raise Difference("a byte")


@pytest.mark.parametrize("steps, status, line", [
    (lambda *_: {"seconds": 1}, 0, "equal, seconds: 1"),
    (differs, 1, "different, a byte"),
    (lambda *_: os.kill(os.getpid(), signal.SIGTERM), 143, "ended by SIGTERM: no verdict"),
])  # fmt: skip
def test_the_last_line_is_a_verdict_or_says_that_there_is_none(main, capsys, steps, status, line):
    assert main(steps) == status
    assert capsys.readouterr().out.splitlines()[-1] == line
