"""`enable` and `disable`: the `.pth` that starts the shim, for images without pip.

Python runs every `.pth` in a site-packages at start: a line that is a folder is added to
sys.path if it is there, and a line that begins with "import" is executed. Ours names the folder
in which the package lies, then starts it; where the folder is gone, both lines do nothing.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Annotated

from ..installation import PACKAGE
from . import CommandError, Option

FILE = "expert_cache_shim.pth"
SITE_NAMES = ("site-packages", "dist-packages")
MARK = "# Written by `expert-cache enable`; `expert-cache disable` removes it."
# The same line as in the wheel. It is silent without the package and starts it once.
START = (
    'import sys; "expert_cache_shim.bootstrap" in sys.modules or exec("try:\\n '
    "from expert_cache_shim.bootstrap import install\\n install()\\nexcept ModuleNotFoundError:"
    "\\n pass\\nexcept Exception as error:\\n try:\\n  sys.stderr.write(f'expert cache: off: "
    "{type(error).__name__}: {error}\\\\n')\\n except Exception:\\n  pass\")"
)

Prefix = Annotated[
    str | None,
    Option(
        "--prefix",
        "Another environment (a folder with lib/python3.x/site-packages, or with dist-packages "
        "as on Debian), or a folder of that name. Default: the site-packages of this Python.",
        "DIR",
    ),
]


def enable(prefix: Prefix = None) -> int:
    """Start the shim with Python, without pip: writes a .pth into site-packages."""
    file = site_packages(prefix) / FILE
    text = f"{MARK}\n{PACKAGE.parent}\n{START}\n"
    found = _read(file)
    if found == text:
        print(f"nothing to do: {file} starts the shim from {PACKAGE.parent}")
        return 0
    if found is not None:
        owner = owner_of(file)
        if owner is not None:
            print(f"nothing to do: {file} belongs to {owner}, which pip installed, and starts it")
            return 0
        _refuse_foreign(file, found)
    _require_folder_to_name(file.parent)
    try:
        _write(file, text)
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}; {_as_owner(file)}") from None
    was = f" (it named {found.splitlines()[1]} before)" if found else ""
    print(f"wrote {file}: Python starts the shim from {PACKAGE.parent}{was}")
    return 0


def disable(prefix: Prefix = None) -> int:
    """Undo `enable`: removes its .pth, and no other."""
    file = site_packages(prefix) / FILE
    found = _read(file)
    if found is None:
        print(f"nothing to do: there is no {file}")
        return 0
    owner = owner_of(file)
    if owner is not None:
        raise CommandError(
            f"{file} belongs to {owner}, which pip installed; run "
            "`pip uninstall expert-cache-shim` with the Python of that folder"
        )
    _refuse_foreign(file, found)
    try:
        file.unlink()
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}; {_as_owner(file)}") from None
    print(f"removed {file}: Python no longer starts the shim from it")
    return 0


def _require_folder_to_name(site_folder: Path) -> None:
    """A .pth names the package's folder, and puts all that lies there on sys.path."""
    folder = PACKAGE.parent
    if "\n" in str(folder) or "\r" in str(folder):
        raise CommandError(f"{str(folder)!r}: a .pth cannot name it; move the package")
    if folder.name in SITE_NAMES and folder != site_folder.resolve():
        raise CommandError(
            f"{folder}: has packages of another Python beside this one; install with the pip of "
            f"that of {site_folder}, or copy the package to a folder of its own"
        )


def site_packages(prefix: str | None) -> Path:
    """The folder whose .pth files Python runs: of this Python, or of what `--prefix` names."""
    if prefix is None:
        folder = Path(sysconfig.get_path("purelib"))
        if not folder.is_dir():
            raise CommandError(f"{folder}: no such folder; name one by --prefix")
        return folder
    folder = Path(prefix).absolute()
    if folder.name in SITE_NAMES and folder.is_dir():
        return folder
    found = sorted(path for name in SITE_NAMES for path in folder.glob(f"lib/python3*/{name}"))
    if len(found) == 1:
        return found[0]
    said = f"has {len(found)} of them" if found else "has none"
    raise CommandError(
        f"--prefix {prefix}: must be one site-packages or dist-packages folder or a folder that "
        f"has one in lib/python3.x, and {said}"
    )


def owner_of(file: Path) -> str | None:
    """Name and version of the installed distribution that lists a file of its site-packages."""
    for record in file.parent.glob("*.dist-info/RECORD"):
        try:
            lines = record.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        if any(line.split(",", 1)[0] == file.name for line in lines):
            return record.parent.name.removesuffix(".dist-info").replace("-", " ").replace("_", "-")
    return None


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}; {_as_owner(file)}") from None


def _refuse_foreign(file: Path, text: str) -> None:
    if not text.startswith(f"{MARK}\n") or len(text.splitlines()) != 3:
        raise CommandError(f"{file} was not written by `expert-cache enable`; remove it by hand")


def _as_owner(file: Path) -> str:
    return f"run this as a user who may write to {file.parent}"


def _write(file: Path, text: str) -> None:
    """In one step: a Python that starts meanwhile reads all of it or nothing."""
    handle, part = tempfile.mkstemp(".part", file.name, file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text.encode("utf-8", "surrogateescape"))
        os.chmod(part, 0o644)
        os.replace(part, file)
    except BaseException:
        os.unlink(part)
        raise
