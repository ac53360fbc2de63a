"""`trace plot`: pictures of recorded routing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..settings import Settings
from ..untrusted import printable
from . import CommandError, Option
from .trace import (
    Control,
    Decay,
    Files,
    HalfLife,
    Policies,
    Slots,
    Steps,
    count,
    need,
    prepared,
    read,
    said,
    writable,
)

KINDS = ("curves", "layers", "reuse")
ENDINGS = (".png", ".svg")


def plot(
    files: Files,
    output: Annotated[str, Option("--output", "The picture: .png or .svg.", "FILE")] = "trace.png",
    kind: Annotated[
        str,
        Option(
            "--kind",
            "curves: miss rate by share of experts resident. layers: heat map of the use of each "
            "layer's experts. reuse: how soon an expert is routed again.",
            "KIND",
        ),
    ] = "curves",
    slots: Slots = (),
    policies: Policies = (),
    half_life: HalfLife = Settings.half_life,
    decay: Decay = Settings.decay,
    control: Control = None,
    steps: Steps = 0,
) -> int:
    """Draw miss-ratio curves, a heat map of the layers, or reuse distances."""
    need("numpy", "rich", "matplotlib")
    if kind not in KINDS:
        raise CommandError(f"--kind {kind}: allowed is one of {', '.join(KINDS)}")
    picture = writable(output, ENDINGS)
    traces = {name: prepared(read(name), steps, control) for name in files}
    from .. import trace_plot

    if kind == "curves":
        counts = count(traces, slots, policies, half_life, decay)
        trace_plot.curves(
            [
                (_title(name, trace), trace, [found for owner, found in counts if owner == name])
                for name, trace in traces.items()
            ],
            picture,
        )
    else:
        draw = trace_plot.layers if kind == "layers" else trace_plot.reuse
        draw([(_title(name, trace), trace) for name, trace in traces.items()], picture)
    print(f"wrote {picture}")
    return 0


def _title(name: str, trace) -> str:
    """Short: half a picture wide. A dollar would begin a formula."""
    control = f", {said(trace, 'control')}" if said(trace, "control") else ""
    text = f"{Path(name).stem}: {trace.top_k} of {trace.experts} experts{control}"
    return printable(text).replace("$", r"\$")
