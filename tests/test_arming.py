"""What is armed, what is said of it, how long it lives, and what loading again does."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from synthetic import Model, RoutedExperts, kernels, load, methods
from synthetic.checks import assert_same, assert_untouched, model_of, outputs, parts

from expert_cache_shim import arming, lifecycle, vllm_compat
from expert_cache_shim.refusals import Candidate
from expert_cache_shim.trace_ring import Reader

pytest_plugins = ["synthetic.fixtures"]

LOGGER = "vllm.expert_cache"


# --- What is armed --------------------------------------------------------------------------


def test_every_moe_layer_of_a_model_is_armed_and_nothing_else(arm):
    model = model_of(count=3)
    report = arm(model)
    assert [a.name for a in report.armed] == [
        f"layers.{n}.experts.routed_experts" for n in range(3)
    ]
    assert report.refused == []
    assert list(arming.reports()) == [report]


def test_a_model_without_experts_is_passed_over_in_silence(arm, library, caplog):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].quant_method = object()
    report = arm(model)
    assert (report.armed, report.refused, caplog.messages) == ([], [], [])


def test_one_line_says_what_is_armed(arm, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    arm(model_of(count=2))
    (line,) = caplog.messages
    assert "2 of 2 MoE layers of synthetic armed: 3 of 8 experts resident in each, lrfu" in line
    assert "virtual storage" in line


def test_layers_refused_for_one_reason_share_one_line(arm, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    mono, plain = methods.MonolithicMoEMethod, methods.UnquantizedFusedMoEMethod
    report = arm(model_of(mono, plain, mono, mono))
    assert (len(report.armed), len(report.refused)) == (1, 3)
    armed_line, refused_line = caplog.messages
    assert "1 of 4 MoE layers of synthetic armed" in armed_line
    assert (
        "3 of 4 MoE layers of synthetic not armed (layers.0.experts.routed_experts and 2 more)"
        in (refused_line)
    )


def test_layers_of_different_sizes_get_slots_by_their_own_number_of_experts(arm, settings):
    settings(slots=None, fraction=0.5)
    model = load(Model(RoutedExperts(experts=8), RoutedExperts(experts=12, seed=1)))
    assert [armed.cache.slots for armed in arm(model).armed] == [4, 6]


def test_the_budget_in_gib_is_spent_over_all_layers(arm, settings):
    slot = (128 * 32 + 32 * 64) * 4
    settings(slots=None, gib=(2 * 5 * slot + 1000) / 2**30)
    assert [armed.cache.slots for armed in arm(model_of(count=2)).armed] == [5, 5]


def test_two_models_of_one_process_each_have_a_report_while_they_live(arm):
    first, second = model_of(), model_of()
    reports = [arm(first), arm(second)]
    assert list(arming.reports()) == reports
    del first, reports[0]
    gc.collect()
    assert list(arming.reports()) == reports


def test_device_memory_is_freed_with_the_model(arm, library):
    model = model_of()
    report = arm(model)
    outputs(model)
    assert library.ranges
    del model, report
    assert library.all_is_freed()
    assert not list(arming.reports())


def test_a_model_with_refused_layers_is_freed_like_any_other(arm, library):
    model = model_of(methods.MonolithicMoEMethod, methods.Int8ChannelMoEMethod)
    report = arm(model)
    assert (len(report.armed), len(report.refused)) == (1, 1)
    # Which frames hold the model differs from one Python to another.
    ((_, refusal),) = report.refused
    assert refusal.__traceback__ is refusal.__context__ is None
    last = weakref.ref(model)
    del model, report
    assert library.all_is_freed()
    assert last() is None


def test_a_misspelt_variable_is_pointed_out_and_the_model_is_armed(arm, settings, caplog):
    settings(slot=4)
    assert arm(model_of()).armed
    assert "EXPERT_CACHE_SLOTS" in caplog.text


def test_disabled_means_nothing_is_armed_and_nothing_is_said(arm, settings, library, caplog):
    settings(disable=1)
    model = model_of()
    before = parts(model)
    report = arm(model)
    assert (report.armed, report.refused, caplog.messages) == ([], [], [])
    assert_untouched(model, before)


@pytest.mark.parametrize("devices, firsts", [(1, [0]), (2, [0, 1])])
def test_layers_share_memory_with_those_of_their_device_only(
    arm, settings, monkeypatch, devices, firsts
):
    """A CPU goes by two names here: layers 0 and 2 on one, 1 and 3 on the other."""

    def device(candidate):
        number = int(candidate.name.split(".")[1]) % devices
        return torch.device("cpu", 0) if number else torch.device("cpu")

    monkeypatch.setattr(Candidate, "device", property(device))
    settings(storage="plain")
    model = model_of(count=4)
    report = arm(model)
    armed = sorted(report.armed, key=lambda layer: layer.name)
    assert [n for n, layer in enumerate(armed) if layer.cache.storage.shared] == firsts
    assert_same(outputs(model), outputs(model_of(count=4)))


# --- Loading again --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, calls",
    [
        (methods.Int8ChannelMoEMethod, 6),  # bound to the new kernel, so that it counts on
        (methods.Fp8TensorMoEMethod, 3),  # a tensor of its config is another: armed anew
    ],
)
def test_weights_that_are_processed_again_are_served_with_their_new_kernel(
    arm, library, method, calls
):
    model, uncached = model_of(method, method), model_of(method, method)
    arm(model)
    assert_same(outputs(model), outputs(uncached))
    for both in (model, uncached):
        with torch.no_grad():
            for layer in both.routed:
                layer.w13_weight_scale.mul_(3)
        load(both)  # a new kernel and config object each time
    report = arm(model)
    assert (len(report.armed), report.refused) == (2, [])
    assert list(arming.reports()) == [report]
    assert_same(outputs(model), outputs(uncached))
    assert all(armed.cache.calls() == calls for armed in report.armed)
    del model, report
    assert library.all_is_freed()


def test_a_new_kernel_over_weights_that_did_not_move_is_the_one_that_runs(arm):
    class TritonExperts(kernels.TritonExperts):  # only what is named so is served
        version = 0

        def apply(self, hidden_states, **arguments):
            return super().apply(hidden_states, **arguments) + self.version

    class Method(methods.Int8ChannelMoEMethod):
        def make_experts(self, layer):
            experts = TritonExperts(self.moe, self.moe_quant_config)
            experts.version = getattr(layer, "version", 0)
            return experts

    model, uncached = model_of(Method), model_of(Method)
    first = arm(model).armed
    for both in (model, uncached):
        both.routed[0].version = 5
        load(both)
    assert arm(model).armed == first
    assert_same(outputs(model), outputs(uncached))


def test_weights_that_moved_are_armed_anew(arm, library):
    model, uncached = model_of(), model_of()
    arm(model)
    outputs(model)
    in_use = sum(library.memories.values())
    for both in (model, uncached):
        for layer in both.routed:
            layer.w13_weight = methods.parameter(layer.w13_weight * 2)
        load(both)
    report = arm(model)
    assert len(report.armed) == 2
    assert_same(outputs(model), outputs(uncached))
    gc.collect()
    assert sum(library.memories.values()) == in_use


def test_weights_that_moved_never_hold_two_sets_of_slots(arm, library, monkeypatch):
    model = model_of(count=4)
    arm(model)
    in_use, most = sum(library.memories.values()), 0
    create = library.create_memory

    def watched(device, size):
        nonlocal most
        handle = create(device, size)
        most = max(most, sum(library.memories.values()))
        return handle

    monkeypatch.setattr(library, "create_memory", watched)
    for layer in model.routed:
        layer.w13_weight = methods.parameter(layer.w13_weight * 2)
    load(model)
    assert len(arm(model).armed) == 4
    assert most <= in_use + 3 * 4096  # the proof that memory can be aliased


def test_a_layer_that_may_no_longer_be_armed_is_given_back(arm):
    model, uncached = model_of(methods.Int8ChannelMoEMethod), model_of(methods.Int8ChannelMoEMethod)
    arm(model)
    layer = model.routed[0]
    layer.quant_method.moe_kernel.fused_experts.hidden = [layer.w13_weight_scale]
    report = arm(model)
    assert (report.armed, len(report.refused)) == ([], 1)
    assert "apply" not in vars(layer.quant_method)
    assert_same(outputs(model), outputs(uncached))


def test_an_error_while_a_layer_is_bound_again_leaves_no_layer_with_an_old_kernel(arm, monkeypatch):
    model, uncached = (model_of(*(methods.Int8ChannelMoEMethod,) * 2) for _ in range(2))
    arm(model)
    for both in (model, uncached):
        with torch.no_grad():
            for layer in both.routed:
                layer.w13_weight_scale.mul_(3)
        load(both)
    calls = iter(range(100))

    def fail_first(layer):
        if next(calls) == 0:
            raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(vllm_compat, "ensure_quant_config", fail_first)
    report = arm(model)
    assert len(report.armed) == 1
    assert_same(outputs(model), outputs(uncached))


def test_a_vllm_that_is_newer_than_what_was_tried_is_served_with_one_line(arm, caplog, monkeypatch):
    arming._say_if_untried.cache_clear()
    monkeypatch.setattr(arming.versions, "running", lambda: "9.1.0")
    for _ in range(2):
        assert arm(model_of(methods.UnquantizedFusedMoEMethod)).armed
    assert caplog.text.count("vLLM 9.1.0 is newer than") == 1
    arming._say_if_untried.cache_clear()


def test_a_model_armed_again_goes_on_recording_and_hears_when_that_begins_anew(
    arm, settings, tmp_path
):
    settings(trace=tmp_path / "trace")
    model = model_of()
    recorders = arm(model).recorders
    outputs(model)
    load(model)
    assert arm(model).recorders == recorders
    outputs(model)
    (ring,) = (tmp_path / "trace").iterdir()
    reader = Reader(ring)
    assert len(reader.read().ids) == 2 * (1 + 2 + 9)
    lifecycle.weights_changed()
    assert reader.read().reset


def test_graphs_compiled_on_a_cpu_are_told_apart_by_the_layers_armed_in_them(
    arm, settings, monkeypatch
):
    given = {"of the user": 1}

    class Config:
        compilation_config = SimpleNamespace(mode=2, static_forward_context={})
        additional_config = given

    monkeypatch.setattr(vllm_compat, "_current_config", lambda: Config)
    settings(slots=None, fraction=1)  # refused
    arm(model_of())
    assert Config.additional_config is given

    settings(slots=3, fraction=None, storage="virtual")
    report = arm(model_of())
    keys = [layer.key for layer in report.armed]
    assert len(set(keys)) == 2
    assert Config.additional_config == {"of the user": 1, "expert_cache": keys}
    assert given == {"of the user": 1}
