"""The gather kernel on a GPU: every byte of device memory compared after it."""

import numpy as np
import pytest
import torch

from bench.device_layer import DeviceTensors, Difference, copies_to_rows

RECORDS = [1, 2, 3, 15, 16, 17, 68, 4096, 4096 + 12, 65536 + 7]


@pytest.mark.parametrize("grid", [(16, 1, 0), (1, 1, 64), (4, 4, 128), (3, 2, 512), (8, 8, 1024)])
@pytest.mark.parametrize("count", [0, 1, 5, 24])
def test_records_of_any_size_in_one_launch(library, device, grid, count):
    tensors = DeviceTensors(library, 24, RECORDS, device)
    copies = copies_to_rows(np.random.default_rng(count), 24, count)
    tensors.check(copies, **dict(zip(("chunks", "lanes", "threads"), grid)))


@pytest.mark.parametrize("device_lanes", [0, 1, 8])
def test_a_scratch_is_filled_from_host_and_slots(library, device, device_lanes):
    tensors = DeviceTensors(library, 24, RECORDS, device, scratch=True)
    generator = np.random.default_rng(1)
    copies = copies_to_rows(generator, 24, 18)
    copies[:, 2] = copies[:, 0]
    slots = generator.permutation(24)
    copies[12:, 1] = slots[12:18]  # residents, from their slots
    copies[1:12:2, 3] = slots[1:12:2]  # missed and admitted: to scratch and slot
    tensors.check(copies, device_lanes=device_lanes)


def test_records_of_megabytes(library, device):
    tensors = DeviceTensors(library, 8, [6291456, 3145728], device)
    tensors.check(copies_to_rows(np.random.default_rng(2), 8, 8))


def test_memory_beyond_four_gibibytes(library, device):
    """Offsets of more than 32 bits."""
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free device memory")
    size = 768 * 2**20
    tensors = DeviceTensors(library, 6, [size], device)
    copies = np.array([[5, -1, 0, -1], [0, -1, 5, -1]], np.int32)
    tensors.gather(tensors.state(copies))
    for expert, _, row, _ in copies:
        for part in (slice(4096), slice(-4096, None)):
            assert torch.equal(tensors.rows[0][row, part].cpu(), tensors.sources[0][expert, part])


def test_a_wrong_byte_is_noticed(library, device):
    """The control: a gather of the neighbour's record does not pass."""
    tensors = DeviceTensors(library, 8, [64, 4096], device)
    copies = copies_to_rows(np.random.default_rng(3), 8, 3)
    right = tensors.state

    def wrong_expert(copies: np.ndarray) -> torch.Tensor:
        moved = copies.copy()
        moved[:, 0] = (moved[:, 0] + 1) % 8
        return right(moved)

    tensors.state = wrong_expert
    with pytest.raises(Difference, match="must leave"):
        tensors.check(copies)
