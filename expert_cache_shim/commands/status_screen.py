"""The live view of `status`, drawn with rich."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..telemetry import Snapshot
from .status import (
    BLOCKS,
    block,
    layer_number,
    layers_of,
    none_runs,
    percent,
    size,
    slots_of,
    strip_scale,
    when,
)
from .watch import Engine, Rank, Reading, Watch

# For BLOCKS, red to green. The height of a block says the same to whoever sees no colours.
HEAT = dict(
    zip(
        BLOCKS,
        ("#d73027", "#f46d43", "#fdae61", "#e6c229", "#b8c832", "#85c440", "#4aa84a", "#1a9850"),
    )
)


def show(watch: Watch, interval: float, with_ended: bool) -> int:
    """Draws until it is interrupted; what was drawn last stays on the terminal."""
    reading = watch.read()
    try:
        with Live(auto_refresh=False) as live:
            while True:
                live.update(screen(reading, interval, with_ended), refresh=True)
                time.sleep(interval)
                reading = watch.read()
    except KeyboardInterrupt:
        return 0 if reading.engines else 1


def screen(reading: Reading, interval: float, with_ended: bool) -> RenderableType:
    """One picture of a reading."""
    parts: list[RenderableType] = []
    for engine in reading.engines:
        parts += _engine(engine)
    if not reading.engines:
        parts.append(Text(none_runs(reading)))
    if reading.ended and with_ended:
        parts += _ended(reading.ended)
    footer = f"{reading.folder}, every {interval:g} s, Ctrl-C ends"
    if reading.ended and reading.engines and not with_ended:
        footer += f"; {len(reading.ended)} ended workers (--ended)"
    return Group(*parts, Text(footer, "dim"))


def _engine(engine: Engine) -> Iterator[RenderableType]:
    first = engine.ranks[0].now
    storage = "/".join(sorted({layer["storage"] for layer in first.layers}))
    yield _Title(engine.model)
    yield Text(
        f"{layers_of(first)} layers, {slots_of(first)} experts resident, {first.policy}, "
        f"{storage}, since {when(first.started)}"
    )
    yield Padding(_table(engine.ranks), (1, 0))
    yield from _heat(engine)


class _Title:
    """A rule with a name, of which a narrow screen shows the end: paths differ there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - 3
        name = self._name if len(self._name) <= room else "…" + self._name[1 - room :]
        yield Rule(Text(name, "bold"), align="left", style="dim")


def _table(ranks: list[Rank]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in (
        "rank", "process", "hit rate\nnow", "hit rate\nin all", "fetched\nnow", "fetched\nin all",
        "no slot\nnow", "read\nthrough", "steps/s\nnow",
    ):  # fmt: skip
        table.add_column(header, justify="right", no_wrap=True, header_style="dim")
    for rank in ranks:
        table.add_row(str(rank.now.rank), str(rank.now.pid), *_cells(rank))
    return table


def _cells(rank: Rank) -> Iterator[str]:
    recent = rank.recent
    yield percent(recent and recent.hit_rate())
    yield percent(rank.now.hit_rate())
    yield f"{size(rank.bytes_per_second())}/s" if recent else "-"
    yield size(rank.now.fetched_bytes())
    yield percent(recent and recent.overflow_share())
    yield percent(recent and recent.read_through_share())
    yield f"{rank.passes_per_second():,.1f}" if recent else "-"


def _heat(engine: Engine) -> Iterator[RenderableType]:
    """Every layer's hit rate in the last interval, or in all while nothing is routed."""
    rates = engine.layer_hit_rates(recent=True)
    if not any(rate is not None for rate in rates.values()):
        rates = engine.layer_hit_rates()
    lowest = strip_scale(list(rates.values()))
    legend = Text(f"hit rate by layer, {lowest:.0%} ", "dim")
    for character, color in HEAT.items():
        legend.append(character, f"not dim {color}")
    legend.append(" 100%")
    counted = {name: rate for name, rate in rates.items() if rate is not None}
    if counted:
        name = min(counted, key=counted.__getitem__)
        legend.append(f", lowest {percent(counted[name])} in layer {layer_number(name)}")
    yield legend
    yield _Strip([layer_number(name) for name in rates], [block(r, lowest) for r in rates.values()])


class _Strip:
    """A block for each layer, with the layer's number above every tenth."""

    def __init__(self, numbers: list[str], blocks: list[str]) -> None:
        self._numbers = numbers
        self._blocks = blocks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        per_line = max(10, options.max_width // 10 * 10)
        for start in range(0, len(self._blocks), per_line):
            numbers = self._numbers[start : start + per_line : 10]
            yield Text("".join(f"{number:<10.10}" for number in numbers).rstrip(), "dim")
            strip = Text()
            for character in self._blocks[start : start + per_line]:
                strip.append(character, HEAT.get(character, "dim"))
            yield strip
        yield Text()


def _ended(ended: list[Snapshot]) -> Iterator[RenderableType]:
    yield Rule(Text("ended workers"), align="left", style="dim")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in ("since", "process", "rank", "hit rate", "fetched", "model"):
        right = header not in ("since", "model")
        table.add_column(header, justify="right" if right else "left", header_style="dim")
    for snapshot in ended:
        table.add_row(
            when(snapshot.started), str(snapshot.pid), str(snapshot.rank),
            percent(snapshot.hit_rate()), size(snapshot.fetched_bytes()), Text(snapshot.model),
        )  # fmt: skip
    yield Padding(table, (0, 0, 1, 0))
