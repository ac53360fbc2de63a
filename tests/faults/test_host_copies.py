"""Host copies that go, move or change while the kernels read them by address."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch
from synthetic.checks import assert_same, model_of, outputs

from expert_cache_shim import native

pytest_plugins = ["synthetic.fixtures"]


@pytest.fixture
def armed(arm):
    """A model of two layers, armed, that has served a few steps."""
    model = model_of()
    assert len(arm(model).armed) == 2
    outputs(model)
    return model


def changed_weights(layer) -> torch.Tensor:
    return layer.w13_weight.detach().clone() * 2


def with_other_data(layer):
    layer.w13_weight.data = changed_weights(layer)


def with_another_parameter(layer):
    layer.w13_weight = torch.nn.Parameter(changed_weights(layer), requires_grad=False)


def as_a_plain_attribute(layer):
    weights = changed_weights(layer)
    del layer.w13_weight
    layer.w13_weight = weights


REPLACED = [with_other_data, with_another_parameter, as_a_plain_attribute]


@pytest.mark.parametrize("replace", REPLACED)
def test_a_layer_with_replaced_tensors_serves_the_new_ones(armed, caplog, replace):
    uncached = model_of()
    replace(armed.routed[0])
    with_other_data(uncached.routed[0])
    assert_same(outputs(armed), outputs(uncached))
    line = "is served by vLLM's own path from now on, because its tensors were replaced"
    (message,) = (message for message in caplog.messages if line in message)
    assert message.startswith("expert cache: layers.0.experts.routed_experts")
    assert "apply" not in vars(armed.routed[0].quant_method)
    assert "apply" in vars(armed.routed[1].quant_method)


def test_memory_that_a_parameter_lets_go_stays_while_kernels_know_its_address(arm):
    """A graph that was captured may read it yet."""
    model = model_of(count=1)
    weight = model.routed[0].w13_weight
    memory = (ctypes.c_uint8 * weight.untyped_storage().nbytes())()
    shared = torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape)
    weight.data = shared.copy_(weight)
    report = arm(model)
    kept = weakref.ref(memory)
    weight.data = changed_weights(model.routed[0])
    del memory, shared
    gc.collect()
    assert kept() is not None
    del report, model, weight
    gc.collect()
    assert kept() is None


def test_a_launch_that_fails_in_a_step_that_reads_through_stays_ours(
    arm, settings, library, monkeypatch, caplog
):
    settings(storage="plain", overflow="off")
    model, uncached = model_of(count=1), model_of(count=1)
    assert len(arm(model).armed) == 1

    def fail(args, stream=0):
        raise native.KernelError("expert_cache_manage", 700, "an illegal memory access")

    monkeypatch.setattr(library, "manage", fail)
    assert_same(outputs(model), outputs(uncached))
    assert caplog.text.count("because a kernel could not be launched") == 1
