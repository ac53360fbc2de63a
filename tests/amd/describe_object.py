"""Brings the table of docs/amd.md up to date: what each code object of the library asks for."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from code_objects import LIBRARY, ROOT, extract

DOCUMENT = ROOT / "docs" / "amd.md"

_FIELDS = {
    "wave": ".wavefront_size",
    "vector registers": ".vgpr_count",
    "scalar registers": ".sgpr_count",
    "LDS bytes": ".group_segment_fixed_size",
    "scratch bytes": ".private_segment_fixed_size",
}


def table(library: Path) -> str:
    """A Markdown table, one row for each architecture and kernel."""
    heads = ["architecture", "kernel", "instructions", *_FIELDS]
    rows = [heads, ["---"] * len(heads)]
    with tempfile.TemporaryDirectory() as folder:
        for architecture, code_object in sorted(extract(library, Path(folder)).items()):
            for name, kernel in sorted(code_object.kernels.items()):
                label = name.removeprefix("expert_cache_").removesuffix("_kernel")
                numbers = [len(kernel.code), *(kernel.metadata[key] for key in _FIELDS.values())]
                rows.append([architecture, label, *map(str, numbers)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    rows = re.compile(r"(?<=<!-- kernels -->\n)(\|.*\n)+")
    DOCUMENT.write_text(rows.sub(table(LIBRARY), DOCUMENT.read_text()))
