"""Rows of device memory: what is private, what is shared, and when it is freed."""

import ctypes
import gc

import pytest
import torch
from synthetic.counted_library import CountedLibrary

from expert_cache_shim import native
from expert_cache_shim.discovery import ExpertTensors
from expert_cache_shim.storage import ALIAS_FROM, Allocator, StorageError

E, S = 8, 3
CPU = torch.device("cpu")
PAGE = 4096  # what the host maps by
LARGE_PAGE = 2 << 20  # what a GPU maps by


@pytest.fixture
def library(host_library) -> CountedLibrary:
    return CountedLibrary(host_library)


@pytest.fixture
def allocator(library) -> Allocator:
    return Allocator(library, CPU)


def layer(*tensors: torch.Tensor, experts: int = E) -> ExpertTensors:
    """The tensors of one layer, w13 first."""
    found = ExpertTensors(experts)
    for index, tensor in enumerate(tensors):
        assert found.add(tensor, name=f"w13_{index}") is not None
    return found


def weight(bytes_a_record: int = 2 * PAGE) -> torch.Tensor:
    return torch.zeros(E, bytes_a_record // 4)


def slots(storage) -> list[torch.Tensor]:
    return [placement.slots for placement in storage.placements]


# --- Virtual storage ------------------------------------------------------------------------


def test_slots_are_private_and_overflow_rows_are_shared_between_layers(allocator):
    (first,) = slots(allocator.virtual(layer(weight()), S))
    (second,) = slots(allocator.virtual(layer(weight()), S))
    first.fill_(1)
    second.fill_(2)
    assert (first[:S] == 1).all()
    assert (first[S:] == 2).all()
    first[S:] = 3
    assert (second[:S] == 2).all()
    assert (second[S:] == 3).all()


@pytest.mark.parametrize("bytes_a_record", [PAGE, PAGE + 4, 3 * PAGE - 4, 5 * PAGE])
def test_no_two_rows_of_a_layer_overlap(allocator, bytes_a_record):
    for count in range(1, E):
        (rows,) = slots(allocator.virtual(layer(weight(bytes_a_record)), count))
        for row in range(E):
            rows[row] = row + 1
        assert all((rows[row] == row + 1).all() for row in range(E))


@pytest.mark.parametrize("bytes_a_record", [PAGE + 4, 3 * PAGE - 4])
def test_a_slot_that_ends_inside_a_page_is_private_to_its_last_byte(allocator, bytes_a_record):
    (first,) = slots(allocator.virtual(layer(weight(bytes_a_record)), S))
    (second,) = slots(allocator.virtual(layer(weight(bytes_a_record)), S))
    first[:S] = 1
    second.fill_(2)
    assert (first[:S] == 1).all()


def test_two_tensors_of_one_layer_share_nothing_even_if_they_are_of_one_size(allocator):
    w13, w2 = slots(allocator.virtual(layer(weight(), weight()), S))
    w13.fill_(1)
    w2.fill_(2)
    assert (w13 == 1).all()
    assert (w2 == 2).all()


def test_the_nth_tensor_of_a_size_shares_with_the_nth_of_the_next_layer(allocator):
    first = slots(allocator.virtual(layer(weight(), weight()), S))
    second = slots(allocator.virtual(layer(weight(), weight()), S))
    for value, tensor in enumerate(first):
        tensor[S:] = value
    assert all((tensor[S:] == value).all() for value, tensor in enumerate(second))


def test_layers_of_other_sizes_or_slots_share_nothing(allocator):
    tensors = [
        slots(allocator.virtual(layer(weight(size)), count))[0]
        for size, count in ((2 * PAGE, S), (3 * PAGE, S), (2 * PAGE, S + 1))
    ]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))


def test_the_memory_of_many_layers_is_their_slots_and_one_set_of_overflow_rows(allocator, library):
    record, layers = 2 * PAGE, 5
    storages = [allocator.virtual(layer(weight(record)), S) for _ in range(layers)]
    assert sum(library.memories.values()) == (layers * S + E - S) * record
    assert [s.private for s in storages] == [S * record] * layers
    assert [s.shared for s in storages] == [(E - S) * record] + [0] * (layers - 1)


def test_the_rows_have_the_shape_strides_and_type_of_the_weight(allocator):
    weights = (
        torch.zeros(E, 40, 130, dtype=torch.bfloat16)[:, :, :128],  # padded inside
        torch.zeros(E, 3, PAGE, dtype=torch.int8)[:, :2],  # padded between
        torch.zeros(E, 64, 128).transpose(1, 2),
        torch.zeros(E, 64, 128).to(torch.float8_e4m3fn),
    )
    rows = slots(allocator.virtual(layer(*weights), S))
    for found, wanted in zip(rows, weights, strict=True):
        assert (found.shape, found.stride(), found.dtype) == (
            wanted.shape, wanted.stride(), wanted.dtype,
        )  # fmt: skip


def test_a_small_tensor_is_private_whole_and_starts_as_the_host_copy(allocator, library):
    scale = torch.rand(E, 5)
    (first,) = slots(allocator.virtual(layer(scale), S))
    (second,) = slots(allocator.virtual(layer(scale), S))
    assert not library.memories
    assert torch.equal(first, scale)
    assert first.data_ptr() != scale.data_ptr()
    first.fill_(-1)
    assert torch.equal(second, scale)


def test_slots_whose_last_page_holds_every_row_need_no_overflow_memory(
    library, allocator, monkeypatch
):
    monkeypatch.setattr(library, "granularity", lambda device: LARGE_PAGE)
    storage = allocator.virtual(layer(weight(ALIAS_FROM)), S)
    assert (storage.private, storage.shared) == (LARGE_PAGE, 0)
    (rows,) = slots(storage)
    for row in range(E):
        rows[row] = row
    assert all((rows[row] == row).all() for row in range(E))


# --- Proof ----------------------------------------------------------------------------------


def test_the_host_proves_virtual_memory_and_keeps_none_of_it(allocator, library):
    allocator.prove_virtual()
    assert library.all_is_freed()


def test_memory_that_does_not_alias_is_found_out(host_library):
    class NoAlias(CountedLibrary):
        """Maps fresh memory in place of the second one."""

        def create_range(self, device, memories):
            fresh = self.create_memory(device, self.memories[memories[-1]])
            return super().create_range(device, [*memories[:-1], fresh])

    with pytest.raises(StorageError, match="does not read back"):
        Allocator(NoAlias(host_library), CPU).prove_virtual()


def test_private_memory_that_is_not_apart_is_found_out(host_library):
    class OneMemory(CountedLibrary):
        """Maps the same private memory in every range."""

        def create_range(self, device, memories):
            self.private = getattr(self, "private", memories[0])
            return super().create_range(device, [self.private, *memories[1:]])

    with pytest.raises(StorageError, match="does not read back"):
        Allocator(OneMemory(host_library), CPU).prove_virtual()


@pytest.mark.parametrize("function", ["granularity", "create_memory", "create_range"])
@pytest.mark.parametrize("call", [0, 1])
def test_a_driver_that_refuses_is_a_storage_error_and_leaves_nothing(
    library, allocator, monkeypatch, function, call
):
    fail_at_call(monkeypatch, library, function, call if function != "granularity" else 0)
    with pytest.raises(StorageError, match=r"no virtual memory management here: .*refused"):
        allocator.prove_virtual()
    assert library.all_is_freed()


def fail_at_call(monkeypatch, library, function, call):
    """Makes the call of that number, and all after it, fail as the driver would."""
    original, calls = getattr(library, function), iter(range(10**6))

    def run(*args):
        if next(calls) >= call:
            raise native.KernelError(function, -13, "refused")
        return original(*args)

    monkeypatch.setattr(library, function, run)


# --- Lifetime -------------------------------------------------------------------------------


def test_everything_is_freed_with_the_storage(allocator, library):
    storage = allocator.virtual(layer(weight(), weight(3 * PAGE)), S)
    assert (len(library.memories), len(library.ranges)) == (4, 2)
    del storage
    assert library.all_is_freed()


def test_a_view_of_a_view_keeps_its_memory_mapped(allocator, library):
    storage = allocator.virtual(layer(weight()), S)
    last = storage.placements[0].slots.view(torch.int32)[E - 1, 5:]
    del storage
    gc.collect()
    last.fill_(7)
    assert (last == 7).all()
    del last
    assert library.all_is_freed()


def test_shared_memory_outlives_the_layer_that_made_it(allocator, library):
    first = allocator.virtual(layer(weight()), S)
    second = allocator.virtual(layer(weight()), S)
    del first
    gc.collect()
    (rows,) = slots(second)
    rows[S:] = 4
    assert (rows[S:] == 4).all()
    del second, rows
    assert library.all_is_freed()


def test_storage_outlives_its_allocator(allocator, library):
    storage = Allocator(library, CPU).virtual(layer(weight()), S)
    gc.collect()
    slots(storage)[0].fill_(1)
    assert (slots(storage)[0] == 1).all()


def test_shared_memory_is_made_again_after_all_its_layers_died(allocator, library):
    first = allocator.virtual(layer(weight()), S)
    shared = first.shared
    del first
    assert library.all_is_freed()
    assert allocator.virtual(layer(weight()), S).shared == shared


@pytest.mark.parametrize("function", ["create_memory", "create_range"])
@pytest.mark.parametrize("call", range(4))
def test_a_driver_that_refuses_half_way_leaves_nothing(
    library, allocator, monkeypatch, function, call
):
    tensors = layer(*(weight() for _ in range(5)))
    fail_at_call(monkeypatch, library, function, call)
    with pytest.raises(native.KernelError, match="refused"):
        allocator.virtual(tensors, S)
    assert library.all_is_freed()


# --- Plain storage --------------------------------------------------------------------------


def test_plain_slots_have_as_many_rows_as_slots(allocator):
    big, small = torch.zeros(E, 2, PAGE), torch.rand(E, 3)
    storage = allocator.plain(layer(big, small), S, scratch=False)
    assert [tuple(rows.shape) for rows in slots(storage)] == [(S, 2, PAGE), (S, 3)]
    assert torch.equal(slots(storage)[1], small[:S])
    assert not storage.has_scratch
    assert (storage.private, storage.shared) == (S * (2 * PAGE * 4 + 12), 0)


def test_plain_scratch_is_shared_by_layers_and_not_by_tensors(allocator):
    first = allocator.plain(layer(weight(), weight()), S, scratch=True)
    second = allocator.plain(layer(weight(), weight()), S, scratch=True)
    addresses = [
        [placement.scratch.data_ptr() for placement in storage.placements]
        for storage in (first, second)
    ]
    assert addresses[0] == addresses[1]
    assert len(set(addresses[0])) == 2
    assert len({rows.data_ptr() for s in (first, second) for rows in slots(s)}) == 4
    assert first.placements[0].scratch.shape == (E, 2 * PAGE // 4)
    assert (first.shared, second.shared) == (2 * E * 2 * PAGE, 0)


def test_plain_scratch_of_another_type_or_layout_is_another(allocator):
    weights = (
        weight(),
        weight().view(torch.int32),
        weight().view(E, 2, -1).transpose(1, 2),
    )
    scratch = [allocator.plain(layer(w), S, scratch=True).placements[0].scratch for w in weights]
    assert len({rows.data_ptr() for rows in scratch}) == 3


def test_a_small_scratch_starts_with_numbers(allocator):
    scale = torch.rand(E, 3)
    storage = allocator.plain(layer(scale), S, scratch=True)
    assert torch.equal(storage.placements[0].scratch, scale)


# --- Both -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["virtual", "plain"])
def test_marks_of_a_weight_go_along_and_the_offload_flag_does_not(allocator, kind):
    shuffled, plain = weight(), weight()
    shuffled.is_shuffled = True
    shuffled._vllm_is_uva_offloaded = plain._vllm_is_uva_offloaded = True
    tensors = layer(shuffled, plain)
    storage = (
        allocator.virtual(tensors, S) if kind == "virtual" else allocator.plain(tensors, S, True)
    )
    rows = slots(storage)
    assert rows[0].is_shuffled
    assert not hasattr(rows[1], "is_shuffled")
    assert not any(hasattr(tensor, "_vllm_is_uva_offloaded") for tensor in rows)


@pytest.mark.parametrize("scratch", [False, True])
def test_the_table_holds_addresses_and_sizes_for_the_gather_kernel(allocator, scratch):
    padded = torch.zeros(E, 3, PAGE)[:, :2]
    storage = allocator.plain(layer(padded, torch.zeros(E)), S, scratch=True)
    table = storage.table(scratch)
    assert (table.dtype, table.numel()) == (torch.uint8, 2 * ctypes.sizeof(native.Tensor))
    entries = (native.Tensor * 2).from_buffer_copy(table.numpy().tobytes())
    for entry, place in zip(entries, storage.placements, strict=True):
        rows = place.scratch if scratch else place.slots
        assert entry.source == place.source.tensor.data_ptr()
        assert entry.slots == place.slots.data_ptr()
        assert entry.rows == rows.data_ptr()
    sizes = [(entry.bytes, entry.stride) for entry in entries]
    assert sizes == [(2 * PAGE * 4, 3 * PAGE * 4), (4, 4)]


def test_on_a_gpu_with_large_pages_records_below_the_threshold_are_not_aliased(
    library, allocator, monkeypatch
):
    monkeypatch.setattr(library, "granularity", lambda device: LARGE_PAGE)
    monkeypatch.setattr(library, "create_memory", lambda device, size: pytest.fail("aliased"))
    record = weight(ALIAS_FROM - 4)
    (rows,) = slots(allocator.virtual(layer(record), S))
    assert torch.equal(rows, record)
