"""`trace import`: what vLLM returned, as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from . import CommandError, Option
from .trace import need, save, split, writable

Output = Annotated[str, Option("OUTPUT", "The trace file to write.")]


def import_(
    output: Output,
    arrays: Annotated[
        list[str],
        Option("ARRAY", "routed_experts of one output as .npy, or a response of the server, JSON."),
    ],
    prompt_tokens: Annotated[
        list[str],
        Option(
            "--prompt-tokens",
            "How many tokens at the start are the prompt, which ran in one pass: one number for "
            "all, or one for each array by commas. Unset: every token is a pass of its own.",
            "N",
        ),
    ] = (),
    experts: Annotated[
        int, Option("--experts", "Experts of a layer. Unset: the highest number seen, plus one.")
    ] = 0,
    model: Annotated[str | None, Option("--model", "A name for the record.")] = None,
) -> int:
    """Make a trace of the routed experts that vLLM returns with its outputs."""
    need("numpy")
    path = writable(output)
    from .. import trace, trace_import

    meta = {key: value for key, value in (("num_experts", experts), ("model", model)) if value}
    try:
        found = [array for name in arrays for array in trace_import.load(Path(name))]
        prompts = _numbers(prompt_tokens, [len(array) for array in found])
        joined = trace_import.join(found, prompts, meta)
    except trace.TraceError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from None
    save(joined, path)
    print(f"wrote {output}: {len(joined.ids):,} tokens of {len(found):,} requests")
    return 0


def _numbers(words: list[str], lengths: list[int]) -> list[int]:
    """One number for each array."""
    parts = split(words) or ["0"]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise CommandError(f"--prompt-tokens {','.join(parts)}: allowed are numbers")
    numbers = [int(part) for part in parts]
    if len(numbers) == 1:
        numbers *= len(lengths)
    if len(numbers) != len(lengths):
        raise CommandError(f"--prompt-tokens has {len(numbers)} numbers for {len(lengths)} arrays")
    for number, length in zip(numbers, lengths):
        if number > length:
            raise CommandError(f"--prompt-tokens {number}: an array has {length} tokens")
    return numbers
