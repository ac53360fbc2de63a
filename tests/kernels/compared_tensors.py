"""Per-expert tensors for the emulated gather, beside a plain numpy copy of each record."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from compared_layer import Difference
from guarded import Guarded

from expert_cache_shim.native import STATE_HEADER, Gather, Library, Tensor, state_words


@dataclass(frozen=True)
class Shape:
    """One tensor: record and stride in bytes, and how far its bases are from 16-byte alignment."""

    record: int
    stride: int
    source: int = 0
    slots: int = 0
    rows: int = 0


class ComparedTensors:
    """Per-expert tensors, one buffer each for host copy, slots and rows.

    Rows are a scratch of their own, or the slots' buffers themselves.
    """

    def __init__(
        self, experts: int, shapes: list[Shape],
        sources: list[Guarded], slots: list[Guarded], rows: list[Guarded],
    ) -> None:  # fmt: skip
        self.experts = experts
        self.shapes = shapes
        self.sources = sources
        self.slots = slots
        self.rows = rows
        self.table = (Tensor * len(shapes))(
            *(
                Tensor(source.address, slot.address, row.address, shape.record, shape.stride)
                for shape, source, slot, row in zip(shapes, sources, slots, rows)
            )
        )

    @classmethod
    def filled(cls, experts: int, shapes: Iterable[Shape], scratch: bool) -> "ComparedTensors":
        """Tensors of `experts` records each, every byte at random."""
        generator = np.random.default_rng(experts)
        shapes = list(shapes)

        def buffers(base: str) -> list[Guarded]:
            made = []
            for shape in shapes:
                size = (experts - 1) * shape.stride + shape.record
                made.append(Guarded(size, np.uint8, getattr(shape, base)))
                made[-1].array[:] = generator.integers(0, 256, size, np.uint8)
            return made

        sources, slots = buffers("source"), buffers("slots")
        return cls(experts, shapes, sources, slots, buffers("rows") if scratch else slots)

    def over_slots(self) -> "ComparedTensors":
        """The same host copy and slots, with the slots' buffers as rows."""
        return ComparedTensors(self.experts, self.shapes, self.sources, self.slots, self.slots)

    def arguments(
        self, state: Guarded, chunks: int, lanes: int, threads: int, device_lanes: int = 0
    ) -> Gather:
        return Gather(
            tensors=ctypes.addressof(self.table),
            state=state.address,
            tensor_count=len(self.shapes),
            experts=self.experts,
            chunks=chunks,
            lanes=lanes,
            device_lanes=device_lanes,
            threads=threads,
        )

    def gather(
        self, library: Library, copies: np.ndarray, state: Guarded,
        chunks: int = 4, lanes: int = 4, threads: int = 64, device_lanes: int = 0,
    ) -> None:  # fmt: skip
        """Runs gather with the copies that lie in `state`, and compares all memory."""
        expected = [self._expected(index, copies) for index in range(len(self.shapes))]
        sources = [source.memory.copy() for source in self.sources]
        library.gather(self.arguments(state, chunks, lanes, threads, device_lanes))
        for index, (slots, rows) in enumerate(expected):
            self._equal("slots", index, self.slots[index].memory, slots)
            self._equal("rows", index, self.rows[index].memory, rows)
            self._equal("source", index, self.sources[index].memory, sources[index])

    def holds(self, where: list[Guarded], index: int, number: int, expert: int) -> bool:
        """Whether record `number` of `slots` or `rows` is that expert's."""
        shape = self.shapes[index]
        found = _record(where[index].array, shape, number)
        return np.array_equal(found, _record(self.sources[index].array, shape, expert))

    def _expected(self, index: int, copies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All bytes, guards included, of the slots' and the rows' memory afterwards."""
        shape, source = self.shapes[index], self.sources[index].array
        slots, rows = self.slots[index], self.rows[index]
        old = slots.array.copy()
        after = {id(slots): slots.memory.copy(), id(rows): rows.memory.copy()}

        def view(buffer: Guarded) -> np.ndarray:
            start = buffer.address - buffer.memory.ctypes.data
            return after[id(buffer)][start : start + buffer.array.size]

        for expert, from_slot, to_row, to_slot in copies:
            if to_row < 0:
                continue
            taken = _record(source, shape, expert)
            if from_slot >= 0:
                taken = _record(old, shape, from_slot)
            _record(view(rows), shape, to_row)[:] = taken
            if to_slot >= 0:
                _record(view(slots), shape, to_slot)[:] = taken
        return after[id(slots)], after[id(rows)]

    def _equal(self, where: str, index: int, found: np.ndarray, expected: np.ndarray) -> None:
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            raise Difference(
                f"{self.shapes[index]}: {len(wrong)} bytes of {where} differ, the first at "
                f"{wrong[0]} of {len(found)}"
            )


def _record(memory: np.ndarray, shape: Shape, number: int) -> np.ndarray:
    return memory[number * shape.stride : number * shape.stride + shape.record]


def state_with(copies: np.ndarray, experts: int) -> Guarded:
    """A state that holds these copies; all else in it would send gather astray."""
    state = Guarded(state_words(experts), np.int32)
    state.array[1] = len(copies)
    state.array[2] = np.count_nonzero(copies[:, 1] < 0)
    state.array[STATE_HEADER + 4 * experts :].reshape(experts, 4)[: len(copies)] = copies
    return state


def copies_to_rows(generator: np.random.Generator, experts: int, count: int) -> np.ndarray:
    """As manage leaves them in mode rows: each expert from the host to a row of its own."""
    copies = np.full((count, 4), -1, np.int32)
    copies[:, 0] = np.sort(generator.permutation(experts)[:count])
    copies[:, 2] = generator.permutation(experts)[:count]
    return copies


def copies_to_scratch(generator: np.random.Generator, experts: int, count: int) -> np.ndarray:
    """As in mode scratch: the last third come from a slot, a third go to a slot too."""
    copies = copies_to_rows(generator, experts, count)
    copies[:, 2] = copies[:, 0]
    slots = generator.permutation(experts)[:count]
    hits = count - count // 3
    copies[hits:, 1] = slots[hits:]
    copies[1:hits:2, 3] = slots[1:hits:2]
    return copies
