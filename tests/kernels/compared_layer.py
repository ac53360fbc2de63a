"""One layer of the emulated kernel beside its numpy reference."""

import numpy as np
from guarded import Guarded

from expert_cache_shim.native import (
    INT32,
    INT64,
    STATE_HEADER,
    UINT32,
    Library,
    Manage,
    Preload,
    state_words,
)
from expert_cache_shim.policy import CODES, COUNTERS, MODES, Reference

ID_TYPES = {
    np.dtype(np.int32): INT32,
    np.dtype(np.int64): INT64,
    np.dtype(np.uint32): UINT32,
}


class Difference(AssertionError):
    """Kernel and reference disagree."""


class ComparedLayer:
    """Runs each step on both and compares every field that `docs/kernels.md` defines."""

    def __init__(
        self, library: Library, experts: int, slots: int, policy: str,
        decay: int | None = None, mirror: bool = True, expert_map: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """expert_map: [ids] int32, as `policy.Reference` takes it."""
        self.library = library
        self.reference = Reference(experts, slots, policy, decay, expert_map)
        self.state = Guarded(state_words(experts), np.int32)
        self.counters = Guarded(len(COUNTERS), np.int64)
        self.mirror = Guarded(len(COUNTERS), np.int64) if mirror else None
        self.args = Manage(
            state=self.state.address,
            counters=self.counters.address,
            counters_mirror=self.mirror.address if self.mirror else None,
            experts=experts,
            slots=slots,
            policy=CODES[policy],
            decay=self.reference.decay,
        )
        if expert_map is not None:
            self.expert_map = np.array(expert_map, np.int32)
            self.args.expert_map = self.expert_map.ctypes.data
            self.args.expert_ids = self.reference.expert_ids.ctypes.data
            self.args.map_length = len(expert_map)
        self.put_state()

    def put_state(self) -> None:
        """Gives the kernel the reference's state, after a test has changed it."""
        reference, experts = self.reference, self.reference.experts
        words = self.state.array
        words[:STATE_HEADER] = 0
        words[:1].view(np.uint32)[0] = reference.step_number
        fields = words[STATE_HEADER : STATE_HEADER + 4 * experts].reshape(4, experts)
        fields[0] = reference.row_of
        fields[1] = reference.expert_at
        fields[2] = reference.score.view(np.int32)
        fields[3] = reference.last.view(np.int32)
        self.counters.array[:] = list(reference.counters.values())

    def set_ids(self, ids: np.ndarray, row_ids: Guarded, mode: str) -> None:
        args = self.args
        args.ids, args.row_ids = ids.ctypes.data, row_ids.address
        args.id_rows, args.id_columns = ids.shape
        args.id_row_stride, args.id_column_stride = (s // ids.itemsize for s in ids.strides)
        args.id_type = ID_TYPES[ids.dtype]
        args.mode = MODES[mode]

    def preload(self) -> None:
        reference = self.reference
        self.library.preload(
            Preload(state=self.state.address, experts=reference.experts, slots=reference.slots)
        )
        reference.preload()
        self._compare_state("preload")
        if not self.state.guards_intact():
            raise Difference(f"{self._where('preload')}: a store outside the state")

    def step(self, ids: np.ndarray, mode: str = "rows", preloaded: bool = False) -> np.ndarray:
        """One layer-step over `[rows, columns]` ids of any strides; the kernel's row ids."""
        row_ids = Guarded(ids.shape, ids.dtype.type)
        untouched = row_ids.array.copy()
        self.set_ids(ids, row_ids, mode)
        self.args.preloaded = preloaded
        self.library.manage(self.args)
        expected = self.reference.step(ids, mode, preloaded)
        self._equal("row_ids", row_ids.array, untouched if expected is None else expected, mode)
        self._compare_state(mode)
        buffers = [row_ids, self.state, self.counters, *([self.mirror] if self.mirror else [])]
        if not all(buffer.guards_intact() for buffer in buffers):
            raise Difference(f"{self._where(mode)}: a store outside the buffers")
        return row_ids.array

    def _compare_state(self, mode: str) -> None:
        reference, experts = self.reference, self.reference.experts
        words = self.state.array
        header = words[:STATE_HEADER]
        self._equal("step", header[:1].view(np.uint32), [reference.step_number], mode)
        self._equal("number of copies", header[1], len(reference.copies), mode)
        misses = int((reference.copies[:, 1] < 0).sum()) if mode == "scratch" else header[1]
        self._equal("copies of misses", header[2], misses, mode)
        self._equal("reserved words", header[3:], [0] * 5, mode)
        fields = words[STATE_HEADER : STATE_HEADER + 4 * experts].reshape(4, experts)
        self._equal("row_of", fields[0], reference.row_of, mode)
        self._equal("expert_at", fields[1], reference.expert_at, mode)
        self._equal("score", fields[2].view(np.uint32), reference.score, mode)
        self._equal("last", fields[3].view(np.uint32), reference.last, mode)
        copies = words[STATE_HEADER + 4 * experts :].reshape(experts, 4)
        self._equal("copies", copies[: len(reference.copies)], reference.copies, mode)
        counters = list(reference.counters.values())
        self._equal("counters", self.counters.array, counters, mode)
        if self.mirror and mode != "preload":  # which stores none
            self._equal("counters_mirror", self.mirror.array, counters, mode)

    def _equal(self, field: str, found: np.ndarray, expected: object, mode: str) -> None:
        expected = np.asarray(expected)
        if np.array_equal(found, expected):
            return
        first = tuple(int(i) for i in np.argwhere(found != expected)[0])
        raise Difference(
            f"{self._where(mode)}: {field}{list(first)} is {found[first]}, "
            f"the reference has {expected[first]}"
        )

    def _where(self, mode: str) -> str:
        reference = self.reference
        return (
            f"{reference.policy}, {reference.experts} experts, {reference.slots} slots, "
            f"step {reference.step_number}, mode {mode}"
        )


def scramble(layer: ComparedLayer, generator: np.random.Generator) -> None:
    """Puts the layer in a random state that its policy could have reached, ties included."""
    reference = layer.reference
    experts, slots, policy = reference.experts, reference.slots, reference.policy
    occupied = generator.permutation(slots)[: generator.integers(0, slots + 1)]
    residents = generator.permutation(experts)[: len(occupied)]
    reference.row_of[:] = reference.expert_at[:] = -1
    reference.row_of[residents] = occupied
    reference.expert_at[occupied] = residents
    reference.step_number = int(generator.integers(0, 2**32))
    clamp = 2**20 - 1  # the step to come adds one to each of these
    ages = [0, 1, 2, 3, clamp - 2, clamp - 1, clamp, clamp + 1, 2**31, 2**32 - 1]
    ages = generator.choice(ages, experts)
    reference.last[:] = (reference.step_number - ages) % 2**32
    if policy == "lrfu":
        scores = [0, 1, 65535, 65536, 65537, 2**31, 2**32 - 1]
        reference.score[:] = generator.choice(scores, experts)
    elif policy == "lfu":
        scores = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
        reference.score[residents] = generator.choice(scores, len(residents))
    elif policy == "slru":
        reference.score[residents] = generator.integers(0, 2, len(residents))
    layer.put_state()
