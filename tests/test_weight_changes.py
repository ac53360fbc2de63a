"""What other weights, and sleep, do to a cache: nothing in a slot is used that is stale or gone.

On layers that look like vLLM's; `engine/test_lifecycle.py` has vLLM's own ways to change weights.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from synthetic import methods
from synthetic.checks import assert_same, model_of, outputs
from synthetic.worker import wipe

from expert_cache_shim import arming, lifecycle, telemetry, vllm_compat

pytest_plugins = ["synthetic.fixtures"]

CHANGES = (*vllm_compat.WEIGHTS_CHANGING, *vllm_compat.WEIGHTS_CHANGED)


def changing_worker(change):
    """A worker whose every way to change weights is `change`."""

    def method(self, *args, **kwargs):
        return change()

    worker = type("Worker", (), dict.fromkeys((*CHANGES, vllm_compat.WAKE_UP), method))
    lifecycle.watch(worker)
    return worker()


def negate(*models):
    """The host copies hold other bytes, in place."""
    for model in models:
        model.routed[0].w13_weight.data.neg_()


@pytest.mark.parametrize("name", CHANGES)
def test_new_weights_in_place_are_used_by_the_next_step(arm, name):
    models = [model_of(methods.Int8ChannelMoEMethod) for _ in range(2)]
    model, fresh = models
    arm(model)
    before = outputs(model)

    def change():
        negate(*models)
        return "changed"

    assert getattr(changing_worker(change), name)() == "changed"
    after = outputs(model)
    assert_same(after, outputs(fresh))
    assert not all(torch.equal(one, other) for one, other in zip(before, after))


def test_control_without_the_worker_slots_would_hold_the_old_weights(arm):
    model, fresh = (model_of(methods.Int8ChannelMoEMethod) for _ in range(2))
    arm(model)
    outputs(model)
    negate(model, fresh)
    with pytest.raises(AssertionError):
        assert_same(outputs(model), outputs(fresh))


def test_weights_that_are_written_by_hand_are_used_after_saying_so(arm):
    model, fresh = (model_of(methods.Int8ChannelMoEMethod) for _ in range(2))
    arm(model)
    outputs(model)
    negate(model, fresh)
    lifecycle.weights_changed()
    assert_same(outputs(model), outputs(fresh))


def test_weights_that_pytorch_loads_are_used_after_saying_so(arm):
    """`load_state_dict` is PyTorch's, not the model's own method."""
    model, fresh = (model_of(methods.Int8ChannelMoEMethod) for _ in range(2))
    arm(model)
    outputs(model)
    other = {name: value.neg() for name, value in model.state_dict().items()}
    for one in (model, fresh):
        one.load_state_dict(other)
    lifecycle.weights_changed()
    assert_same(outputs(model), outputs(fresh))


@pytest.mark.parametrize("armed_in", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("changed_in", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_it_does_not_matter_in_which_mode_a_model_is_armed(arm, caplog, armed_in, changed_in):
    """What is made in inference mode cannot be written to outside of it."""
    model, fresh = (model_of(methods.Int8ChannelMoEMethod) for _ in range(2))
    with armed_in():
        report = arm(model)
    outputs(model)
    with changed_in():
        negate(model, fresh)
        lifecycle.weights_changed()
    assert_same(outputs(model), outputs(fresh))
    wipe(report)
    with changed_in():
        changing_worker(lambda: None).wake_up()
    assert_same(outputs(model), outputs(fresh))
    assert caplog.messages == []


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_fails_half_way_is_the_workers_error_and_leaves_no_slot_stale(arm, name):
    models = [model_of(methods.Int8ChannelMoEMethod) for _ in range(2)]
    arm(models[0])
    outputs(models[0])

    def change():
        negate(*models)
        raise ConnectionError("the trainer has gone")

    with pytest.raises(ConnectionError):
        getattr(changing_worker(change), name)()
    assert_same(*map(outputs, models))


def test_a_layer_in_pieces_between_two_parts_of_an_update_stays_armed(arm, caplog):
    """vLLM keeps a layer whose weights have not all come on the meta device."""
    model, fresh = (model_of(methods.Int8ChannelMoEMethod) for _ in range(2))
    report = arm(model)
    outputs(model)
    layer, serving = model.routed[0], {}

    def take_apart():
        serving.update(layer._parameters)
        for name, parameter in serving.items():
            meta = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
            layer._parameters[name] = meta

    def put_together():
        layer._parameters.update(serving)
        negate(model, fresh)

    changing_worker(take_apart).update_weights({})
    changing_worker(put_together).finish_weight_update()
    assert caplog.messages == []
    assert_same(outputs(model), outputs(fresh))
    assert len(report.armed) == 1


def test_counters_go_on_when_weights_change_or_come_back(arm):
    model = model_of(methods.Int8ChannelMoEMethod)
    report = arm(model)
    outputs(model)
    counted = report.armed[0].cache.counters.tolist()
    assert any(counted)
    for name in (*CHANGES, vllm_compat.WAKE_UP):
        getattr(changing_worker(lambda: None), name)()
        assert report.armed[0].cache.counters.tolist() == counted, name
    assert report.snapshot.mirror(0).tolist() == counted


def reload(model):
    """What vLLM's layerwise reload does: weights are loaded into new parameters and processed
    there, then copied into those that serve. The new config goes on holding the new ones."""
    layer = model.routed[0]
    serving = dict(layer._parameters)
    for name, parameter in serving.items():
        new = parameter.data * 2 if name.endswith("scale") else parameter.data.roll(1, 0)
        layer._parameters[name] = torch.nn.Parameter(new, requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    for name, parameter in serving.items():
        parameter.data.copy_(layer._parameters[name])
        layer._parameters[name] = parameter


@pytest.mark.parametrize("storage", ["virtual", "plain"])
@pytest.mark.parametrize("method", [methods.Int8ChannelMoEMethod, methods.Fp8BlockMoEMethod])
def test_a_reloaded_layer_whose_config_holds_new_tensors_stays_armed(
    arm, settings, storage, method
):
    settings(storage=storage)
    models = [model_of(method) for _ in range(2)]
    report = arm(models[0])
    before = outputs(models[0])
    (armed,) = report.armed
    for _ in range(2):
        changing_worker(lambda: [reload(model) for model in models]).reload_weights()
        assert report.armed == [armed]
        after = outputs(models[0])
        assert_same(after, outputs(models[1]))
        assert not all(torch.equal(one, other) for one, other in zip(before, after))
        before = after
    assert armed.cache.counters.tolist()[2] > 0


def test_a_layer_that_a_new_config_makes_unfit_is_given_back_with_its_reason(arm, caplog, tmp_path):
    kinds = (methods.Int8ChannelMoEMethod, methods.UnquantizedFusedMoEMethod)
    models = [model_of(*kinds) for _ in range(2)]
    report = arm(models[0])
    outputs(models[0])

    def change():
        for model in models:
            reload(model)
            model.routed[0].quant_method.held = [torch.arange(8)]

    changing_worker(change).reload_weights()
    assert len(report.armed) == 1
    (snapshot,) = telemetry.read_folder(tmp_path / "snapshots")
    assert snapshot.given_back.tolist() == [True, False]
    (line,) = caplog.messages
    assert "1 MoE layers of synthetic are no longer armed" in line
    assert "held.0 is per-expert data that the cache cannot stand in for" in line
    assert_same(*map(outputs, models))


def test_a_config_whose_new_tensor_is_not_what_was_copied_gives_the_layer_back(arm, caplog):
    models = [model_of(methods.Int8ChannelMoEMethod) for _ in range(2)]
    report = arm(models[0])
    outputs(models[0])

    def change():
        for model in models:
            reload(model)
            model.routed[0].quant_method.moe_quant_config._w1.scale.data.mul_(3)

    changing_worker(change).reload_weights()
    assert report.armed == []
    assert "1 MoE layers of synthetic are no longer armed" in caplog.text
    assert_same(*map(outputs, models))


@pytest.mark.parametrize("storage", ["virtual", "plain"])
@pytest.mark.parametrize("tags", [None, ["weights"], ["weights", "kv_cache"]])
def test_waking_up_restores_what_sleep_wiped(arm, settings, storage, tags):
    settings(storage=storage)
    model = model_of(methods.Int8ChannelMoEMethod, methods.UnquantizedFusedMoEMethod)
    report = arm(model)
    before = outputs(model)
    counted = [armed.cache.counters.tolist() for armed in report.armed]

    changing_worker(lambda: wipe(report)).wake_up(tags)
    assert [armed.cache.counters.tolist() for armed in report.armed] == counted
    assert_same(outputs(model), before)


def test_control_slots_that_sleep_wiped_would_change_the_output(arm, settings):
    settings(storage="plain")
    model = model_of(methods.Int8ChannelMoEMethod)
    report = arm(model)
    before = outputs(model)
    for armed in report.armed:
        for placement in armed.cache.storage.placements:
            placement.slots.view(torch.uint8).fill_(0xA5)
    with pytest.raises(AssertionError):
        assert_same(outputs(model), before)


def test_waking_up_without_a_snapshot_begins_to_count_anew(arm, settings):
    settings(snapshot="off")
    model = model_of(methods.Int8ChannelMoEMethod)
    report = arm(model)
    before = outputs(model)
    changing_worker(lambda: wipe(report)).wake_up()
    assert report.armed[0].cache.counters.tolist() == [0] * 8
    assert_same(outputs(model), before)


def test_waking_up_another_part_touches_nothing(arm, monkeypatch):
    """Device memory of the weights is not mapped yet."""
    report = arm(model_of(methods.Int8ChannelMoEMethod))
    monkeypatch.setattr(type(report.armed[0].cache), "forget", lambda cache: 1 // 0)
    monkeypatch.setattr(arming, "refresh", lambda reports: 1 // 0)
    changing_worker(lambda: None).wake_up(tags=["kv_cache"])
    changing_worker(lambda: None).wake_up(["kv_cache"])


def test_waking_up_that_fails_touches_nothing(arm, monkeypatch, caplog):
    report = arm(model_of(methods.Int8ChannelMoEMethod))
    monkeypatch.setattr(type(report.armed[0].cache), "forget", lambda cache: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        changing_worker(lambda: 1 // 0).wake_up()
    assert caplog.messages == []


def test_a_layer_whose_tensors_were_replaced_goes_back_to_vllm(arm, caplog):
    models = [model_of(methods.Int8ChannelMoEMethod) for _ in range(2)]
    report = arm(models[0])
    outputs(models[0])
    cache = weakref.ref(report.armed[0].cache)

    def replace():
        for layer in (model.routed[0] for model in models):
            changed = layer.w13_weight.data.neg()
            layer.w13_weight = torch.nn.Parameter(changed, requires_grad=False)

    changing_worker(replace).reload_weights()
    assert "apply" not in vars(models[0].routed[0].quant_method)
    (line,) = caplog.messages
    name = "layers.0.experts.routed_experts"
    assert f"1 MoE layers of synthetic are no longer armed ({name}): its tensors were" in line
    assert_same(*map(outputs, models))
    # A captured graph may hold its addresses for as long as there is the model.
    assert report.armed == []
    assert cache() is not None
    models.clear()
    del report
    gc.collect()
    assert cache() is None
