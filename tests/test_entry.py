"""What stands in front of a quant method: each layer finds its own cache, and no copy of the
method does."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from synthetic import Model, RoutedExperts, call, load, methods, routing
from synthetic.checks import assert_same, model_of, outputs

from expert_cache_shim import arming, lifecycle

pytest_plugins = ["synthetic.fixtures"]


def sharing() -> Model:
    """Two layers with one quant method."""
    first = RoutedExperts(seed=1)
    return load(Model(first, RoutedExperts(seed=2, quant_method=first.quant_method)))


def change(*models: Model) -> None:
    """Other bytes in every host copy, in place."""
    for model in models:
        for layer in model.routed:
            layer.w13_weight.data.neg_()


@pytest.fixture
def worker():
    class Worker:
        def reload_weights(self):
            pass

        def wake_up(self, tags=None):
            pass

    lifecycle.watch(Worker)
    return Worker()


# --- One method of two layers -----------------------------------------------------------------


@pytest.mark.parametrize("call_of", ["reload_weights", "wake_up"])
def test_both_layers_of_a_method_hear_of_every_change(arm, worker, call_of):
    cached, uncached = sharing(), sharing()
    report = arm(cached)
    for _ in range(3):
        outputs(cached)
        change(cached, uncached)
        getattr(worker, call_of)()
        assert_same(outputs(cached), outputs(uncached))
        assert len(report.armed) == 2
    assert report.retired == []


@pytest.mark.parametrize("deaf", [0, 1])
def test_control_a_layer_that_does_not_hear_of_it_gives_another_output(
    arm, worker, monkeypatch, deaf
):
    cached, uncached = sharing(), sharing()
    cache = arm(cached).armed[deaf].cache
    outputs(cached)
    change(cached, uncached)
    monkeypatch.setattr(cache, "forget", lambda: None)
    monkeypatch.setattr(cache, "restore", lambda: None)
    worker.reload_weights()
    with pytest.raises(AssertionError):
        assert_same(outputs(cached), outputs(uncached))


@pytest.mark.parametrize("given_back", [0, 1])
def test_one_layer_of_a_method_is_given_back_alone_and_can_come_again(arm, given_back):
    cached, uncached = sharing(), sharing()
    report = arm(cached)
    one, other = report.armed[given_back], report.armed[1 - given_back]
    one.remove()
    counted = other.cache.calls()
    assert_same(outputs(cached), outputs(uncached))
    assert one.cache.calls() == 0
    assert other.cache.calls() == counted + 3
    assert len(arm(cached).armed) == 2
    assert_same(outputs(cached), outputs(uncached))


# --- Copies -----------------------------------------------------------------------------------


def copied(model: Model, how: str) -> Model:
    return pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "method", [methods.UnquantizedFusedMoEMethod, methods.Int8ChannelMoEMethod]
)
def test_a_copy_of_an_armed_model_serves_by_itself(arm, method, how):
    model, uncached = model_of(method, method), model_of(method, method)
    report = arm(model)
    outputs(model)
    twin = copied(model, how)
    calls = report.steps()
    change(model)
    assert_same(outputs(twin), outputs(uncached))
    assert report.steps() == calls
    lifecycle.weights_changed()
    change(uncached)
    assert_same(outputs(model), outputs(uncached))


# --- Processes --------------------------------------------------------------------------------


def in_a_fork(action) -> bytes:
    """One byte that `action` returns in a child of this process; b"" where it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, action())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        return os.read(reader, 1)
    finally:
        os.close(reader)
        os.waitpid(child, 0)


def serve_otherwise(model: Model) -> bytes:
    """Steps after which other experts are resident."""
    random = torch.Generator().manual_seed(9)
    for _ in range(20):
        for layer in model.routed:
            call(layer, *routing(layer, 1, random))
    return b"y"


def resident_records(report: arming.Report) -> list[torch.Tensor]:
    return [
        placement.slots[: armed.cache.slots].clone()
        for armed in report.armed
        for placement in armed.cache.storage.placements
    ]


def test_a_forked_process_leaves_the_slots_of_its_parent_alone(arm):
    model, uncached = model_of(), model_of()
    report = arm(model)
    outputs(model)
    before, counted = resident_records(report), report.snapshot.path.read_bytes()
    assert in_a_fork(lambda: serve_otherwise(model)) == b"y"
    assert_same(resident_records(report), before)
    assert report.snapshot.path.read_bytes() == counted
    assert len(report.armed) == 2 and all(armed.installed for armed in report.armed)
    assert_same(outputs(model), outputs(uncached))


def test_control_a_forked_process_that_uses_the_cache_changes_them(arm):
    model = model_of()
    report = arm(model)
    outputs(model)
    before = resident_records(report)
    rearm = [armed.install for armed in report.armed]
    assert in_a_fork(lambda: [install() for install in rearm] and serve_otherwise(model)) == b"y"
    with pytest.raises(AssertionError):
        assert_same(resident_records(report), before)
