"""The kernels on device memory, beside their numpy reference."""

from __future__ import annotations

import numpy as np
import torch

from expert_cache_shim import native
from expert_cache_shim.policy import CODES, COUNTERS, MODES, Reference

from .timing import stream_handle

ID_TYPES = {
    torch.int32: native.INT32,
    torch.int64: native.INT64,
    torch.uint32: native.UINT32,
}


class Difference(AssertionError):
    """Kernel and reference disagree."""


class DeviceLayer:
    """State and counters of one layer on a device, and a Reference that is stepped beside it."""

    def __init__(
        self, library: native.Library, experts: int, slots: int, policy: str = "lrfu",
        device: torch.device | str = "cuda", expert_map: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """expert_map: [ids] int32, as `policy.Reference` takes it."""
        self.library = library
        self.device = torch.device(device)
        self.reference = Reference(experts, slots, policy, expert_map=expert_map)
        pinned = self.device.type == "cuda"
        self.state = torch.zeros(native.state_words(experts), dtype=torch.int32, device=self.device)
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=self.device)
        self.mirror = torch.zeros(len(COUNTERS), dtype=torch.int64, pin_memory=pinned)
        self._args = native.Manage(
            state=self.state.data_ptr(), counters=self.counters.data_ptr(),
            counters_mirror=self.mirror.data_ptr(), experts=experts, slots=slots,
            policy=CODES[policy], decay=self.reference.decay,
        )  # fmt: skip
        if expert_map is not None:
            maps = (expert_map, self.reference.expert_ids)
            self._maps = [torch.from_numpy(m).to(self.device) for m in maps]
            self._args.expert_map, self._args.expert_ids = (m.data_ptr() for m in self._maps)
            self._args.map_length = len(expert_map)
        self.forget()

    def forget(self) -> None:
        """The fresh state, in kernel and reference."""
        reference, header = self.reference, native.STATE_HEADER
        self.reference = Reference(
            reference.experts, reference.slots, reference.policy, reference.decay,
            reference.expert_map,
        )  # fmt: skip
        self.state.zero_()
        self.state[header : header + 2 * reference.experts] = -1
        self.counters.zero_()

    def manage(self, ids: torch.Tensor, row_ids: torch.Tensor, mode: str = "rows") -> None:
        """Enqueues one layer-step on the current stream.

        ids: `[tokens, top_k]`, any strides. row_ids: the same shape and type, contiguous.
        """
        args = self._args
        args.ids, args.row_ids, args.mode = ids.data_ptr(), row_ids.data_ptr(), MODES[mode]
        args.id_rows, args.id_columns = ids.shape
        args.id_row_stride, args.id_column_stride = ids.stride()
        args.id_type = ID_TYPES[ids.dtype]
        self.library.manage(args, stream_handle(self.device))

    def expect(
        self, ids: np.ndarray, row_ids: torch.Tensor | None = None, mode: str = "rows"
    ) -> None:
        """Steps the reference; where `row_ids` is given, the kernel's must equal its own.
        Raises Difference."""
        expected = self.reference.step(ids, mode)
        if row_ids is not None and expected is not None:
            self._equal("row_ids", row_ids.cpu().numpy(), expected)

    def compare(self) -> None:
        """Every field that docs/kernels.md defines, kernel against reference."""
        reference, experts = self.reference, self.reference.experts
        words = self.state.cpu().numpy()
        header = words[: native.STATE_HEADER]
        fields = words[native.STATE_HEADER :][: 4 * experts].reshape(4, experts)
        copies = words[native.STATE_HEADER + 4 * experts :].reshape(experts, 4)
        self._equal("step", header[:1].view(np.uint32), np.array([reference.step_number]))
        self._equal("number of copies", header[1:2], np.array([len(reference.copies)]))
        self._equal("row_of", fields[0], reference.row_of)
        self._equal("expert_at", fields[1], reference.expert_at)
        self._equal("score", fields[2].view(np.uint32), reference.score)
        self._equal("last", fields[3].view(np.uint32), reference.last)
        self._equal("copies", copies[: len(reference.copies)], reference.copies)
        counters = np.array(list(reference.counters.values()))
        self._equal("counters", self.counters.cpu().numpy(), counters)
        self._equal("counters_mirror", self.mirror.numpy(), counters)

    def _equal(self, field: str, found: np.ndarray, expected: np.ndarray) -> None:
        if not np.array_equal(found, expected):
            first = tuple(int(i) for i in np.argwhere(found != expected)[0])
            reference = self.reference
            raise Difference(
                f"{reference.policy}, {reference.experts} experts, {reference.slots} slots, step "
                f"{reference.step_number}: {field}{list(first)} is {found[first]}, the reference "
                f"has {expected[first]}"
            )


class DeviceTensors:
    """Per-expert tensors on host and device, for `gather`: bytes, `[experts, record]` each.

    `sources` are pinned host memory; `slots` and `rows` device memory, one and the same unless
    there is a scratch.
    """

    def __init__(
        self, library: native.Library, experts: int, records: list[int],
        device: torch.device | str = "cuda", scratch: bool = False,
    ) -> None:  # fmt: skip
        """records: bytes of one expert in each tensor."""
        self.library = library
        self.experts = experts
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(0)
        self.sources, self.slots, self.rows = [], [], []
        table = (native.Tensor * len(records))()
        for entry, size in zip(table, records):
            slots = self._random(size)
            rows = self._random(size) if scratch else slots
            source = torch.empty(
                experts, size, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
            )
            source.copy_(self._random(size))
            for tensors, tensor in (
                (self.sources, source), (self.slots, slots), (self.rows, rows)
            ):  # fmt: skip
                tensors.append(tensor)
            entry.source, entry.slots, entry.rows = (
                source.data_ptr(), slots.data_ptr(), rows.data_ptr()
            )  # fmt: skip
            entry.bytes = entry.stride = size
        self.table = torch.frombuffer(bytearray(table), dtype=torch.uint8).to(self.device)

    def _random(self, size: int) -> torch.Tensor:
        memory = torch.empty(self.experts, size, dtype=torch.uint8, device=self.device)
        return memory.random_(0, 256, generator=self._generator)

    def state(self, copies: np.ndarray) -> torch.Tensor:
        """A state that holds these copies, `[n, 4]`, and nothing else of use."""
        words = np.zeros(native.state_words(self.experts), np.int32)
        words[1] = len(copies)
        words[2] = np.count_nonzero(copies[:, 1] < 0)
        words[native.STATE_HEADER + 4 * self.experts :][: copies.size] = copies.ravel()
        return torch.from_numpy(words).to(self.device)

    def gather(
        self, state: torch.Tensor, chunks: int = 16, lanes: int = 1, threads: int = 0,
        device_lanes: int = 0,
    ) -> None:  # fmt: skip
        """Enqueues the copies of a state on the current stream."""
        args = native.Gather(
            tensors=self.table.data_ptr(), state=state.data_ptr(), tensor_count=len(self.rows),
            experts=self.experts, chunks=chunks, lanes=lanes, device_lanes=device_lanes,
            threads=threads,
        )  # fmt: skip
        self.library.gather(args, stream_handle(self.device))

    def check(self, copies: np.ndarray, **grid: int) -> None:
        """Gathers, and compares all device memory: records where they must be, and everything
        else as it was. Raises Difference."""
        expected = [self._expected(i, copies) for i in range(len(self.rows))]
        self.gather(self.state(copies), **grid)
        for index, (slots, rows) in enumerate(expected):
            for name, found, wanted in (
                ("slots", self.slots[index], slots), ("rows", self.rows[index], rows)
            ):  # fmt: skip
                if not torch.equal(found, wanted):
                    wrong = (found != wanted).any(dim=1).nonzero().flatten().tolist()
                    raise Difference(f"tensor {index}, {name} {wrong}: not what gather must leave")

    def _expected(self, index: int, copies: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.slots[index].clone()
        slots = before.clone()
        rows = slots if self.rows[index] is self.slots[index] else self.rows[index].clone()
        for expert, from_slot, to_row, to_slot in copies:
            record = before[from_slot]
            if from_slot < 0:
                record = self.sources[index][expert].to(self.device)
            rows[to_row] = record
            if to_slot >= 0:
                slots[to_slot] = record
        return slots, rows


def copies_to_rows(generator: np.random.Generator, experts: int, count: int) -> np.ndarray:
    """Copies as manage leaves them in mode rows: experts by lot, each to a row of its own."""
    copies = np.full((count, 4), -1, np.int32)
    copies[:, 0] = np.sort(generator.permutation(experts)[:count])
    copies[:, 2] = generator.permutation(experts)[:count]
    return copies


def load_library(path: str | None = None) -> native.Library:
    """The kernel library for this machine's device. Raises LibraryError."""
    if not torch.cuda.is_available():
        return native.load("host", path)
    return native.load("hip" if torch.version.hip else "cuda", path)
