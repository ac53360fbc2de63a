"""Writes expert_cache_shim/commands/plan_curves.py from traces of recorded routing.

    python tools/make_miss_curves.py KIND/NAME=TRACE.npz ...

KIND is the `model_type` of the model that was recorded, NAME what the curve is called. The traces
have one token a step; their first 1,396 steps are used, so that all have about the same weight. Of
each the miss rate of the default policy is counted with warm caches, for some numbers of streams
and shares of resident experts.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from expert_cache_shim import trace  # noqa: E402
from expert_cache_shim.commands.plan_misses import count_misses  # noqa: E402

STREAMS = (1, 2, 4, 8, 16, 32)
FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
STEPS = 1396
HEAD = '''"""Miss rates of recorded routing; written by tools/make_miss_curves.py."""

from .plan_misses import Curve

STREAMS = {streams}
FRACTIONS = {fractions}

CURVES = (
'''


def curve(kind: str, name: str, recorded: trace.Trace) -> str:
    """The source text of one Curve."""
    recorded = recorded.first(STEPS)
    slots = [max(1, round(share * recorded.experts)) for share in FRACTIONS]
    counted = [count_misses(recorded, streams, slots) for streams in STREAMS]
    routed = tuple(round(routed, 2) for routed, _ in counted)
    rows = "".join(f"            {tuple(round(m, 4) for m in misses)},\n" for _, misses in counted)
    meta = recorded.meta
    source = f"{meta['source']} at {meta['commit'][:8]}, {meta['licence'].split()[0]}"
    return (
        f"    Curve(\n        {name!r}, {kind!r},\n        {source!r},\n"
        f"        {recorded.experts}, {recorded.top_k}, {recorded.layers}, STREAMS, FRACTIONS,\n"
        f"        {routed},\n        (\n{rows}        ),\n    ),\n"
    )


def main(words: list[str]) -> None:
    curves = []
    for word in words:
        model, _, path = word.partition("=")
        curves.append(curve(*model.split("/"), trace.load(path)))
    text = HEAD.format(streams=STREAMS, fractions=FRACTIONS) + "".join(curves) + ")  # fmt: skip\n"
    (ROOT / "expert_cache_shim" / "commands" / "plan_curves.py").write_text(text.replace("'", '"'))


if __name__ == "__main__":
    main(sys.argv[1:])
