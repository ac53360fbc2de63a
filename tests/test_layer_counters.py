"""The counters of an armed layer, their copy in the snapshot, and forgetting."""

from __future__ import annotations

import pytest
import torch
from synthetic import call
from synthetic.checks import counters, model_of, step, steps

from expert_cache_shim import layer, policy, telemetry

pytest_plugins = ["synthetic.fixtures"]

E, S = 8, 3
NARROW, WIDE = 1, 9  # tokens whose ids fit into the slots, tokens whose ids do not
STORAGES = ("virtual", "plain")


@pytest.mark.parametrize("name", policy.CODES)
@pytest.mark.parametrize(
    ("storage", "overflow", "wide"),
    [("virtual", "auto", "rows"), ("plain", "on", "scratch"), ("plain", "off", "skip")],
)
def test_counters_and_their_mirror_are_those_of_the_reference(
    pair, tmp_path, name, storage, overflow, wide
):
    variables = {"overflow": overflow, "policy": name, "decay": 5, "half_life": 3}
    uncached, cached, armed = pair(storage=storage, variables=variables)
    reference = policy.Reference(E, S, name, policy.decay_parameter(name, 3, 5))
    (snapshot,) = telemetry.read_folder(tmp_path / "snapshots")
    for x, weights, ids in steps(uncached, 60):
        if len(x) == 2:
            ids[0] = -1
        assert torch.equal(call(cached, x, weights, ids), call(uncached, x, weights, ids))
        reference.step(ids.numpy(), "rows" if min(E, ids.numel()) <= S else wide)
        assert counters(armed) == reference.counters
    assert reference.counters["hits"] > 0
    mirrored = telemetry.read_snapshot(snapshot.path).counters
    assert mirrored.tolist() == [list(reference.counters.values())]


def test_steps_of_plain_storage_without_scratch_are_counted_as_read_through(pair):
    uncached, cached, armed = pair(storage="plain", variables={"overflow": "off"})
    assert not armed.cache.storage.has_scratch
    for tokens in (NARROW, WIDE, WIDE, NARROW):
        inputs = step(uncached, tokens)
        assert torch.equal(call(cached, *inputs), call(uncached, *inputs))
    counted = counters(armed)
    assert (counted["steps"], counted["read_through"]) == (2, 2)
    assert armed.cache.calls() == 4


@pytest.mark.parametrize("storage", STORAGES)
def test_a_cache_that_was_made_to_forget_fetches_again_and_counts_on(pair, storage):
    uncached, cached, armed = pair(storage=storage)
    inputs = step(uncached)
    call(cached, *inputs)
    call(cached, *inputs)
    counted = counters(armed)
    assert (counted["hits"], counted["misses"]) == (2, 2)
    armed.cache.forget()
    assert counters(armed) == counted
    with torch.no_grad():  # the host copies change, as in a reload of the weights
        for layer in (uncached, cached):
            layer.w13_weight.mul_(2)
    assert torch.equal(call(cached, *inputs), call(uncached, *inputs))
    assert counters(armed)["misses"] == 4
    armed.cache.reset_counters()
    assert armed.cache.calls() == 0
    assert sum(counters(armed).values()) == 0


def test_counters_are_kept_where_there_is_no_snapshot(pair):
    uncached, cached, armed = pair(variables={"snapshot": "off"})
    call(cached, *step(uncached))
    assert armed.cache.calls() == counters(armed)["steps"] == 1


def given_back(folder) -> list[bool]:
    (snapshot,) = telemetry.read_folder(folder / "snapshots")
    return snapshot.given_back.tolist()


def test_a_layer_that_is_given_back_while_serving_is_told_without_a_step(pair, tmp_path):
    uncached, cached, armed = pair()
    call(cached, *step(uncached))
    assert given_back(tmp_path) == [False]
    armed._locations.changed = lambda: True
    inputs = step(uncached)
    assert torch.equal(call(cached, *inputs), call(uncached, *inputs))
    assert given_back(tmp_path) == [True]


def test_a_layer_that_could_not_be_armed_is_not_told_as_armed(arm, tmp_path, monkeypatch):
    count = layer.ArmedLayer.count_in

    def fails_once(armed, snapshot, index):
        count(armed, snapshot, index)
        if index == 0:
            raise RuntimeError

    monkeypatch.setattr(layer.ArmedLayer, "count_in", fails_once)
    model = model_of()
    assert len(arm(model).armed) == 1
    assert given_back(tmp_path) == [True, False]
