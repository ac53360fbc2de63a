"""What tests ask of a model before and after it was armed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from expert_cache_shim import policy
from expert_cache_shim.layer import ArmedLayer

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


def loaded_layer(method: type = UnquantizedFusedMoEMethod, **options) -> RoutedExperts:
    return load(Model(RoutedExperts(method, seed=1, **options))).routed[0]


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def step(
    layer: RoutedExperts, tokens: int = 1, seed: int = 0, dtype: torch.dtype = torch.int32
) -> Inputs:
    return routing(layer, tokens, torch.Generator().manual_seed(seed), dtype)


def steps(
    layer: RoutedExperts, count: int, dtype: torch.dtype = torch.int32, seed: int = 0
) -> Iterator[Inputs]:
    """Random routing, mostly of a few tokens, at times of more experts than there are slots."""
    random = torch.Generator().manual_seed(seed)
    widths = torch.tensor([1, 1, 1, 2, 4, 9])
    for _ in range(count):
        tokens = int(widths[torch.randint(len(widths), (1,), generator=random)])
        yield routing(layer, tokens, random, dtype)


def counters(armed: ArmedLayer) -> dict[str, int]:
    return dict(zip(policy.COUNTERS, armed.cache.counters.tolist(), strict=True))
