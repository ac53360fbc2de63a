"""README.md and docs/ as tests read them, and the files they speak of."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_SPAN = re.compile(r"``(.+?)``|`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.M)


@dataclass(frozen=True)
class Document:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """Everything outside fenced blocks."""
        return _FENCE.sub("", self.text)

    def blocks(self, language: str) -> list[str]:
        """The fenced blocks of a language; those of none are commands."""
        return [text for found, text in _FENCE.findall(self.text) if found == language]

    @property
    def code(self) -> list[str]:
        """What is written as code: fenced blocks, and spans inside a line."""
        spans = [(double or single).strip() for double, single in _SPAN.findall(self.prose)]
        return [text for _, text in _FENCE.findall(self.text)] + spans

    @property
    def rows(self) -> list[list[str]]:
        """The cells of every table row."""
        lines = [line for line in self.prose.splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    @property
    def links(self) -> list[str]:
        return _LINK.findall(self.prose)

    @property
    def anchors(self) -> set[str]:
        """The names under which the headings can be linked to, by GitHub's rule."""
        names = (re.sub(r"[^\w\- ]", "", text.lower()) for text in _HEADING.findall(self.prose))
        return {name.strip().replace(" ", "-") for name in names}


def documents() -> list[Document]:
    return [Document(path) for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))]


def text_files() -> dict[str, str]:
    """Every text file that git tracks, or would track, by its name. Raises OSError or
    CalledProcessError outside a clone."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    texts = {}
    for name in filter(None, listed.split("\0")):
        try:
            texts[name] = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # not text; deleted, not yet committed
            continue
    return texts
