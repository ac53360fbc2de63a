"""Ways in which arming can be told no, each a numbered sequence of calls of which one can fail.

`count(run)` says how many there are while `run` runs, `failing(number)` makes that one fail.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import torch
from synthetic.counted_library import CountedLibrary
from torch.utils._python_dispatch import TorchDispatchMode

from expert_cache_shim import native


class TorchOperations:
    """Every operation that PyTorch dispatches: allocations, copies and fills."""

    def count(self, run: Callable[[], object]) -> int:
        with _Operations(None) as operations:
            run()
        return operations.seen

    def failing(self, number: int) -> contextlib.AbstractContextManager:
        return _Operations(number)


class _Operations(TorchDispatchMode):
    def __init__(self, fails_at: int | None) -> None:
        super().__init__()
        self.seen = 0
        self._fails_at = fails_at

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen += 1
        if self.seen - 1 == self._fails_at:
            raise torch.OutOfMemoryError(f"operation {self._fails_at}, {function}: out of memory")
        return function(*args, **(kwargs or {}))


class LibraryCalls:
    """Every call of a kernel library's function, but for those that give something back."""

    def __init__(self, library: CountedLibrary) -> None:
        self._library = library

    def count(self, run: Callable[[], object]) -> int:
        with self.failing(-1) as seen:
            run()
        return len(seen)

    @contextlib.contextmanager
    def failing(self, number: int) -> Iterator[list[str]]:
        library, seen = self._library, []

        def guarded(name: str, method: Callable) -> Callable:
            def call(*args):
                seen.append(name)
                if len(seen) - 1 == number:
                    raise native.KernelError(f"expert_cache_{name}", 2, "out of memory")
                return method(*args)

            return call

        names = (
            "pointer_kind", "register_host", "granularity", "create_memory", "create_range",
            "check_architecture", "manage", "gather",
        )  # fmt: skip
        for name in names:
            setattr(library, name, guarded(name, getattr(library, name)))
        try:
            yield seen
        finally:
            for name in names:
                delattr(library, name)


class SystemCalls:
    """Every malloc, memfd_create, ftruncate and mmap inside the kernel library, which must have
    been built with failing_calls.h."""

    def __init__(self, library: CountedLibrary) -> None:
        handle = library._handle
        self._start, self._count = handle.failing_calls_start, handle.failing_calls_count
        self._start.argtypes, self._start.restype = [ctypes.c_long], None
        self._count.argtypes, self._count.restype = [], ctypes.c_long

    def count(self, run: Callable[[], object]) -> int:
        with self.failing(-1):
            run()
            return self._count()

    @contextlib.contextmanager
    def failing(self, number: int) -> Iterator[None]:
        self._start(number)
        try:
            yield
        finally:
            self._start(-1)
