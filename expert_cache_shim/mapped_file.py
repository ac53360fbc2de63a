"""A file in memory that a process writes as its own memory, and others read while it runs.

Layout, little endian: 8 bytes magic, uint64 length of the JSON header, the JSON header, zeros to
the next multiple of 4096, then the content.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .untrusted import make_folder

_PAGE = 4096
MAX_HEADER = 4 * 2**20  # bytes: JSON in memory can be twenty times as large


class MappedFile:
    """The writer's side. `address` is page-aligned; the file stays when the process has gone."""

    def __init__(
        self, folder: Path, suffix: str, magic: bytes, header: dict[str, Any], length: int
    ) -> None:
        """length: bytes of content, all zero at first. Raises OSError."""
        text = json.dumps(header).encode()
        self.content_offset = content_start(len(text))
        self.size = self.content_offset + length
        make_folder(folder)
        handle, name = tempfile.mkstemp(suffix, f"{os.getpid()}-", folder)
        self.path = Path(name)
        try:
            # Reserved now: a store into a hole of a full disk would be a SIGBUS later.
            os.posix_fallocate(handle, 0, self.size)
            self._map = mmap.mmap(handle, self.size)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        self._map[: 16 + len(text)] = magic + struct.pack("<Q", len(text)) + text

    @property
    def address(self) -> int:
        """Where the file is mapped."""
        return np.frombuffer(self._map, np.uint8).ctypes.data

    @property
    def content_address(self) -> int:
        """Where its content begins."""
        return self.address + self.content_offset

    def content(self, dtype: str, count: int, start: int = 0) -> np.ndarray:
        """A part of the content, from byte `start` of it, as the memory of the file itself."""
        return np.frombuffer(self._map, dtype, count, self.content_offset + start)


def content_start(header_length: int) -> int:
    return -(-(16 + header_length) // _PAGE) * _PAGE


def locate(data: bytes, magic: bytes) -> tuple[bytes, int]:
    """The text of the header of such a file, and where its content begins. Raises ValueError if
    it is another kind of file, or not whole."""
    if len(data) < 16 or data[:8] != magic:
        raise ValueError("another kind of file")
    (length,) = struct.unpack("<Q", data[8:16])
    if length > min(len(data), MAX_HEADER):
        raise ValueError(f"header of {length} bytes")
    return data[16 : 16 + length], content_start(length)
