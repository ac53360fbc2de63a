"""The screen of `plan`, for a terminal of 80 columns."""

from __future__ import annotations

import sys
from typing import Any

from . import CommandError
from .check import size
from .plan_budget import Budget, Row, Span

GIB = 2**30


def show(report: dict[str, Any], budget: Budget) -> None:
    """Prints a report of `plan`. Raises CommandError without rich."""
    try:
        from rich.console import Console
    except ImportError:
        raise CommandError(
            "needs rich; pip install 'expert-cache-shim[tools]', or ask for --json"
        ) from None
    console = Console(highlight=False, soft_wrap=False)
    for part in (_head(report), _memory(report, budget), _types(report), _slots(report, budget)):
        console.print(part)
    console.print(_verdict(report, budget))
    if budget.best or budget.whole:
        print(_shell(report["command"]))
    for line in _notes(report, budget):
        console.print(line, style="dim")
    sys.stdout.flush()


def _table(title: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                  pad_edge=False, show_edge=False)  # fmt: skip
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _head(report: dict[str, Any]) -> str:
    model, load, machine = report["model"], report["load"], report["machine"]
    gpus = "1 GPU" if load["ranks"] == 1 else f"{load['ranks']} GPUs"
    return (
        f"[bold]{model['kind']}[/]: {model['moe_layers']} of {model['layers']} layers have "
        f"{model['experts']} experts, {model['top_k']} a token, {model['stored_as']}\n"
        f"{gpus} of {size(machine['vram'])}, of which vLLM may use {machine['utilization']:g}; "
        f"sizes from {model['sizes_from']}\n"
    )


def _memory(report: dict[str, Any], budget: Budget) -> Any:
    fixed, load, machine = budget.fixed, report["load"], report["machine"]
    left = int(machine["vram"] * machine["utilization"]) - fixed.total
    table = _table("Memory", "of one GPU" if load["ranks"] > 1 else "of the GPU", "GiB")
    rows = {
        "weights that are no routed experts": fixed.rest,
        f"KV cache, {load['streams']} x {load['context']:,} tokens, "
        f"{size(budget.kv_token)} a token": fixed.kv_cache,
        f"a step of {load['batched_tokens']:,} tokens, graphs": fixed.steps,
        "driver and libraries": fixed.context,
        "left for slots and overflow rows": left,
    }
    for name, count in rows.items():
        table.add_row(name, f"{count / GIB:.2f}")
    table.add_section()
    table.add_row("[bold]of the host[/]" + (", a rank" if load["ranks"] > 1 else ""), "")
    table.add_row("experts", f"{budget.host / GIB:.2f}")
    table.add_row("the same as pinned memory, rounded up by PyTorch", f"{budget.pinned / GIB:.2f}")
    if load["ranks"] > 1:
        table.add_row("of all ranks", f"{budget.pinned * load['ranks'] / GIB:.2f}")
    return table


def _types(report: dict[str, Any]) -> Any:
    table = _table("\nExperts by type", "stored as", "one", "all GiB", "slots that fit")
    experts = report["model"]["experts_of_a_rank"]
    for name, found in report["other_types"].items():
        slots = "all" if found["slots"] == experts else f"{found['slots']} of {experts}"
        own = "[bold]" if name == report["model"]["stored_as"] else ""
        table.add_row(own + name, size(found["expert"]), f"{found['all'] / GIB:.1f}", slots)
    return table


def _slots(report: dict[str, Any], budget: Budget) -> Any:
    streams = report["load"]["streams"]
    rates = ["1 stream\ntok/s"] + ([f"{streams:>2} streams\ntok/s"] if streams > 1 else [])
    columns = ("slots", "share", "slots\nGiB", "overflow\nGiB", "left\nGiB", "misses\n%", *rates)
    table = _table("\nSlots a layer, and decoding at best (left below 0: no room)", *columns)
    for row in budget.rows:
        cells = _cells(row, report["model"]["experts_of_a_rank"], streams)
        style = "bold" if row.slots == budget.best and row.slots else "" if row.left >= 0 else "dim"
        table.add_row(*cells, style=style)
    return table


def _cells(row: Row, experts: int, streams: int) -> list[str]:
    memory = [f"{row.own / GIB:.2f}", f"{row.overflow / GIB:.2f}", f"{row.left / GIB:.1f}"]
    memory = memory if row.slots else [""] * 3
    misses = _span((100 * row.miss[0], 100 * row.miss[1]))
    rates = [_span(row.alone)] + ([_span(row.rate)] if streams > 1 else [])
    name = str(row.slots) if row.slots else "no cache"
    return [name, f"{row.slots / experts:.0%}" if row.slots else "", *memory, misses, *rates]


def _span(span: Span) -> str:
    low, high = (f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in span)
    return low if low == high else f"{low}-{high}"


def _verdict(report: dict[str, Any], budget: Budget) -> str:
    if budget.whole:
        return "\n[green]The whole model fits.[/] It needs no offloading and no cache:\n"
    if not budget.best:
        return (
            f"\n[red]Nothing fits:[/] one slot a layer lacks {budget.short / GIB:.2f} GiB. A "
            "shorter context, fewer requests, more GPUs or a smaller type of experts help."
        )
    slots = f"{budget.best} slot fits" if budget.best == 1 else f"{budget.best} slots fit"
    beside = "" if budget.overflow else ", without overflow rows, so wide steps read through"
    if 0 < budget.preload < budget.best:
        beside += (
            f". Beside {budget.preload} there is room for a second set of overflow rows, with "
            "which long prompts fetch ahead"
        )
    return f"\n[green]{slots}[/]{beside}:\n"


def _shell(words: list[str]) -> str:
    """The command in lines of at most 78 characters, options kept with their values."""
    lines, line = [], ""
    index = 0
    while index < len(words):
        paired = words[index].startswith("--")
        piece = " ".join(words[index : index + 1 + paired])
        index += 1 + paired
        if line and len(line) + 1 + len(piece) > 76:
            lines.append(line + " \\")
            line = "  " + piece
        else:
            line = f"{line} {piece}" if line else piece
    return "\n".join([*lines, line])


def _notes(report: dict[str, Any], budget: Budget) -> list[str]:
    machine, sources = report["machine"], report["misses_from"]
    notes = ["", f"Misses: {', '.join(sources)}"]
    notes[-1] += "." if len(sources) == 1 else ": the least and the most of these models' routing."
    if "link" in machine["assumed"]:
        notes.append("Assumed: a link of 25 GB/s; doctor measures it, --link says it.")
    else:
        notes.append(f"Link: {machine['link'] / 1e9:.1f} GB/s.")
    if "memory_rate" in machine["assumed"]:
        notes.append("Assumed: 1000 GB/s of device memory; --vram-bandwidth says it.")
    need = budget.pinned * report["load"]["ranks"]
    if machine["ram"] and need > machine["ram"] and not budget.whole:
        notes.append(
            f"The host has {size(machine['ram'])}, and {size(need)} will be pinned. See "
            "docs/sizing.md for a way to pin without rounding."
        )
    return notes
