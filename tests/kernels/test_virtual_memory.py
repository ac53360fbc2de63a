"""Physical memories that several address ranges map, on the host build."""

import ctypes
import os

import numpy as np
import pytest

from expert_cache_shim.native import KernelError

BAD_POINTER, BAD_SIZE, NO_MEMORY = -8, -11, -12


class Mapping:
    """Memories and ranges of one test, freed at its end: ranges first."""

    def __init__(self, library):
        self.library = library
        self.granularity = library.granularity(0)
        self.memories = []
        self.ranges = []

    def memory(self, units=1):
        self.memories.append(self.library.create_memory(0, units * self.granularity))
        return self.memories[-1]

    def bytes_over(self, *memories, units=None):
        """A new range over memories of one unit each (or `units` in all), as a numpy array."""
        handle, address = self.library.create_range(0, memories)
        self.ranges.append(handle)
        size = (units or len(memories)) * self.granularity
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def free(self):
        for handle in self.ranges:
            self.library.free_range(handle)
        for handle in self.memories:
            self.library.free_memory(handle)


@pytest.fixture
def mapping(host_library):
    mapping = Mapping(host_library)
    yield mapping
    mapping.free()


def mapped_files():
    """(start, end) of every mapping in this process that is backed by a memfd."""
    with open("/proc/self/maps") as maps:
        return [line.split()[0] for line in maps if "memfd" in line]


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_the_granularity_is_whole_pages(host_library):
    granularity = host_library.granularity(0)
    assert granularity > 0 and granularity % os.sysconf("SC_PAGE_SIZE") == 0


def test_ranges_alias_where_they_share_memory_and_only_there(mapping):
    shared = mapping.memory(2)
    unit = mapping.granularity
    first = mapping.bytes_over(mapping.memory(), shared, units=3)
    second = mapping.bytes_over(mapping.memory(), shared, units=3)
    generator = np.random.default_rng(0)
    first[:] = generator.integers(0, 256, first.size, np.uint8)
    assert (second[unit:] == first[unit:]).all()
    private = generator.integers(0, 256, unit, np.uint8)
    second[:unit] = private
    before = first[:unit].copy()
    second[unit] ^= 255
    second[-1] ^= 255
    assert (first[:unit] == before).all()
    assert (second[:unit] == private).all()
    assert (first[unit:] == second[unit:]).all()


def test_the_order_of_memories_is_the_order_of_addresses(mapping):
    one, two = mapping.memory(), mapping.memory()
    unit = mapping.granularity
    forth, back = mapping.bytes_over(one, two), mapping.bytes_over(two, one)
    forth[:unit], forth[unit:] = 1, 2
    assert (back[:unit] == 2).all() and (back[unit:] == 1).all()


def test_one_memory_twice_in_a_range(mapping):
    memory = mapping.memory()
    twice = mapping.bytes_over(memory, memory)
    twice[5] = 77
    assert twice[mapping.granularity + 5] == 77


def test_two_ranges_over_the_same_memories_have_addresses_of_their_own(mapping):
    memory = mapping.memory()
    first, second = mapping.bytes_over(memory), mapping.bytes_over(memory)
    assert first.ctypes.data != second.ctypes.data
    first[:] = 9
    assert (second == 9).all()


def test_memory_keeps_its_content_when_a_range_goes(host_library, mapping):
    memory = mapping.memory()
    mapping.bytes_over(memory)[:] = 42
    host_library.free_range(mapping.ranges.pop())
    assert (mapping.bytes_over(memory) == 42).all()


def test_a_range_lives_on_when_another_over_its_memory_goes(host_library, mapping):
    memory = mapping.memory()
    kept = mapping.bytes_over(memory)
    mapping.bytes_over(memory)
    host_library.free_range(mapping.ranges.pop())
    kept[:] = 3
    assert (kept == 3).all()


def test_nothing_stays_open_or_mapped(host_library):
    files, maps = open_files(), mapped_files()
    for order in (1, -1):
        mapping = Mapping(host_library)
        shared = mapping.memory(3)
        for _ in range(4):
            mapping.bytes_over(mapping.memory(), shared, units=4)[:] = 1
        mapping.ranges = mapping.ranges[::order]
        mapping.memories = mapping.memories[::order]
        mapping.free()
    assert (open_files(), mapped_files()) == (files, maps)


@pytest.mark.parametrize("excess", [-1, 1, 16])
def test_a_size_that_is_no_multiple_of_the_granularity_is_refused(host_library, excess):
    with pytest.raises(KernelError) as error:
        host_library.create_memory(0, 2 * host_library.granularity(0) + excess)
    assert error.value.code == BAD_SIZE


def test_a_size_of_zero_is_refused(host_library):
    with pytest.raises(KernelError) as error:
        host_library.create_memory(0, 0)
    assert error.value.code == BAD_SIZE


def test_a_size_that_no_machine_has_is_refused(host_library):
    files = open_files()
    with pytest.raises(KernelError) as error:
        host_library.create_memory(0, 2**63)
    assert error.value.code in (BAD_SIZE, NO_MEMORY)
    assert open_files() == files


def test_a_range_over_nothing_is_refused(host_library):
    with pytest.raises(KernelError) as error:
        host_library.create_range(0, [])
    assert error.value.code < 0


def test_a_failed_range_leaves_nothing_mapped(host_library, mapping):
    memory = mapping.memory()
    before = mapped_files()
    with pytest.raises(KernelError) as error:
        host_library.create_range(0, [memory, 0])
    assert error.value.code == BAD_POINTER
    assert mapped_files() == before
