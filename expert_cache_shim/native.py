"""Finds, loads and binds the kernel library.

The structures and functions mirror `hip/expert_cache.h`, which documents each field. Nothing
here imports torch or numpy: addresses, sizes and streams are plain ints.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import BinaryIO

from .installation import build_command
from .untrusted import ANY_SIZE, open_file

ABI_VERSION = 5
BACKENDS = ("hip", "cuda", "host")

STATE_HEADER = 8  # int32 words before row_of[E], expert_at[E], score[E], last[E], copies[E][4]

INT32, INT64, UINT32 = 0, 1, 2  # ExpertCacheIdType

# What expert_cache_pointer_kind() answers.
DEVICE, HOST_READABLE, HOST_UNREADABLE = 0, 1, 2


def state_words(experts: int) -> int:
    """int32 words of one layer's state."""
    return STATE_HEADER + 8 * experts


class Manage(ctypes.Structure):
    """Arguments of `manage`: ExpertCacheManage."""

    _fields_ = [
        ("ids", c_void_p),
        ("row_ids", c_void_p),
        ("id_rows", c_int64),
        ("id_columns", c_int64),
        ("id_row_stride", c_int64),
        ("id_column_stride", c_int64),
        ("state", c_void_p),
        ("counters", c_void_p),
        ("counters_mirror", c_void_p),
        ("expert_map", c_void_p),
        ("expert_ids", c_void_p),
        ("id_type", c_int32),
        ("experts", c_int32),
        ("slots", c_int32),
        ("policy", c_int32),
        ("decay", c_uint32),
        ("mode", c_int32),
        ("map_length", c_int32),
        ("preloaded", c_int32),
    ]


class Preload(ctypes.Structure):
    """Arguments of `preload`: ExpertCachePreload."""

    _fields_ = [("state", c_void_p), ("experts", c_int32), ("slots", c_int32)]


class Tensor(ctypes.Structure):
    """One per-expert tensor in the table of `gather`: ExpertCacheTensor."""

    _fields_ = [
        ("source", c_void_p),
        ("slots", c_void_p),
        ("rows", c_void_p),
        ("bytes", c_int64),
        ("stride", c_int64),
    ]


class Gather(ctypes.Structure):
    """Arguments of `gather`: ExpertCacheGather."""

    _fields_ = [
        ("tensors", c_void_p),
        ("state", c_void_p),
        ("tensor_count", c_int32),
        ("experts", c_int32),
        ("chunks", c_int32),
        ("lanes", c_int32),
        ("device_lanes", c_int32),
        ("threads", c_int32),
    ]


class LibraryError(RuntimeError):
    """The kernel library cannot be used. One line: the file, what was found, what to do."""


class KernelError(RuntimeError):
    """A library function failed; `code` is its result and the text is the library's own."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function} failed with code {code}: {text}")
        self.code = code


FUNCTIONS = {
    "expert_cache_abi_version": ([], c_int),
    "expert_cache_backend": ([], c_char_p),
    "expert_cache_architectures": ([], c_char_p),
    "expert_cache_error_string": ([c_int], c_char_p),
    "expert_cache_manage": ([ctypes.POINTER(Manage), c_void_p], c_int),
    "expert_cache_gather": ([ctypes.POINTER(Gather), c_void_p], c_int),
    "expert_cache_preload": ([ctypes.POINTER(Preload), c_void_p], c_int),
    "expert_cache_pointer_kind": ([c_void_p, ctypes.POINTER(c_int32)], c_int),
    "expert_cache_host_register": ([c_void_p, c_uint64], c_int),
    "expert_cache_host_unregister": ([c_void_p], c_int),
    "expert_cache_memory_granularity": ([c_int, ctypes.POINTER(c_uint64)], c_int),
    "expert_cache_memory_create": ([c_int, c_uint64, ctypes.POINTER(c_void_p)], c_int),
    "expert_cache_memory_free": ([c_void_p], c_int),
    "expert_cache_range_create": (
        [
            c_int,
            ctypes.POINTER(c_void_p),
            c_int32,
            ctypes.POINTER(c_void_p),
            ctypes.POINTER(c_void_p),
        ],
        c_int,
    ),
    "expert_cache_range_free": ([c_void_p], c_int),
    "expert_cache_shuffle": ([c_uint64], c_int),
}


class Library:
    """A loaded kernel library. Every method raises KernelError where the library refuses.

    `manage` and `gather` run once a layer and step: keep one filled structure per layer and pass
    it again; ctypes passes its address.
    """

    def __init__(self, path: Path, handle: ctypes.CDLL) -> None:
        self.path = path
        self.backend: str = handle.expert_cache_backend().decode()
        self.architectures = tuple(handle.expert_cache_architectures().decode().split())
        self._handle = handle
        self._manage = handle.expert_cache_manage
        self._gather = handle.expert_cache_gather

    def manage(self, args: Manage, stream: int = 0) -> None:
        """Enqueue `manage` on a stream (hipStream_t or cudaStream_t; ignored on the host)."""
        code = self._manage(args, stream)
        if code:
            self._fail("expert_cache_manage", code)

    def gather(self, args: Gather, stream: int = 0) -> None:
        """Enqueue `gather` on a stream."""
        code = self._gather(args, stream)
        if code:
            self._fail("expert_cache_gather", code)

    def preload(self, args: Preload, stream: int = 0) -> None:
        """Enqueue `preload` on a stream."""
        self._call("expert_cache_preload", args, stream)

    def pointer_kind(self, address: int) -> int:
        """DEVICE, HOST_READABLE or HOST_UNREADABLE, by asking the driver."""
        kind = c_int32()
        self._call("expert_cache_pointer_kind", address, ctypes.byref(kind))
        return kind.value

    def register_host(self, address: int, size: int) -> None:
        """Let the device load from and store to `size` bytes of host memory at their address."""
        self._call("expert_cache_host_register", address, size)

    def unregister_host(self, address: int) -> None:
        """End what `register_host` began."""
        self._call("expert_cache_host_unregister", address)

    def granularity(self, device: int) -> int:
        """Bytes that the size of every memory must be a multiple of."""
        size = c_uint64()
        self._call("expert_cache_memory_granularity", device, ctypes.byref(size))
        return size.value

    def create_memory(self, device: int, size: int) -> int:
        """Allocate `size` bytes of physical memory without an address; its handle."""
        memory = c_void_p()
        self._call("expert_cache_memory_create", device, size, ctypes.byref(memory))
        return memory.value

    def free_memory(self, handle: int) -> None:
        """Free a memory. Ranges that map it must have been freed before."""
        self._call("expert_cache_memory_free", handle)

    def create_range(self, device: int, memories: Sequence[int]) -> tuple[int, int]:
        """Map memories end to end at one new address range: (range handle, address)."""
        mapped = (c_void_p * len(memories))(*memories)
        handle, address = c_void_p(), c_void_p()
        self._call(
            "expert_cache_range_create",
            device,
            mapped,
            len(memories),
            ctypes.byref(handle),
            ctypes.byref(address),
        )
        return handle.value, address.value

    def free_range(self, handle: int) -> None:
        """Unmap and release an address range; its memories stay."""
        self._call("expert_cache_range_free", handle)

    def shuffle(self, seed: int) -> None:
        """Host build only: run the work-items of each barrier phase in a pseudo-random order."""
        self._call("expert_cache_shuffle", seed)

    def check_architecture(self, found: str) -> None:
        """Raise LibraryError unless the library carries code for a device.

        `found` is what the device reports: "gfx942:sramecc+:xnack-" or "sm_90".
        """
        if self.backend == "host" or any(_runs_on(built, found) for built in self.architectures):
            return
        device = found.split(":")[0]
        raise LibraryError(
            f"{self.path}: has no code for this GPU, {device}; it was built for "
            f"{' '.join(self.architectures)}; run `{build_command(self.backend, device)}`"
        )

    def _call(self, function: str, *args: object) -> None:
        code = getattr(self._handle, function)(*args)
        if code:
            self._fail(function, code)

    def _fail(self, function: str, code: int) -> None:
        raise KernelError(function, code, self._handle.expert_cache_error_string(code).decode())


def load(backend: str, path: str | os.PathLike[str] | None = None) -> Library:
    """Load the library of a backend ("hip", "cuda" or "host") and check that it fits.

    Without `path` it is the one in the package's folder `lib`. Raises LibraryError.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    file = Path(path) if path else Path(__file__).parent / "lib" / f"libexpertcache_{backend}.so"
    check_file(file, backend)
    if backend == "hip":
        _promote_hip_runtime(file)
    try:
        handle = ctypes.CDLL(str(file.resolve()))
    except OSError as error:
        raise LibraryError(f"{file}: cannot be loaded: {error}; {_rebuild(backend)}") from None
    _bind(handle, file, backend)
    library = Library(file, handle)
    if library.backend != backend:
        raise LibraryError(
            f"{file}: is a {library.backend} library, but this device needs a {backend} one; "
            f"{_rebuild(backend)}"
        )
    return library


def _rebuild(backend: str) -> str:
    return f"run `{build_command(backend)}`, or set EXPERT_CACHE_LIB to a library that fits"


def check_file(file: Path, backend: str) -> None:
    """Refuse what is no whole ELF file: mapping a truncated one can kill the process (SIGBUS)."""
    try:
        with open_file(file, ANY_SIZE, links=True) as stream:
            size = os.fstat(stream.fileno()).st_size
            needed = _elf_extent(stream, size)
    except OSError as error:
        raise LibraryError(f"{file}: {error.strerror}; {_rebuild(backend)}") from None
    if needed is None:
        raise LibraryError(
            f"{file}: is not a 64-bit little-endian ELF library ({size} bytes); {_rebuild(backend)}"
        )
    if size < needed:
        raise LibraryError(
            f"{file}: is truncated, {size} of at least {needed} bytes; {_rebuild(backend)}"
        )


def _elf_extent(stream: BinaryIO, size: int) -> int | None:
    """The bytes that a whole ELF file must have: up to the end of its tables and segments.

    `size` is what the file has; a file too short for its tables is not searched for segments.
    None when it is not an ELF file for 64-bit little-endian machines.
    """
    header = stream.read(64)
    if header[:6] != b"\x7fELF\x02\x01":
        return None
    if len(header) < 64:
        return 64
    program_table, section_table = struct.unpack_from("<2Q", header, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<4H", header, 54)
    extent = max(
        program_table + program_size * programs,
        section_table + section_size * sections,
    )
    if extent > size or program_size < 56:
        return extent
    stream.seek(program_table)
    for _ in range(programs):
        offset, _, _, length = struct.unpack_from("<4Q", stream.read(program_size), 8)
        extent = max(extent, offset + length)
    return extent


def _promote_hip_runtime(file: Path) -> None:
    """Make the loaded libamdhip64 visible to the library's start-up code.

    The library links no ROCm of its own: its constructor finds the runtime that torch brought.
    torch loads that one privately (RTLD_LOCAL), so its symbols are made global first.
    """
    runtime = _mapped_library("libamdhip64.so")
    if runtime is None:
        raise LibraryError(
            f"{file}: needs libamdhip64, which this process has not loaded; "
            "import a ROCm build of torch first"
        )
    try:
        ctypes.CDLL(runtime, mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise LibraryError(
            f"{file}: needs libamdhip64, but the loaded {runtime} cannot be opened again: {error}; "
            "restart the process with an intact ROCm"
        ) from None


def _mapped_library(name: str) -> str | None:
    """Path of a library mapped into this process whose file name starts with `name`."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) == 6 and os.path.basename(fields[5]).startswith(name):
                return fields[5]
    return None


def _bind(handle: ctypes.CDLL, file: Path, backend: str) -> None:
    """Set every function's types. The ABI version goes first: it explains a missing function."""
    for name, (argtypes, restype) in FUNCTIONS.items():
        try:
            function = getattr(handle, name)
        except AttributeError:
            raise LibraryError(
                f"{file}: has no function {name}, so it is not an expert cache library "
                f"of ABI version {ABI_VERSION}; {_rebuild(backend)}"
            ) from None
        function.argtypes = argtypes
        function.restype = restype
        if name == "expert_cache_abi_version" and function() != ABI_VERSION:
            raise LibraryError(
                f"{file}: has ABI version {function()}, but this package needs {ABI_VERSION}; "
                f"{_rebuild(backend)}"
            )


def _runs_on(built: str, found: str) -> bool:
    """Whether code built for one architecture runs on a device that reports another.

    AMD code runs on its own architecture only. NVIDIA code runs on every later one too: within
    the major version as it is, beyond it from the PTX that `hip/build.sh` adds.
    """
    code = re.fullmatch(r"sm_(\d+)(\d)", built)
    device = re.fullmatch(r"sm_(\d+)(\d)", found)
    if code and device:
        return (int(code[1]), int(code[2])) <= (int(device[1]), int(device[2]))
    return built.split(":")[0] == found.split(":")[0]
