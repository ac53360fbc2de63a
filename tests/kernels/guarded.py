"""Arrays between guard bytes, so that a store outside them is seen."""

import math

import numpy as np

GUARD_BYTES = 64
GUARD_VALUE = 0xA5


class Guarded:
    """An uninitialised-looking array (`array`) at a chosen offset from 16-byte alignment."""

    def __init__(self, shape: int | tuple[int, ...], dtype: type, misalignment: int = 0) -> None:
        size = math.prod(np.atleast_1d(shape)) * np.dtype(dtype).itemsize
        self.memory = np.full(size + 2 * GUARD_BYTES + 32, GUARD_VALUE, np.uint8)
        self._start = GUARD_BYTES + (misalignment - self.memory.ctypes.data - GUARD_BYTES) % 16
        self._end = self._start + size
        self.array = self.memory[self._start : self._end].view(dtype).reshape(shape)

    @property
    def address(self) -> int:
        return self.memory.ctypes.data + self._start

    def guards_intact(self) -> bool:
        before, after = self.memory[: self._start], self.memory[self._end :]
        return bool((before == GUARD_VALUE).all() and (after == GUARD_VALUE).all())
