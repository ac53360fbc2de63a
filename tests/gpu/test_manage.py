"""The manage kernel on a GPU, against the numpy reference after every step."""

from itertools import islice

import numpy as np
import pytest
import routing
import torch

from bench.device_layer import DeviceLayer, Difference
from expert_cache_shim.policy import CODES, MAX_IDS


def step(layer: DeviceLayer, ids: np.ndarray, mode: str = "rows") -> None:
    """One layer-step on both, compared."""
    on_device = torch.from_numpy(ids).to(layer.device)
    row_ids = torch.full_like(on_device, -7)
    layer.manage(on_device, row_ids, mode)
    layer.expect(ids, row_ids, mode)
    layer.compare()


@pytest.mark.parametrize("policy", CODES)
@pytest.mark.parametrize(
    "experts, slots", [(2, 1), (31, 7), (128, 32), (128, 127), (512, 128), (1024, 1023)]
)
def test_equals_the_reference(library, device, policy, experts, slots):
    layer = DeviceLayer(library, experts, slots, policy, device)
    generator = np.random.default_rng(experts + slots)
    for kind in routing.KINDS.values():
        for ids in islice(kind(generator, experts), 8):
            mode = generator.choice(["rows", "scratch", "skip"], p=[0.6, 0.3, 0.1])
            step(layer, ids.astype(np.int32), mode)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_id_types(library, device, dtype):
    layer = DeviceLayer(library, 64, 16, device=device)
    generator = np.random.default_rng(2)
    for _ in range(12):
        step(layer, generator.integers(0, 70, (4, 8)).astype(dtype))


@pytest.mark.parametrize("placement", routing.PLACEMENTS.values(), ids=routing.PLACEMENTS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_expert_map(library, device, placement, dtype):
    generator = np.random.default_rng(4)
    expert_map = placement(generator, 128)
    layer = DeviceLayer(library, 128, 32, device=device, expert_map=expert_map)
    for kind in routing.KINDS.values():
        for ids in islice(kind(generator, len(expert_map)), 8):
            step(layer, ids.astype(dtype), generator.choice(["rows", "scratch"]))


def test_the_widest_step(library, device):
    layer = DeviceLayer(library, 128, 32, device=device)
    generator = np.random.default_rng(3)
    step(layer, generator.integers(0, 128, (4, 8)).astype(np.int32))
    step(layer, generator.integers(-1, 128, (MAX_IDS // 8, 8)).astype(np.int32))
    step(layer, generator.integers(0, 128, (4, 8)).astype(np.int32))


def test_ids_with_strides(library, device):
    layer = DeviceLayer(library, 64, 16, device=device)
    wide = torch.randint(0, 64, (8, 24), dtype=torch.int32, device=device)
    for ids in (wide[:, 3:11], wide[::2, ::3], wide.t()):
        row_ids = torch.empty(ids.shape, dtype=ids.dtype, device=device)
        layer.manage(ids, row_ids)
        layer.expect(ids.cpu().numpy(), row_ids)
        layer.compare()


def test_a_difference_is_noticed(library, device):
    """The control: a state that was tampered with does not pass."""
    layer = DeviceLayer(library, 64, 16, device=device)
    ids = np.arange(8, dtype=np.int32)[None]
    step(layer, ids)
    layer.state[8 + 3] = 5  # expert 3 is said to lie in row 5
    with pytest.raises(Difference, match="row_of"):
        layer.compare()
