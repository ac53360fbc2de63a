"""The headers of a checkpoint's safetensors files: names, types and shapes, no data.

The format: eight bytes with the length of a JSON object, the object, then the data. Headers are
compared with the size of their file, so that a download that broke off is noticed here.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from ..untrusted import ANY_SIZE, open_file, read_file
from . import CommandError
from .plan_quantization import ELEMENT_BYTES, Tensor

INDEX = "model.safetensors.index.json"
MAX_HEADERS = 64 * 2**20  # of all files together; the index may be as long
MAX_NAME, MAX_DIMENSIONS = 255, 16
LFS_POINTER = b"version "  # the first eight bytes of a file that Git LFS did not fetch


def read(folder: Path) -> list[Tensor]:
    """Every tensor of the checkpoint in a folder; none where there is no safetensors file.
    Raises CommandError for a checkpoint that is not whole."""
    tensors, room = [], MAX_HEADERS
    for file in _files(folder):
        found, length = _header(file, room)
        tensors += found
        room -= length
    return tensors


def _files(folder: Path) -> list[Path]:
    """Those that the index names, else all, but not a second copy in another layout."""
    try:
        return _found_files(folder, folder / INDEX)
    except OSError as error:  # such as a name that is too long
        raise CommandError(f"{error.filename}: {error.strerror}") from None


def _found_files(folder: Path, index: Path) -> list[Path]:
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        return [file for file in files if not file.name.startswith("consolidated")] or files
    try:
        entries = json.loads(read_file(index, MAX_HEADERS, links=True))
        names = sorted({str(name) for name in entries["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CommandError(f"{index}: is no index of a checkpoint; download it again") from None
    if any("/" in name or len(name) > MAX_NAME for name in names):
        raise CommandError(f"{index}: names what is no file of its folder; download it again")
    files = [folder / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if len(missing) == len(files):
        return []  # config and index alone were downloaded
    if missing:
        raise CommandError(
            f"{folder}: {len(missing)} of {len(files)} files are missing, {missing[0]} for one; "
            "finish the download, or give config.json alone"
        )
    return files


def _header(file: Path, room: int) -> tuple[list[Tensor], int]:
    """The tensors of a file, and the length of its header, which must be at most `room`."""
    try:
        with open_file(file, ANY_SIZE, links=True) as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if start == LFS_POINTER:
                raise ValueError("a pointer of Git LFS, not the file itself; run `git lfs pull`")
            if not 2 <= length <= size - 8:
                raise ValueError("not a safetensors file, or cut off; download it again")
            if length > room:
                raise ValueError(f"the headers of all files are larger than {MAX_HEADERS} bytes")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        tensors = [_tensor(name, entry) for name, entry in entries.items()]
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"has {size} bytes where {8 + length + end} belong; download it again")
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        said = isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError)
        detail = str(error) if said else "its header is damaged; download it again"
        raise CommandError(f"{file}: {detail}") from None
    return tensors, length


def _tensor(name: str, entry: dict) -> Tensor:
    if len(name) > MAX_NAME or len(entry["shape"]) > MAX_DIMENSIONS:
        raise ValueError(f"{name[:40]}... is no name or shape of a weight")
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(type(n) is int and 0 <= n <= ANY_SIZE for n in (*shape, begin, end)):
        raise ValueError("its header is damaged; download it again")
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"{name} is of the type {str(dtype)[:20]!r}, which is not known here")
    if math.prod(shape) * ELEMENT_BYTES[dtype] != end - begin:
        raise ValueError(f"{name} does not have the bytes of its shape; download it again")
    return Tensor(name, dtype, shape)
