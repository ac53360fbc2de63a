"""A real vLLM engine in this process, stepped by hand so that single steps can be timed."""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from expert_cache_shim import telemetry
from expert_cache_shim.policy import COUNTERS

from .timing import GraphClock

# Steps that vLLM may have scheduled ahead when a generation ends.
AHEAD = 4


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def used_bytes() -> int:
    """Device memory in use, of whatever process and allocator; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def wait_for_memory(seconds: float = 30.0) -> None:
    """Until the device memory in use stands still: that of a process that has just ended is given
    back after it is gone, and vLLM refuses to start while memory comes free."""
    deadline, before = time.monotonic() + seconds, None
    while before != used_bytes() and time.monotonic() < deadline:
        before = used_bytes()
        time.sleep(1.0 if torch.cuda.is_available() else 0.0)


@dataclass
class Window:
    """Some steps in a row: how long they took and what the cache counted meanwhile.

    `counters` are sums over the layers; empty where nothing is armed. `device_ms`: the mean
    device time of a step, where every step was one replay of a CUDA graph.
    """

    seconds: float
    steps: int
    counters: dict[str, int] = field(default_factory=dict)
    device_ms: float | None = None


class Engine:
    """`vllm.LLM` and the counters of the layers that are armed in it."""

    def __init__(self, snapshots: Path | None, **options: Any) -> None:
        """snapshots: the folder that EXPERT_CACHE_SNAPSHOT names. options: of vllm.LLM."""
        from vllm import LLM

        if "cpu_offload_params" in options:
            options["cpu_offload_params"] = set(options["cpu_offload_params"])
        started = time.perf_counter()
        self.llm = LLM(**options)
        self.start_seconds = time.perf_counter() - started
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self._snapshots = snapshots
        self._names = itertools.count()

    @functools.cached_property
    def _clock(self) -> GraphClock:
        """From the first window on: it stays in this process, and costs every replay."""
        return GraphClock()

    def model(self) -> torch.nn.Module:
        """The model itself; the engine runs in this process."""
        return self.llm.apply_model(lambda model: model)[0]

    def layers(self) -> list[dict]:
        """What the cache says of each armed layer: slots, storage, bytes of a record."""
        return [layer for snapshot in self._read() for layer in snapshot.layers]

    def counters(self) -> dict[str, int]:
        """Sums over the armed layers since the start. Exact after `synchronize`."""
        snapshots = self._read()
        if not snapshots:
            return {}
        return {name: sum(s.total(name) for s in snapshots) for name in COUNTERS}

    def _read(self) -> list[telemetry.Snapshot]:
        return telemetry.read_folder(self._snapshots) if self._snapshots else []

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Random token ids, the same for every arm."""
        generator = random.Random(seed)
        return [generator.randrange(10, self.vocabulary) for _ in range(tokens)]

    def submit(self, prompt: list[int], max_tokens: int) -> str:
        """Queues a greedy request that always gives `max_tokens`; its name."""
        from vllm import SamplingParams

        name = str(next(self._names))
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def steps(self) -> Iterator[dict[str, list[int]]]:
        """Steps the engine until nothing is left to do. Yields the token ids so far of each
        request that has a new one, by name; steps that finish nothing are passed over."""
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if outputs:
                yield {o.request_id: list(o.outputs[0].token_ids) for o in outputs}

    def window(self, run: Callable[[], int]) -> Window:
        """Times `run`, which returns the number of steps it made."""
        synchronize()
        self._clock.take()
        before, started = self.counters(), time.perf_counter()
        steps = run()
        synchronize()
        seconds, after = time.perf_counter() - started, self.counters()
        counted = {name: after[name] - before[name] for name in after}
        replays = self._clock.take()
        device_ms = statistics.mean(replays) if len(replays) == steps else None
        return Window(seconds, steps, counted, device_ms)

    def decode(self, streams: int, warm: int, windows: int, steps: int) -> list[Window]:
        """`windows` times `steps` decode steps of `streams` tokens each, after `warm` of them.

        vLLM may schedule a step ahead. As many are then under way at the end of a window as at
        its start, and both ends wait for them: the steps, the time and the counters agree.
        """
        length = 1 + warm + windows * steps + AHEAD
        for stream in range(streams):
            self.submit(self.prompt(16, seed=stream), length)
        generation = self.steps()

        def advance(count: int) -> int:
            for _ in range(count):
                if len(next(generation)) != streams:
                    raise RuntimeError(f"not all of the {streams} streams take part in a step")
            return count

        # The first step is the prompts', all in one batch.
        advance(1 + warm)
        measured = [self.window(lambda: advance(steps)) for _ in range(windows)]
        for _ in generation:
            pass
        return measured

    def decode_after_prompt(self, warm: int, steps: int, prompt_tokens: int) -> Window:
        """`steps` decode steps of one stream that has run for `warm`. Just before them, where
        `prompt_tokens` is not 0, one of its steps also computes a new prompt of so many tokens.
        """
        settle = AHEAD  # until the step with the prompt, maybe scheduled late, is behind
        self.submit(self.prompt(16, seed=0), 1 + warm + settle + steps + AHEAD)
        generation = self.steps()

        def advance(count: int) -> int:
            return sum(1 for _ in itertools.islice(generation, count))

        advance(1 + warm)
        if prompt_tokens:
            self.submit(self.prompt(prompt_tokens, seed=1), 1)
        advance(settle)
        window = self.window(lambda: advance(steps))
        advance(AHEAD)
        return window

    def prefill(self, tokens: int, repeats: int) -> list[Window]:
        """One prompt of `tokens` at a time, to its first new token; one more run warms up."""
        measured = []
        for repeat in range(1 + repeats):
            self.submit(self.prompt(tokens, seed=1000 + repeat), max_tokens=1)
            measured.append(self.window(lambda: sum(1 for _ in self.steps())))
        return measured[1:]

    def generate(
        self, prompts: list[list[int]], max_tokens: int,
        interrupt: tuple[int, list[int]] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """The new tokens of each prompt, all served together.

        interrupt: after so many steps, this prompt joins them; its token comes last.
        """
        names = [self.submit(prompt, max_tokens) for prompt in prompts]
        tokens: dict[str, list[int]] = {}
        for number, output in enumerate(self.steps()):
            tokens.update(output)
            if interrupt and number == interrupt[0]:
                names.append(self.submit(interrupt[1], 1))
        return [tokens[name] for name in names]

    def batch(self, number: int, request: dict) -> list[list[int]]:
        """The new tokens for each of `request["prompts"]`, lengths of random prompts that
        `number` chooses: `max_tokens` each, and maybe an `interrupt` (step, length of a prompt
        that joins there)."""
        prompts = [
            self.prompt(length, seed=100 * number + i)
            for i, length in enumerate(request["prompts"])
        ]
        interrupt = request.get("interrupt")
        if interrupt:
            interrupt = interrupt[0], self.prompt(interrupt[1], seed=99)
        return self.generate(prompts, request["max_tokens"], interrupt)

    def close(self) -> None:
        """Gives back what the engine holds, so that this process can have another one."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()


def copy_bandwidth(repeats: int = 7) -> dict[str, float] | None:
    """GB/s of the copy engine for 1 GiB of pinned host memory to the device: median, min, max.

    None without a GPU. Its device memory is given back before it returns.
    """
    if not torch.cuda.is_available():
        return None
    source = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for _ in range(3 + repeats):
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(2**30 / start.elapsed_time(end) / 1e6)
    rates = sorted(rates[3:])
    del source, target
    torch.cuda.empty_cache()
    return {"median": rates[len(rates) // 2], "min": rates[0], "max": rates[-1]}
