"""What a step replaces in vLLM's modules holds for its own thread, for as long as it runs.

Engines of one process may run in threads. Here another engine's step is made at the one moment
that matters: while a step of the first is in its kernel.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from synthetic import Model, RoutedExperts, kernels, load, marlin, marlin_methods, methods, tuning
from synthetic.checks import assert_same, model_of, outputs

from expert_cache_shim import vllm_compat

pytest_plugins = ["synthetic.fixtures"]

# A method, the storage with which its step replaces a function, and that function.
CASES = [
    (marlin_methods.OrderedMoEMethod, "virtual", marlin, "moe_align_block_size"),
    (methods.UnquantizedFusedMoEMethod, "plain", tuning.package, "get_config"),
]


def engine(method, **options) -> Model:
    return load(Model(RoutedExperts(method, seed=3, top_k=3, **options)))


@pytest.fixture
def in_the_kernel(monkeypatch):
    """Calls an action once, while the next step of this thread is in its kernel."""
    compute, main = kernels.compute_experts, threading.get_ident()
    actions = []

    def compute_experts(*args, **kwargs):
        if actions and threading.get_ident() == main:
            actions.pop()()
        return compute(*args, **kwargs)

    monkeypatch.setattr(kernels, "compute_experts", compute_experts)
    return actions.append


def served_meanwhile(arm, settings, in_the_kernel, method, storage) -> list[torch.Tensor]:
    """Outputs of an uncached engine in a thread, while a cached one is in its kernel. Twelve
    experts: of another number there is another tuned configuration, and another order."""
    settings(storage=storage, slots=4)
    cached, other = engine(method), engine(method, experts=12)
    assert len(arm(cached).armed) == 1
    found: list[torch.Tensor] = []

    def serve_other():
        thread = threading.Thread(target=lambda: found.extend(outputs(other)))
        thread.start()
        thread.join()

    in_the_kernel(serve_other)
    assert_same(outputs(cached), outputs(engine(method)))
    return found


@pytest.mark.parametrize(("method", "storage", "module", "name"), CASES)
def test_another_engine_sees_vllms_own_function(
    arm, settings, in_the_kernel, method, storage, module, name
):
    function = getattr(module, name)
    found = served_meanwhile(arm, settings, in_the_kernel, method, storage)
    assert_same(found, outputs(engine(method, experts=12)))
    assert getattr(module, name) is function


@pytest.mark.parametrize(("method", "storage", "module", "name"), CASES)
def test_control_what_is_replaced_for_all_threads_would_show(
    arm, settings, in_the_kernel, monkeypatch, method, storage, module, name
):
    monkeypatch.setattr(vllm_compat, "threading", SimpleNamespace(get_ident=lambda: 0))
    found = served_meanwhile(arm, settings, in_the_kernel, method, storage)
    with pytest.raises(AssertionError):
        assert_same(found, outputs(engine(method, experts=12)))


@pytest.mark.parametrize(("method", "storage", "module", "name"), CASES)
def test_two_cached_engines_put_back_what_was_there(
    arm, settings, in_the_kernel, method, storage, module, name
):
    settings(storage=storage, slots=4)
    models = [engine(method), model_of(method)]
    for model in models:
        assert len(arm(model).armed) == 1
    function, found = getattr(module, name), []
    thread = threading.Thread(target=lambda: found.extend(outputs(models[1])))

    def begin_other():
        thread.start()
        thread.join(0.2)  # it waits for this step; if it did not, it would be in its own now

    in_the_kernel(begin_other)
    assert_same(outputs(models[0]), outputs(engine(method)))
    thread.join()
    assert_same(found, outputs(model_of(method)))
    assert getattr(module, name) is function
