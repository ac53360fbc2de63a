"""`trace`: looks at recorded routing, and counts what a cache would have missed on it."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..settings import Settings
from ..untrusted import printable
from . import CommandError, Option

if TYPE_CHECKING:
    from rich.table import Table

    from ..trace import Trace
    from ..trace_replay import Counts

DEFAULT_SLOTS = ("1/16", "1/8", "3/16", "1/4", "3/8", "1/2", "5/8", "3/4")

Files = Annotated[list[str], Option("TRACE", "Trace files, as docs/trace.md describes them.")]
Steps = Annotated[int, Option("--steps", "Only so many forward passes from the start.", "N")]
Slots = Annotated[
    list[str],
    Option("--slots", "Slots of each layer: numbers, or shares of its experts as 1/4, by commas."),
]
Policies = Annotated[list[str], Option("--policy", "Only these policies, by commas. Unset: all.")]
HalfLife = Annotated[float, Option("--half-life", "lrfu: steps in which a score halves.", "STEPS")]
Decay = Annotated[int, Option("--decay", "lfu: steps between two halvings.", "STEPS")]
Control = Annotated[
    str | None,
    Option(
        "--control",
        "uniform: random routing of the same shape in place of the trace's. shuffled: the "
        "trace's, with the tokens of each layer in random order.",
        "KIND",
    ),
]
AsJson = Annotated[bool, Option("--json", "Everything as JSON.")]


def info(files: Files, as_json: AsJson = False) -> int:
    """Say what a trace holds: model, steps, layers, how unevenly experts are used."""
    need("numpy", "rich")
    found = [(name, _description(read(name))) for name in files]
    if as_json:
        print(json.dumps([{"file": name, **values} for name, values in found], indent=2))
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    for name, values in found:
        title = Text(printable(name), "table.title")
        table = Table(title=title, box=box.SIMPLE, show_header=False, title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for what, value in values.items():
            table.add_row(what, Text(_readable(value)))
        Console().print(table)
    return 0


def replay(
    files: Files,
    slots: Slots = (),
    policies: Policies = (),
    half_life: HalfLife = Settings.half_life,
    decay: Decay = Settings.decay,
    control: Control = None,
    steps: Steps = 0,
    as_json: AsJson = False,
) -> int:
    """Count the misses of every policy, and of Belady's optimum, at several numbers of slots."""
    need("numpy", "rich")
    traces = {name: prepared(read(name), steps, control) for name in files}
    counts = count(traces, slots, policies, half_life, decay)
    if as_json:
        print(json.dumps([_as_dict(name, traces[name], c) for name, c in counts], indent=2))
        return 0
    from rich.console import Console

    for name, trace in traces.items():
        Console().print(_table(name, trace, [c for owner, c in counts if owner == name]))
    return 0


def need(*modules: str) -> None:
    """Raises CommandError where a package of the extra is missing."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise CommandError(
            f"needs {' and '.join(missing)}; pip install 'expert-cache-shim[tools]' brings "
            f"{'it' if len(missing) == 1 else 'them'}"
        )


def writable(name: str, endings: tuple[str, ...] = (".npz",)) -> Path:
    """The file that a command is to write. Raises CommandError where it cannot be."""
    path = Path(name)
    if path.suffix not in endings:
        raise CommandError(f"{name}: allowed is a name in {' or '.join(endings)}")
    if not os.access(path.absolute().parent, os.W_OK):
        raise CommandError(f"{name}: {path.absolute().parent}: no folder that can be written")
    return path


def read(name: str) -> Trace:
    from .. import trace

    try:
        return trace.load(name)
    except trace.TraceError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}") from None


def save(trace: Trace, path: Path) -> None:
    from .. import trace as files

    try:
        files.save(trace, path)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None


def prepared(trace: Trace, steps: int, control: str | None) -> Trace:
    """The trace that is to be counted."""
    from ..trace_control import CONTROLS

    if steps < 0:
        raise CommandError(f"--steps {steps}: allowed is a number above 0")
    if control is not None and control not in CONTROLS:
        raise CommandError(f"--control {control}: allowed is one of {', '.join(CONTROLS)}")
    if steps:
        trace = trace.first(steps)
    return CONTROLS[control](trace) if control else trace


def count(
    traces: dict[str, Trace], slots: list[str], policies: list[str], half_life: float, decay: int
) -> list[tuple[str, Counts]]:
    """Runs every policy on every trace, with a progress bar on the terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    from ..policy import decay_parameter
    from ..trace_pool import Job, run_all
    from ..trace_replay import OPTIMUM, POLICIES

    names = split(policies) or POLICIES
    for name in names:
        if name not in POLICIES:
            raise CommandError(f"--policy {name}: allowed is one of {', '.join(POLICIES)}")
    try:
        decays = {n: decay_parameter(n, half_life, decay) for n in names if n != OPTIMUM}
    except ValueError as error:
        raise CommandError(str(error)) from None
    jobs = [
        (name, Job(trace, sizes(slots, trace.experts), policy, decays.get(policy)))
        for name, trace in traces.items()
        for policy in names
    ]
    columns = ("{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay", total=sum(job.trace.steps for _, job in jobs))
        found = run_all([job for _, job in jobs], lambda n: bar.update(task, completed=n))
    return [(name, counts) for (name, _), counts in zip(jobs, found)]


def sizes(slots: list[str], experts: int) -> tuple[int, ...]:
    """Numbers of slots, rising, from words such as 16 and 1/4."""
    found = set()
    for word in split(slots) or DEFAULT_SLOTS:
        try:
            size = int(Fraction(word) * experts) if "/" in word else int(word)
        except (ValueError, ZeroDivisionError):
            raise CommandError(f"--slots {word}: allowed is a number or a share as 1/4") from None
        if not 1 <= size < experts:
            if not slots:
                continue
            raise CommandError(
                f"--slots {word}: is {size} slots of {experts} experts, allowed is 1 to "
                f"{experts - 1}"
            )
        found.add(size)
    return tuple(sorted(found))


def split(words: list[str]) -> list[str]:
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def title(name: str, trace: Trace) -> str:
    """One line about a trace."""
    control = said(trace, "control")
    return printable(
        f"{Path(name).name}: {trace.steps:,} steps, {trace.layers} layers, {trace.top_k} of "
        f"{trace.experts} experts a token" + (f", {control} control" if control else "")
    )


def said(trace: Trace, key: str) -> str:
    """What the file says of itself under a key of `meta`, which may be anything; "" for what is
    neither text nor a number."""
    value = trace.meta.get(key, "")
    return printable(str(value))[:200] if isinstance(value, (str, int, float)) else ""


def _table(name: str, trace: Trace, counts: list[Counts]) -> Table:
    """Miss rates, the best of each column in bold; Belady's is no policy that can be had."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ..trace_replay import OPTIMUM

    heading = Text(title(name, trace), "table.title")
    table = Table(title=heading, box=box.SIMPLE, title_justify="left")
    table.add_column("misses, %", no_wrap=True)
    for size in counts[0].slots:
        table.add_column(f"S={size}", justify="right", no_wrap=True)
    real = [c.misses.sum(axis=1) for c in counts if c.policy != OPTIMUM]
    best = [min(column) for column in zip(*real)]
    for c in counts:
        cells = []
        for index, rate in enumerate(c.miss_rates):
            is_best = c.policy != OPTIMUM and c.misses[index].sum() == best[index]
            cells.append(f"[bold green]{100 * rate:.2f}[/]" if is_best else f"{100 * rate:.2f}")
        table.add_row(c.policy, *cells, style="dim" if c.policy == OPTIMUM else None)
    return table


def _as_dict(name: str, trace: Trace, counts: Counts) -> dict[str, Any]:
    return {
        "file": name,
        "experts": trace.experts,
        "steps": trace.steps,
        "control": said(trace, "control") or None,
        "policy": counts.policy,
        "slots": list(counts.slots),
        "routed": int(counts.routed.sum()),
        "misses": counts.misses.sum(axis=1).tolist(),
        "overflow": counts.overflow.sum(axis=1).tolist(),
        "miss_rate": [round(float(rate), 6) for rate in counts.miss_rates],
        "misses_by_layer": counts.misses.tolist(),
    }


def _description(trace: Trace) -> dict[str, Any]:
    import numpy as np

    from ..trace_replay import busiest_share, reuse_distances

    tokens = np.diff(trace.bounds)
    distances = reuse_distances(trace)
    again = np.cumsum(distances[:-1])
    values: dict[str, Any] = {
        "model": said(trace, "model") or "not stated",
        "tokens": len(trace.ids),
        "forward passes": trace.steps,
        "tokens a pass, most": int(tokens.max()),
        "prompts": len(np.unique(trace.seq)),
        "layers": trace.layers,
        "experts": trace.experts,
        "experts a token": trace.top_k,
        "to the busiest quarter": busiest_share(trace),
        "median reuse distance": int(np.searchsorted(again, again[-1] / 2)),
    }
    for key in ("lost_tokens", "control", "source", "commit", "licence"):
        if key in trace.meta:
            values[key.replace("_", " ")] = said(trace, key)
    return values


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else str(value)
