"""The results as a table for a terminal, and as the tables of docs/compatibility.md."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from .facts import ABSENT, DIFFERS, OK, Fact, Result
from .sources import ROOT

DOCUMENT = ROOT / "docs" / "compatibility.md"
SIGNS = {OK: "ok", ABSENT: "-", DIFFERS: "DIFFERS"}
Results = dict[str, list[Result]]


def table(facts: list[Fact], results: Results) -> str:
    """One line for each fact, one column for each release."""
    width = max(len(fact.name) for fact in facts)
    versions = list(results)
    lines = [" ".join([" " * width, *(version.rjust(7) for version in versions)])]
    subject = ""
    for number, fact in enumerate(facts):
        if fact.subject != subject:
            subject = fact.subject
            lines.append(subject.upper())
        signs = [SIGNS[results[version][number].status].rjust(7) for version in versions]
        lines.append(" ".join([fact.name.ljust(width), *signs]))
    return "\n".join(lines)


def differences(results: Results) -> list[str]:
    return [
        f"{version}: {result.fact.name}: {result.reason}"
        for version, found in results.items()
        for result in found
        if result.status == DIFFERS
    ]


def release_row(version: str, found: list[Result]) -> list[str]:
    """A release's row: for each subject, how many facts hold."""
    subjects = dict.fromkeys(result.fact.subject for result in found)
    cells = []
    for subject in subjects:
        count = Counter(r.status for r in found if r.fact.subject == subject)
        parts = [f"{count[s]} {s}" for s in (OK, DIFFERS) if count[s]]
        cells.append(", ".join(parts))
    return [version, *cells]


def releases_table(facts: list[Fact], results: Results) -> str:
    subjects = dict.fromkeys(fact.subject for fact in facts)
    rows = [release_row(version, found) for version, found in results.items()]
    return _markdown(["release", *subjects], rows)


def facts_table(results: list[Result]) -> str:
    """Every fact, its releases, and where it was found in the release of these results."""
    rows = [
        [
            result.fact.name,
            result.fact.stated,
            f"`{result.places[0].removeprefix('vllm/')}`" if result.places else "",
        ]
        for result in results
    ]
    return _markdown(["fact", "releases", f"found in {results[0].version} at"], rows)


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def committed(name: str) -> str:
    """The table below the mark `<!-- name -->` of the document."""
    found = _place(name).search(DOCUMENT.read_text(encoding="utf-8"))
    if found is None:
        raise LookupError(f"{DOCUMENT} has no mark <!-- {name} -->")
    return found[0]


def write(tables: dict[str, str], document: Path = DOCUMENT) -> None:
    text = document.read_text(encoding="utf-8")
    for name, rows in tables.items():
        text = _place(name).sub(lambda _, rows=rows: rows, text, count=1)
    document.write_text(text, encoding="utf-8")


def _place(name: str) -> re.Pattern:
    return re.compile(rf"(?<=<!-- {name} -->\n)(\|.*\n)*")
