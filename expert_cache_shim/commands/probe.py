"""What can only be found out by doing it, in a process that may die of it.

A damaged library or a broken driver can kill a process. `probe` runs its steps in another one and
reads what each found; a step that began and has no result is the one that the process died in.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LINK_BYTES = 2**30
_ROOT = Path(__file__).resolve().parents[2]
# This package and no other copy of it, while its folder stays out of the way of other imports.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import expert_cache_shim; del sys.path[0]; "
    "from expert_cache_shim.commands.probe import main; main(*sys.argv[2:])"
)
TIMEOUT = 300  # seconds; a first import of PyTorch from a cold disk can take one minute


def probe(
    steps: list[str], backend: str, file: Path, words: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Runs steps of "torch", "shim", "vllm", "library", "virtual", "link" and "arguments" in this
    order; `words` are those that the last one reads.

    Returns what each step found; {"error": one line} where it failed or was not reached.
    """
    command = [sys.executable, "-c", _CODE, str(_ROOT), ",".join(steps), backend, str(file), *words]
    # The hooks have no part in this, and must not speak in it.
    environ = os.environ | {"EXPERT_CACHE_DISABLE": "1"}
    ended = f"it took more than {TIMEOUT} s"
    try:
        # Nothing is imported from the root folder, as it would be from the current one.
        done = subprocess.run(command, env=environ, cwd="/", capture_output=True, timeout=TIMEOUT)
        said, ended = done.stdout, _how_it_ended(done)
    except subprocess.TimeoutExpired as expired:
        said = expired.stdout or b""
    results = [json.loads(line) for line in said.splitlines()]
    found: dict[str, dict[str, Any]] = {}
    for step in steps:
        found[step] = {"error": f"not tried: the process ended before it, {ended}"}
    for result in results:
        step = result.pop("step")
        found[step] = result or {"error": f"the process ended in it: {ended}"}
    return found


def _how_it_ended(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}"
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return f"status {done.returncode}{': ' if last else ''}{''.join(last)}"


def main(steps: str, backend: str, file: str, *words: str) -> None:
    """The other process: a line of JSON when a step begins, another with what it found."""
    # Only results go to the parent: PyTorch and drivers may print.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    state: dict[str, Any] = {"backend": backend, "file": file, "words": words}
    for step in steps.split(","):
        print(json.dumps({"step": step}), file=results)
        try:
            found = _STEPS[step](state)
        except Exception as error:
            found = {"error": " ".join(f"{error or type(error).__name__}".split())}
        print(json.dumps({"step": step} | found), file=results)
    results.flush()
    os._exit(0)  # what was found stands, whatever a driver does at exit


def _torch(state: dict[str, Any]) -> dict[str, Any]:
    import torch

    state["torch"] = torch
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
        gpus.append(
            {
                "name": properties.name,
                "architecture": architecture or f"sm_{properties.major}{properties.minor}",
                "bytes": properties.total_memory,
            }
        )
    state["gpus"] = gpus
    return {"version": torch.__version__, "gpus": gpus}


def _shim(state: dict[str, Any]) -> dict[str, Any]:
    import wrapt

    from expert_cache_shim import hooks  # noqa: F401

    if "torch" in state:
        from expert_cache_shim import arming  # noqa: F401
    return {"wrapt": wrapt.__version__}


def _vllm(state: dict[str, Any]) -> dict[str, Any]:
    import vllm

    return {"version": str(vllm.__version__)}


def _library(state: dict[str, Any]) -> dict[str, Any]:
    from expert_cache_shim import native

    library = state["library"] = native.load(state["backend"], state["file"])
    unfit = ""
    try:
        for gpu in state.get("gpus", []):
            library.check_architecture(gpu["architecture"])
    except native.LibraryError as error:
        unfit = str(error)
    return {
        "abi": native.ABI_VERSION,
        "architectures": " ".join(library.architectures),
        "unfit": unfit,
    }


def _virtual(state: dict[str, Any]) -> dict[str, Any]:
    from expert_cache_shim.storage import Allocator

    library, torch = _needed(state, "library"), _needed(state, "torch")
    kind = "cpu" if library.backend == "host" else "cuda"
    with contextlib.ExitStack() as stack:
        if kind == "cuda":
            stack.enter_context(torch.cuda.device(0))
            torch.zeros(1, device="cuda")  # the context that the library's calls run in
        Allocator(library, torch.device(kind, 0)).prove_virtual()
    return {"granularity": library.granularity(0)}


def _link(state: dict[str, Any]) -> dict[str, Any]:
    torch = _needed(state, "torch")
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    seconds = []
    for _ in range(4):  # the first one warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return {"bytes": LINK_BYTES, "seconds": min(seconds[1:])}


def _arguments(state: dict[str, Any]) -> dict[str, Any]:
    from expert_cache_shim import vllm_compat

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = vllm_compat.parse_command_line(state["words"])
    except SystemExit:
        lines = said.getvalue().strip().splitlines() or ["vLLM's parser ended"]
        raise RuntimeError(lines[-1]) from None
    return {
        name: sorted(value) if isinstance(value, (set, frozenset)) else value
        for name, value in vars(parsed).items()
        if isinstance(value, (str, int, float, bool, list, set, frozenset, type(None)))
    }


def _needed(state: dict[str, Any], name: str) -> Any:
    if name not in state:
        raise RuntimeError(f"not tried, for want of the {name}")
    return state[name]


_STEPS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "torch": _torch,
    "shim": _shim,
    "vllm": _vllm,
    "library": _library,
    "virtual": _virtual,
    "link": _link,
    "arguments": _arguments,
}
