"""Writes the tables of settings in README.md and docs/settings.md.

python -m tests.settings_table
"""

from __future__ import annotations

import re
from pathlib import Path

from expert_cache_shim.settings import VARIABLES

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = {
    "README.md": ("variable", "default", "meaning"),
    "docs/settings.md": ("variable", "default", "allowed", "meaning"),
}
PLACE = re.compile(r"(?<=<!-- settings -->\n)(\|.*\n)*")


def table(columns: tuple[str, ...]) -> str:
    """A Markdown table of the settings, one row for each variable."""
    rows = [columns, ["---"] * len(columns)]
    for variable in VARIABLES:
        cells = {
            "variable": f"`{variable.name}`",
            "default": f"`{variable.default}`" if variable.default else "",
            "allowed": variable.allowed,
            "meaning": variable.meaning,
        }
        rows.append([cells[column] for column in columns])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    for name, columns in COLUMNS.items():
        document = ROOT / name
        document.write_text(PLACE.sub(table(columns), document.read_text(), count=1))
