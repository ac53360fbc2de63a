"""Kinds of pointers, aliased device memory, and what becomes of it."""

import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.timing import captured
from expert_cache_shim import native
from expert_cache_shim.discovery import ExpertTensors
from expert_cache_shim.mapped_file import MappedFile
from expert_cache_shim.storage import Allocator

EXPERTS, SLOTS = 16, 6
MIB = 2**20
DRIVER = 8 * MIB  # what the driver may take or keep for its own tables


@pytest.fixture
def allocator(library, device):
    return Allocator(library, device)


def pinned_tensors(shapes: list[tuple[int, ...]], seed: int = 0) -> ExpertTensors:
    """Per-expert tensors of random values in pinned host memory."""
    generator = torch.Generator().manual_seed(seed)
    tensors = ExpertTensors(EXPERTS)
    for number, shape in enumerate(shapes):
        values = torch.randn(EXPERTS, *shape, generator=generator).to(torch.bfloat16)
        tensors.add(values.pin_memory(), name=f"w13_{number}")
    return tensors


def test_kinds_of_pointers(library, device):
    on_device = torch.empty(1024, device=device)
    pinned = torch.empty(1024, pin_memory=True)
    pageable = np.empty(1024, np.uint8)
    assert library.pointer_kind(on_device.data_ptr()) == native.DEVICE
    assert library.pointer_kind(on_device.data_ptr() + 100) == native.DEVICE
    assert library.pointer_kind(pinned.data_ptr()) == native.HOST_READABLE
    assert library.pointer_kind(pinned.data_ptr() + 100) == native.HOST_READABLE
    assert library.pointer_kind(pageable.ctypes.data) == native.HOST_UNREADABLE


def test_a_host_tensor_that_torch_calls_a_device_tensor(library, device):
    """vLLM's offloader gives a module such views: `.device` says cuda, the memory is the host's."""
    pytest.importorskip("vllm", reason="needs vLLM's operators")
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    current_platform.import_kernels()
    pinned = torch.empty(1024, pin_memory=True)
    view = get_accelerator_view_from_cpu_tensor(pinned)
    assert view.device.type == "cuda"
    assert library.pointer_kind(view.data_ptr()) == native.HOST_READABLE


def test_host_memory_that_the_driver_does_not_map_leaves_no_error(allocator, device, caplog):
    """A runtime remembers what it refused, and torch raises that at its next launch."""
    nowhere = types.SimpleNamespace(path="nowhere", address=4096, size=4096)
    assert not allocator.expose(nowhere)
    assert "the driver does not map nowhere" in caplog.text
    assert torch.ones(1000, device=device).sum().item() == 1000


def test_a_file_in_memory_is_stored_to_by_the_device(allocator, device):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = MappedFile(Path(folder), ".test", b"EXPCTEST", {}, 64)
        view = allocator.view(file)
        view.fill_(7)
        torch.cuda.synchronize()
        assert file.content("u1", 64).tolist() == [7] * 64


def test_virtual_memory_is_device_memory_and_proves_itself(library, allocator):
    allocator.prove_virtual()
    rows = allocator.virtual(pinned_tensors([(MIB // 2,)]), SLOTS).placements[0].slots
    assert library.pointer_kind(rows.data_ptr()) == native.DEVICE
    assert library.pointer_kind(rows[-1].data_ptr()) == native.DEVICE


def test_layers_keep_their_slots_and_share_the_last_rows(allocator):
    tensors = pinned_tensors([(MIB // 2,), (MIB // 2,)])
    first, second = (
        [placement.slots for placement in allocator.virtual(tensors, SLOTS).placements]
        for _ in range(2)
    )
    for a, b in zip(first, second):
        a[:SLOTS], b[:SLOTS] = 1, 2
        a[SLOTS:] = 3
        assert (a[:SLOTS] == 1).all()
        assert (b[:SLOTS] == 2).all()
        assert (b[SLOTS:] == 3).all()
    # Tensors of one layer are read together: they may not share rows, though they look alike.
    first[0][-1] = 4
    assert (second[0][-1] == 4).all()
    assert (first[1][-1] == 3).all()


def test_a_product_over_virtual_rows_is_that_over_ordinary_rows(allocator, device):
    tensors = pinned_tensors([(512, 1024)])
    source = next(iter(tensors)).tensor
    rows = allocator.virtual(tensors, SLOTS).placements[0].slots
    rows.copy_(source)
    ordinary, x = source.to(device), torch.randn(4, 1024, device=device, dtype=torch.bfloat16)
    result = torch.empty(EXPERTS, 4, 512, device=device, dtype=torch.bfloat16)
    replay = captured(lambda: torch.matmul(x, rows.transpose(1, 2), out=result))
    result.zero_()
    replay()
    assert torch.equal(result, torch.matmul(x, ordinary.transpose(1, 2)))


def test_layers_cost_their_slots_and_one_set_of_overflow_rows(allocator, used_bytes):
    tensors = pinned_tensors([(MIB,), (MIB,)])  # 2 MiB records: slots end on a page
    record = 2 * 2 * MIB
    before = used_bytes()
    storages = [allocator.virtual(tensors, SLOTS) for _ in range(5)]
    expected = record * (5 * SLOTS + EXPERTS - SLOTS)
    assert sum(storage.private + storage.shared for storage in storages) == expected
    assert expected <= used_bytes() - before <= expected + DRIVER


@pytest.mark.parametrize("kind", ["virtual", "plain"])
def test_memory_is_given_back_with_its_last_tensor(library, device, used_bytes, kind):
    tensors = pinned_tensors([(MIB,), (MIB,)])

    def build() -> list:
        allocator = Allocator(library, device)
        if kind == "plain":
            return [allocator.plain(tensors, SLOTS, scratch=True) for _ in range(3)]
        return [allocator.virtual(tensors, SLOTS) for _ in range(3)]

    build()  # what the driver keeps, it has now
    before = used_bytes()
    for _ in range(4):
        storages = build()
        assert used_bytes() - before >= 3 * SLOTS * 4 * MIB
        del storages
        assert used_bytes() - before <= DRIVER


def test_memory_that_cannot_be_had_is_an_error_and_leaves_nothing_behind(
    library, device, used_bytes
):
    before = used_bytes()
    with pytest.raises(native.KernelError):
        library.create_memory(device.index, 2**50)
    assert used_bytes() - before <= DRIVER
