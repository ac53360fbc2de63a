"""Two engines in one process: what one's worker does leaves the other's cache alone."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from synthetic import Model, methods
from synthetic.checks import assert_same, model_of, outputs

from expert_cache_shim import compiled, lifecycle
from expert_cache_shim.layer import ArmedLayer

pytest_plugins = ["synthetic.fixtures"]


def worker_class() -> type:
    """A worker's calls as vLLM has them; `get_model` is how it says which model is its own."""

    class Worker:
        def __init__(self, model):
            self.model = model
            self.reaches_the_cache = True

        def get_model(self):
            return self.model

        def compile_or_warm_up_model(self):
            outputs(self.model)

        def execute_model(self, scheduler_output):
            if self.reaches_the_cache:
                outputs(self.model)

        def reload_weights(self):
            with torch.no_grad():
                self.model.routed[0].w13_weight.neg_()

        def wake_up(self, tags=None):
            pass

    lifecycle.watch(Worker)
    return Worker


@pytest.fixture
def engines(arm):
    """Two workers of one class, with a model each, and the models' reports."""
    models = [model_of(), model_of(methods.Int8ChannelMoEMethod)]
    reports = [arm(model) for model in models]
    assert [len(report.armed) for report in reports] == [2, 1]
    worker = worker_class()
    return [worker(model) for model in models], reports


def state_of(report) -> list[torch.Tensor]:
    return [t.clone() for a in report.armed for t in (a.cache.state, a.cache.counters)]


@pytest.mark.parametrize("call", ["compile_or_warm_up_model", "reload_weights", "wake_up"])
def test_what_a_worker_empties_is_its_own_cache(engines, call):
    (first, second), reports = engines
    first.execute_model(None)
    second.execute_model(None)
    before = state_of(reports[0])
    getattr(second, call)()
    assert_same(state_of(reports[0]), before)
    assert not any(int((a.cache.state[8 : 8 + 16] >= 0).sum()) for a in reports[1].armed)


def test_an_engine_that_waits_is_not_said_to_be_unused(engines, caplog):
    (_, second), _ = engines
    for _ in range(lifecycle.EXECUTIONS + 1):
        second.execute_model(None)
    assert "no step has reached it" not in caplog.text


def test_each_engine_is_asked_after_its_own_first_executions(engines, caplog):
    (first, second), _ = engines
    first.reaches_the_cache = False
    for worker in (second, first):
        for _ in range(lifecycle.EXECUTIONS):
            worker.execute_model(None)
    assert caplog.text.count("no step has reached it") == 1


def test_engines_that_serve_at_the_same_time(engines):
    """Each in a thread of its own, one of them reloading and warming up between steps."""
    workers, _ = engines
    expected = [outputs(model_of()), outputs(model_of(methods.Int8ChannelMoEMethod))]
    wrong: list[object] = []

    def serve(number: int, restless: bool) -> None:
        try:
            for turn in range(12):
                if restless and turn % 4 == 1:
                    workers[number].compile_or_warm_up_model()
                if restless and turn % 4 == 3:  # there and back
                    workers[number].reload_weights()
                    workers[number].reload_weights()
                assert_same(outputs(workers[number].model), expected[number])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=serve, args=(n, n == 1)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def same_model(arm, monkeypatch):
    """Makes engines of one model, whose layers run as inside a compiled graph."""
    monkeypatch.setattr(compiled, "_caches", weakref.WeakValueDictionary())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    def make() -> tuple[Model, list[ArmedLayer]]:
        model = model_of()
        return model, arm(model).armed

    return make


def test_graphs_of_engines_of_one_model_keep_to_their_own_caches(same_model):
    (first, layers), (second, _) = same_model(), same_model()
    for model in (first, second, first):
        assert_same(outputs(model), outputs(model_of()))
    assert [layer.cache.calls() for layer in layers] == [6, 6]  # three steps, twice
    del second, model
    gc.collect()
    third, _ = same_model()
    for model in (first, third):
        assert_same(outputs(model), outputs(model_of()))


def test_control_with_another_ones_cache_the_output_would_be_wrong(same_model):
    (first, (layer, _)), (_, (other, _)) = same_model(), same_model()
    layer.key = other.key
    with pytest.raises(AssertionError):
        assert_same(outputs(first), outputs(model_of()))


def test_keys_are_the_same_in_every_process(same_model):
    engines = same_model(), same_model()
    keys = [[layer.key for layer in layers] for _, layers in engines]
    names = [f"layers.{number}.experts.routed_experts" for number in range(2)]
    assert keys == [[f"{model}/{name}" for name in names] for model in ("synthetic", "synthetic#2")]
