"""What the worker's own calls do to a cache, and that nothing of ours reaches the worker."""

from __future__ import annotations

import functools

import pytest
import torch
import wrapt
from synthetic import call, methods, routing
from synthetic.checks import assert_same, model_of, outputs

from expert_cache_shim import arming, lifecycle, policy

pytest_plugins = ["synthetic.fixtures"]


def worker_class(base: type = object) -> type:
    """A worker as vLLM's: warm-up runs dummy tokens through the model, then steps follow."""

    class Worker(base):
        def __init__(self, model=None):
            self.model = model

        def compile_or_warm_up_model(self):
            if self.model is not None:
                outputs(self.model)
            return "seconds"

        def execute_model(self, scheduler_output, *, extra=None):
            if self.model is not None:
                outputs(self.model)
            return scheduler_output, extra

    return Worker


@pytest.fixture
def worker(arm):
    """A watched worker whose model is armed."""
    model = model_of(methods.Int8ChannelMoEMethod, methods.UnquantizedFusedMoEMethod)
    report = arm(model)
    watched = worker_class()
    lifecycle.watch(watched)
    worker = watched(model)
    worker.report = report
    worker.armed_model = model  # reports live as long as their model
    return worker


def execute(worker, times: int) -> None:
    for _ in range(times):
        worker.execute_model(None)


# --- Warm-up --------------------------------------------------------------------------------


def test_warm_up_leaves_an_empty_cache_and_no_counts(worker):
    assert worker.compile_or_warm_up_model() == "seconds"
    for armed in worker.report.armed:
        assert armed.cache.calls() == 0
        assert armed.cache.counters.tolist() == [0] * 8
        fresh = policy.Reference(8, 3)
        header, experts = 8, 8
        state = armed.cache.state.tolist()
        assert state[header : header + experts] == fresh.row_of.tolist()
        assert state[header + experts : header + 2 * experts] == fresh.expert_at.tolist()
        assert not any(state[:2] + state[header + 2 * experts : header + 4 * experts])
    assert worker.report.snapshot.mirror(0).tolist() == [0] * 8


def test_output_after_warm_up_is_right(worker):
    expected = outputs(model_of(methods.Int8ChannelMoEMethod, methods.UnquantizedFusedMoEMethod))
    worker.compile_or_warm_up_model()
    assert_same(outputs(worker.model), expected)


def test_a_warm_up_that_fails_is_the_workers_own_error(arm):
    watched = worker_class()
    watched.compile_or_warm_up_model = lambda self: 1 // 0
    lifecycle.watch(watched)
    with pytest.raises(ZeroDivisionError):
        watched().compile_or_warm_up_model()


# --- The first steps ------------------------------------------------------------------------


def test_a_cache_that_steps_reach_is_not_complained_of(worker, caplog):
    execute(worker, lifecycle.EXECUTIONS + 3)
    assert caplog.messages == []
    assert worker.report.steps() > 0


def test_a_cache_that_no_step_reaches_is_complained_of_once(worker, caplog):
    worker.model = None
    execute(worker, lifecycle.EXECUTIONS - 1)
    assert caplog.messages == []
    execute(worker, 20)
    (message,) = caplog.messages
    assert "armed on synthetic, but no step has reached it" in message


def test_steps_that_are_read_through_count_as_reached(arm, settings, caplog):
    settings(storage="plain", overflow="off")
    model = model_of()
    report = arm(model)
    for layer in model.routed:
        call(layer, *routing(layer, 9, torch.Generator().manual_seed(0)))
    assert report.steps() == 2
    assert lifecycle.report_uncalled() == []


def test_the_models_that_no_step_reaches_are_named(arm):
    models = [model_of(count=1) for _ in range(2)]
    for model in models:
        arm(model)
    outputs(models[0])
    assert lifecycle.report_uncalled() == ["synthetic"]


def test_layers_that_no_step_reaches_beside_others_that_are_reached_are_named(arm, caplog):
    model = model_of(count=3)
    arm(model)
    call(model.routed[1], *routing(model.routed[1], 1, torch.Generator().manual_seed(0)))
    assert lifecycle.report_uncalled() == []
    (message,) = caplog.messages
    assert "2 of 3 armed layers of synthetic were never called" in message
    assert "(layers.0.experts.routed_experts and 1 more)" in message


def test_arguments_and_results_pass_through(worker):
    worker.model = None
    for n in range(lifecycle.EXECUTIONS + 2):
        assert worker.execute_model(n, extra="x") == (n, "x")


# --- Device memory --------------------------------------------------------------------------


@pytest.mark.parametrize("free, warned", [(255, True), (256, False)])
def test_a_device_that_is_nearly_full_after_warm_up_is_warned_of(
    worker, monkeypatch, caplog, free, warned
):
    for armed in worker.report.armed:
        armed.cache.device = torch.device("cuda", 0)
    monkeypatch.setattr(lifecycle, "_forget", lambda worker: None)  # no GPU here to forget on
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 20, 8192 << 20))
    worker.model = None
    worker.compile_or_warm_up_model()
    text = f"{free} MiB of the 8192 MiB of cuda:0 are free"
    assert [text in message for message in caplog.messages] == [True] * warned


def test_a_cpu_is_not_asked_for_its_memory(worker, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: 1 // 0)
    worker.compile_or_warm_up_model()
    assert caplog.messages == []


# --- Errors of ours -------------------------------------------------------------------------


def test_an_error_of_ours_does_not_end_a_warm_up(worker, monkeypatch, caplog):
    monkeypatch.setattr(arming, "reports", lambda: 1 // 0)
    assert worker.compile_or_warm_up_model() == "seconds"
    assert "serving goes on" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_one_cache_that_cannot_forget_does_not_keep_the_others_from_it(worker, monkeypatch):
    first, second = worker.report.armed
    monkeypatch.setattr(first.cache, "forget", lambda: 1 // 0)
    worker.compile_or_warm_up_model()
    assert second.cache.calls() == 0


def test_an_error_of_ours_does_not_end_a_step(worker, monkeypatch, caplog):
    monkeypatch.setattr(arming.Report, "steps", lambda report: 1 // 0)
    execute(worker, lifecycle.EXECUTIONS + 1)
    assert caplog.text.count("Traceback") == 1


# --- Classes --------------------------------------------------------------------------------


def test_methods_keep_their_names_and_a_class_is_watched_once():
    watched = worker_class()
    lifecycle.watch(watched)
    methods_once = dict(vars(watched))
    lifecycle.watch(watched)
    assert dict(vars(watched)) == methods_once
    assert watched.execute_model.__name__ == "execute_model"


def test_inherited_methods_are_watched_once_where_they_are_defined(monkeypatch):
    runs = []
    monkeypatch.setattr(lifecycle, "_forget", lambda worker: runs.append(1))
    base = worker_class()

    class CPUWorker(base):
        pass

    lifecycle.watch(base)
    lifecycle.watch(CPUWorker)
    assert "compile_or_warm_up_model" not in vars(CPUWorker)
    CPUWorker().compile_or_warm_up_model()
    assert runs == [1]


def test_a_worker_without_these_methods_is_left_alone():
    class Worker:
        pass

    before = dict(vars(Worker))
    lifecycle.watch(Worker)
    assert dict(vars(Worker)) == before


def test_another_packages_wrapper_put_on_before_or_after_ours_stays(worker):
    watched = type(worker)
    seen = []
    ours = watched.execute_model

    @functools.wraps(ours)
    def traced(self, *args, **kwargs):
        seen.append(1)
        return ours(self, *args, **kwargs)

    watched.execute_model = traced
    execute(worker, lifecycle.EXECUTIONS + 5)
    assert watched.execute_model is traced
    assert len(seen) == lifecycle.EXECUTIONS + 5


def test_a_method_that_another_package_wrapped_with_wrapt_is_watched_too(arm):
    seen = []
    watched = worker_class()

    def traced(wrapped, instance, args, kwargs):
        seen.append(1)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(watched, "compile_or_warm_up_model", traced)
    lifecycle.watch(watched)
    model = model_of()
    report = arm(model)
    assert watched(model).compile_or_warm_up_model() == "seconds"
    assert seen == [1]
    assert report.steps() == 0
