"""A kernel library as a file: what can be said of it where it cannot be loaded.

The library for AMD needs the process's own libamdhip64, which no image build has without PyTorch.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from .. import native
from ..installation import PACKAGE


def default_file(backend: str) -> Path:
    return PACKAGE / "lib" / f"libexpertcache_{backend}.so"


def check_file(file: Path, backend: str) -> str:
    """The architectures that a file has code for, as far as its bytes tell; "" if they do not.

    Raises native.LibraryError where it is no whole library with our functions, or differs from
    the checksum beside it.
    """
    native.check_file(file, backend)
    content = file.read_bytes()
    for name in native.FUNCTIONS:
        if name.encode() + b"\0" not in content:
            raise native.LibraryError(f"{file}: has no function {name}; build it again")
    expected = _checksum_beside(file)
    if expected and hashlib.sha256(content).hexdigest() != expected:
        raise native.LibraryError(
            f"{file}: differs from the checksum in {file.name}.sha256; copy or build it again"
        )
    # How the compiler names the parts of a bundle.
    found = set(re.findall(rb"hipv4-amdgcn-amd-amdhsa--(gfx\w+)", content))
    return " ".join(sorted(name.decode() for name in found))


def has_checksum(file: Path) -> bool:
    return _checksum_beside(file) != ""


def _checksum_beside(file: Path) -> str:
    try:
        words = file.with_name(f"{file.name}.sha256").read_text().split()
    except (OSError, UnicodeDecodeError):
        return ""
    return words[0] if words else "empty"


def write_checksum(file: Path) -> Path:
    """Beside the library, in the form of sha256sum; the path of what was written."""
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    beside = file.with_name(f"{file.name}.sha256")
    beside.write_text(f"{checksum}  {file.name}\n")
    return beside
