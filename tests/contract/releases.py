"""Made-up releases, and real ones with a change."""

from __future__ import annotations

from pathlib import Path

from tools.vllm_contract.contract import FACTS
from tools.vllm_contract.facts import Fact, Result, examine
from tools.vllm_contract.reading import Release, Source


def fact(name: str) -> Fact:
    (found,) = [fact for fact in FACTS if fact.name == name]
    return found


def release(folder: Path, files: dict[str, str], version: str = "0.33.0") -> Release:
    """A release of these files, by their names below vllm/."""
    for name, text in files.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Release(version, folder)


def emptied(original: Release, names: set[str]) -> Release:
    """A release in which some files have no content; the others are read once for both."""
    changed = Release(original.version, original.folder)
    changed._sources = {**original._sources, **{name: Source(name, "") for name in names}}
    return changed


def examined(name: str, folder: Path, files: dict[str, str], version: str = "0.33.0") -> Result:
    return examine(fact(name), release(folder, files, version))
