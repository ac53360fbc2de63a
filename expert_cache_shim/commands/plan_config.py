"""A model's config.json, read field by field.

The file may be anything: what is missing or odd is named in one line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..untrusted import read_file
from . import CommandError

MAX_BYTES = 16 * 2**20
MAX_SIZE = 2**24  # of any dimension of a model; above it is a slip of the pen
MAX_WHOLES, MAX_TEXTS, MAX_TEXT = 1024, 16384, 1000  # of a list; texts of one, characters
_REQUIRED: Any = object()


class Fields:
    """The values of one JSON object. A name that is absent or null takes the default."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def whole(
        self, *names: str, low: int = 1, high: int = MAX_SIZE, default: Any = _REQUIRED
    ) -> int:
        """A whole number from low to high, of the first of `names` that is there."""
        name, value = self._first(names, default)
        if value is default:
            return value
        self._check_whole(name, value, low, high)
        return int(value)

    def wholes(self, name: str) -> list[int]:
        """A list of whole numbers from 0; empty by default."""
        values = self._list(name, MAX_WHOLES)
        for value in values:
            self._check_whole(name, value, 0, MAX_SIZE)
        return [int(value) for value in values]

    def texts(self, *names: str) -> list[str]:
        """A list of texts; empty by default."""
        name, _ = self._first(names, [])
        values = self._list(name, MAX_TEXTS)
        for value in values:
            self._check_text(name, value, "a list of texts")
        return values

    def text(self, *names: str, default: Any = _REQUIRED) -> str:
        name, value = self._first(names, default)
        if value is not default and not isinstance(value, str):
            raise self.error(name, value, "a text")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        _, value = self._first((name,), default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def says(self, name: str, *values: Any) -> bool:
        """Whether a field that may have several types has one of these values."""
        _, found = self._first((name,), None)
        return any(type(found) is type(value) and found == value for value in values)

    def part(self, name: str) -> Fields | None:
        """An object inside this one; None where there is none."""
        _, value = self._first((name,), None)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return None if value is None else Fields(value, f"{self._where}: {name}")

    def names(self, name: str) -> list[str]:
        """The names in an object; none where there is none."""
        outer = self.part(name)
        if outer is None:
            return []
        if len(outer._values) > MAX_TEXTS:
            raise self.error(name, outer._values, f"an object of at most {MAX_TEXTS} names")
        for inner in outer._values:
            self._check_text(name, inner, "an object of names")
        return list(outer._values)

    def parts(self, name: str) -> list[Fields]:
        """The objects that an object holds by name."""
        found = [self.part(name).part(inner) for inner in self.names(name)]
        return [inner for inner in found if inner is not None]

    def error(self, name: str, value: Any, allowed: str) -> CommandError:
        try:
            shown = json.dumps(value)
        except RecursionError:  # deeper than what wrote it can go, and not than what reads it
            shown = "nested too deeply"
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return CommandError(f"{self._where}: {name} is {shown}; it must be {allowed}")

    def _first(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self._values.get(name) is not None:
                return name, self._values[name]
        if default is _REQUIRED:
            raise CommandError(
                f"{self._where}: {names[0]} is missing, which the configuration of a "
                "mixture-of-experts model has"
            )
        return names[0], default

    def _list(self, name: str, most: int) -> list[Any]:
        _, value = self._first((name,), [])
        if not isinstance(value, list) or len(value) > most:
            raise self.error(name, value, f"a list, of at most {most}")
        return value

    def _check_text(self, name: str, value: Any, allowed: str) -> None:
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise self.error(name, value, f"{allowed}, each of at most {MAX_TEXT} characters")

    def _check_whole(self, name: str, value: Any, low: int, high: int) -> None:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not low <= value <= high:
            raise self.error(name, value, f"a whole number from {low} to {high}")


def find(model: str) -> Path:
    """The config.json that a user means by a file, a folder, or a name that was downloaded
    before. Raises CommandError."""
    path = Path(model)
    try:
        if path.is_dir():
            path = path / "config.json"
        elif not path.exists():
            path = _downloaded(model) or path
        found = path.is_file()
    except (OSError, ValueError) as error:  # a name that is too long, a folder that is locked
        raise CommandError(f"{path}: {getattr(error, 'strerror', error)}") from None
    if not found:
        raise CommandError(
            f"{path}: no such file; give a config.json, or a folder that has one: nothing is "
            "downloaded"
        )
    return path


def read(path: Path) -> Fields:
    """A config.json. Raises CommandError."""
    try:
        values = json.loads(read_file(path, MAX_BYTES, links=True))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())[:100]
        raise CommandError(f"{path}: is not JSON: {detail}") from None
    if not isinstance(values, dict):
        raise CommandError(f"{path}: is JSON, but no object")
    return Fields(values, str(path))


def _downloaded(name: str) -> Path | None:
    """The newest config.json of `owner/model` in the cache of huggingface_hub."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    if name.count("/") != 1 or ".." in name:
        return None
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None
