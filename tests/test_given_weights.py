"""Weights that a model is given past its worker, by its own `load_weights`."""

from __future__ import annotations

import pytest
import torch
from synthetic import methods
from synthetic.checks import assert_same, outputs
from synthetic.models import Model, RoutedExperts, load

from expert_cache_shim import lifecycle

pytest_plugins = ["synthetic.fixtures"]


class Fed(Model):
    """A model that takes weights by name, as every model of vLLM's does."""

    def load_weights(self, weights):
        for name, value in weights:
            self.get_parameter(name).data.copy_(value)
        return {name for name, _ in weights}


class Heir(Fed):
    """A model class whose `load_weights` is another's."""


def fed(cls: type = Fed) -> Fed:
    return load(cls(RoutedExperts(methods.UnquantizedFusedMoEMethod)))


NAME = "layers.0.experts.routed_experts.w13_weight"


@pytest.fixture
def served(monkeypatch):
    """The outputs of a model whose class is watched, as a worker executes it."""
    monkeypatch.setattr(Fed, "load_weights", Fed.load_weights)  # put back after the test

    class Worker:
        def execute_model(self, model):
            return outputs(model)

    lifecycle.watch(Worker)
    for cls in (Fed, Heir, Heir):
        lifecycle.watch_model(cls)
    return Worker().execute_model


def test_a_class_is_watched_where_its_method_is_defined(served):
    assert "load_weights" not in vars(Heir)
    assert Heir.load_weights.__wrapped__ is Fed.load_weights.__wrapped__
    assert not hasattr(Heir.load_weights.__wrapped__, "__wrapped__")


@pytest.mark.parametrize("cls", [Fed, Heir])
def test_weights_given_to_a_model_directly_are_used_by_the_next_step(arm, served, cls):
    model, fresh = fed(cls), fed(cls)
    report = arm(model)
    before = served(model)
    counted = report.armed[0].cache.counters.tolist()
    weights = [(NAME, -model.get_parameter(NAME))]
    assert model.load_weights(weights) == fresh.load_weights(weights) == {NAME}
    assert report.armed[0].cache.counters.tolist() == counted
    after = served(model)
    assert_same(after, served(fresh))
    assert not all(torch.equal(one, other) for one, other in zip(before, after))


def test_control_weights_given_unheard_would_not_be_used(arm, served, monkeypatch):
    monkeypatch.setattr(lifecycle, "_forget_given", lambda: None)
    model, fresh = fed(), fed()
    arm(model)
    served(model)
    weights = [(NAME, -model.get_parameter(NAME))]
    for one in (model, fresh):
        one.load_weights(weights)
    with pytest.raises(AssertionError):
        assert_same(served(model), served(fresh))


def test_weights_that_come_one_by_one_empty_the_cache_once(arm, served, monkeypatch):
    model = fed()
    report = arm(model)
    cache, emptied = report.armed[0].cache, []
    monkeypatch.setattr(cache, "forget", lambda: emptied.append(1))
    for _ in range(100):
        model.load_weights([])
    assert emptied == []
    served(model)
    served(model)
    assert emptied == [1]


def test_only_the_model_that_is_given_weights_is_emptied(arm, served):
    models = [fed(), fed(), fed()]
    reports = [arm(model) for model in models[:2]]  # the third is not armed
    for model in models:
        served(model)

    emptied = []
    for report in reports:
        cache = report.armed[0].cache
        cache.forget = lambda cache=cache: emptied.append(cache)
    for model in (models[2], models[0]):
        model.load_weights([])
    served(models[2])
    assert emptied == [reports[0].armed[0].cache]


def test_weights_of_which_one_is_wrong_leave_no_slot_stale(arm, served):
    model, fresh = fed(), fed()
    arm(model)
    served(model)
    weights = [(NAME, -model.get_parameter(NAME)), ("no.such.weight", None)]
    for one in (model, fresh):
        with pytest.raises(AttributeError):
            one.load_weights(weights)
    assert_same(served(model), served(fresh))


def test_a_model_class_without_load_weights_is_left_alone():
    before = dict(vars(Model))
    lifecycle.watch_model(Model)
    assert dict(vars(Model)) == before
