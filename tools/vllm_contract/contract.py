"""Every fact, and what becomes of all of them in a release."""

from __future__ import annotations

from pathlib import Path

from . import configuration, kernels, layers, loading, served, serving
from .facts import Fact, Result, examine
from .reading import Release

FACTS: list[Fact] = [
    fact
    for module in (loading, layers, kernels, served, configuration, serving)
    for fact in module.fact.facts
]


def examine_all(version: str, folder: Path) -> list[Result]:
    """Reads every fact in the sources of a release, in the order of FACTS."""
    sources = Release(version, folder)
    return [examine(fact, sources) for fact in FACTS]
