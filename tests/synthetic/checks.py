"""What tests ask of a model before and after it was armed."""

from __future__ import annotations

import torch

from .methods import UnquantizedFusedMoEMethod
from .models import Model, RoutedExperts, call, load, routing


def model_of(*methods: type, count: int = 2) -> Model:
    """A loaded model with a layer of each method, or `count` unquantized ones."""
    chosen = methods or (UnquantizedFusedMoEMethod,) * count
    return load(Model(*(RoutedExperts(method, seed=n) for n, method in enumerate(chosen))))


def parts(model: Model) -> list[dict[str, object]]:
    """All that arming could have changed, per layer, to be compared by identity."""
    return [
        {
            **{f"layer.{k}": v for k, v in vars(layer).items()},
            **{f"parameter.{k}": v for k, v in layer._parameters.items()},
            **{f"buffer.{k}": v for k, v in layer._buffers.items()},
            **{f"method.{k}": v for k, v in vars(layer.quant_method).items()},
        }
        for layer in model.routed
    ]


def assert_untouched(model: Model, before: list[dict[str, object]]) -> None:
    for now, then in zip(parts(model), before, strict=True):
        assert now.keys() == then.keys()
        assert all(now[name] is then[name] for name in now)


def outputs(model: Model) -> list[torch.Tensor]:
    """Of a few steps, narrow and wide, through every layer that has routing ids."""
    random = torch.Generator().manual_seed(0)
    return [
        call(layer, *routing(layer, tokens, random))
        for tokens in (1, 2, 9)
        for layer in model.routed
        if not layer.quant_method.is_monolithic
    ]


def assert_same(outs: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(outs, others, strict=True))
