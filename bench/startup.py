"""What the shim costs a Python that never imports vLLM.

    python -m bench.startup

Two routes, the `.pth` of an installed package and `sitecustomize.py` on PYTHONPATH, each against
the same interpreter without them, in turn. Printed are the shim's own lines of `-X importtime`,
which is the time inside its modules, and the difference of whole start-ups, which is noisier. Run
it on a quiet machine, with bytecode written (PYTHONDONTWRITEBYTECODE unset).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from .report import Spread

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s*(\S+)$")
FORBIDDEN = ("torch", "wrapt", "numpy")


def start(python: Path, environment: dict[str, str], *flags: str) -> tuple[float, str]:
    """Milliseconds of `python -c pass` as a whole process, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run(
        [python, *flags, "-c", "pass"], env=environment, capture_output=True, text=True, check=True
    )
    return 1e3 * (time.perf_counter() - began), done.stderr


def own_microseconds(python: Path, environment: dict[str, str]) -> int:
    """Time inside our modules. Raises SystemExit if one of FORBIDDEN was imported."""
    _, lines = start(python, environment, "-X", "importtime")
    names = [line.rsplit("|", 1)[-1].strip() for line in lines.splitlines()]
    for name in FORBIDDEN:
        if name in names:
            raise SystemExit(f"{name} was imported at start")
    # A sitecustomize is ours on one route only; it runs the one that it shadows.
    ours = ("expert_cache_shim", "sitecustomize") if "PYTHONPATH" in environment else (
        "expert_cache_shim",
    )  # fmt: skip
    found = map(LINE.match, lines.splitlines())
    return sum(int(line[1]) for line in found if line and line[2].startswith(ours))


def make_environments(folder: Path) -> dict[str, tuple[Path, dict[str, str]]]:
    """An interpreter without the shim, and one for each route."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "EXPERT_CACHE_"))}
    routes = {}
    for name in ("bare", "pth"):
        venv.create(folder / name, symlinks=True)
        routes[name] = (folder / name / "bin" / "python", clean)
    site = next((folder / "pth" / "lib").glob("python*/site-packages"))
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "expert_cache_shim", site / "expert_cache_shim", ignore=ignore)
    shutil.copy(ROOT / "expert_cache_shim.pth", site)
    routes["PYTHONPATH"] = (routes["bare"][0], {**clean, "PYTHONPATH": str(ROOT)})
    return routes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40, help="default: %(default)s")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as temporary:
        routes = make_environments(Path(temporary))
        for route in routes.values():
            start(*route)  # writes the bytecode
        whole: dict[str, list[float]] = {name: [] for name in routes}
        for _ in range(runs):
            for name, route in routes.items():
                whole[name].append(start(*route)[0])
        print(f"Python {sys.version.split()[0]}, {runs} runs, median (min-max)")
        for name, route in routes.items():
            own = Spread.of([own_microseconds(*route) for _ in range(runs)])
            all_ = Spread.of(whole[name])
            print(
                f"{name:10}  ours {own.median:4.0f} us ({own.low:.0f}-{own.high:.0f})   "
                f"whole start {all_.median:.1f} ms ({all_.low:.1f}-{all_.high:.1f})"
            )


if __name__ == "__main__":
    main()
