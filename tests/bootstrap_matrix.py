"""The ways to start Python, and in which of them the shim starts: the table of docs/install.md.

    python tests/bootstrap_matrix.py

runs every way on every Python from 3.10 on that is found here, and writes the table.
`test_bootstrap_matrix.py` compares the table with what each Python does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from packages import call_backend, can_build_wheels, copy_project, pip
from start_up import (
    ROOT,
    SAYS_REGISTERED,
    Interpreter,
    find_python,
    make_venv,
    put_shim_for_pythonpath,
    put_shim_in_site_packages,
    put_vllm,
)

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
DOCUMENT = ROOT / "docs" / "install.md"
PLACE = re.compile(r"(?<=<!-- ways to start -->\n)(?:\|.*\n)*\n.*\n")
COLUMNS = ("installed (`.pth`)", "`PYTHONPATH`")
HEAD = ("Python is started", *COLUMNS, "if not")
SITECUSTOMIZE = "sitecustomize.py"


@dataclass
class Start:
    """One Python that has the shim in one of the two ways, and a folder for what a way needs."""

    version: str
    installed: bool  # else on PYTHONPATH
    folder: Path

    @cached_property
    def vllm(self) -> Path:
        return put_vllm(self.folder / "vllm")

    @cached_property
    def path(self) -> list[Path]:
        """PYTHONPATH as far as the shim needs it."""
        return [] if self.installed else [put_shim_for_pythonpath(self.folder / "shim")]

    @property
    def imports_vllm(self) -> str:
        return f"import sys; sys.path.append({str(self.vllm)!r}); import vllm"

    def python(self, *options: str) -> Interpreter:
        python = make_venv(self.version, self.folder / "venv", "--without-pip", *options)
        return put_shim_in_site_packages(python) if self.installed else python

    def script(self, text: str) -> str:
        (self.folder / "main.py").write_text(text)
        return str(self.folder / "main.py")


@dataclass(frozen=True)
class Way:
    """`run` gives what a Python prints that imports a package named vllm: that package, before it
    "registered" where the shim has started, and "other" for another sitecustomize."""

    name: str
    run: Callable[[Start], str]
    remedy: str = ""
    only_installed: bool = False
    since: str = "3.10"

    def starts(self, version: str, installed: bool, folder: Path) -> str:
        """What the table says: "yes", "no", or "n/a" where the way has no meaning."""
        if not installed and self.only_installed:
            return "n/a"
        said = self.run(Start(version, installed, folder)).split()
        assert "vllm" in said and said.count("registered") <= 1, said
        return "yes" if "registered" in said else "no"


def with_flags(*flags: str, options: tuple[str, ...] = ()) -> Callable[[Start], str]:
    return lambda start: start.python(*options).says(start.imports_vllm, *flags, path=start.path)


def in_user_site(*flags: str) -> Callable[[Start], str]:
    def run(start: Start) -> str:
        folder = start.folder / "lib" / f"python{start.version}" / "site-packages"
        folder.mkdir(parents=True)
        python = put_shim_in_site_packages(Interpreter(find_python(start.version), folder))
        return python.says(start.imports_vllm, *flags, PYTHONUSERBASE=str(start.folder))

    return run


def by_editable_install(start: Start) -> str:
    if not can_build_wheels():
        pytest.skip("needs pip and setuptools")
    project = copy_project(start.folder / "project")
    (project / "expert_cache_shim" / "hooks.py").write_text(SAYS_REGISTERED)
    python = make_venv(start.version, start.folder / "venv", "--without-pip")
    wheel = call_backend(project, "editable", start.folder / "out")
    pip(python, "install", "--no-deps", "--no-index", wheel)
    return python.says(start.imports_vllm)


def by_uv(start: Start) -> str:
    uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed (pip install uv)")
    python = start.python().executable
    command = [uv, "run", "--no-project", "--offline", "--python", python, "python", "-c"]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(start.folder)}
    environ |= {"PYTHONPATH": str(start.path[0])} if start.path else {}
    done = subprocess.run([*command, start.imports_vllm], env=environ, cwd=start.folder,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def beside_another_sitecustomize(first: bool) -> Callable[[Start], str]:
    def run(start: Start) -> str:
        other = start.folder / "other"
        other.mkdir()
        (other / SITECUSTOMIZE).write_text("print('other')")
        path = [other, *start.path] if first else [*start.path, other]
        said = start.python().says(start.imports_vllm, path=path)
        assert "other" in said.split(), said
        return said

    return run


def after_vllm(start: Start) -> str:
    python = start.python()
    (python.site_packages / "a_first.pth").write_text(f"{start.imports_vllm}\n")
    said = python.says("", path=start.path)
    assert said.startswith("vllm"), said
    return said


def in_forked_child(start: Start) -> str:
    code = f"""
import os, sys
if os.fork() == 0:
    {start.imports_vllm}
    sys.stdout.flush()
    os._exit(0)
os.wait()
assert "vllm" not in sys.modules
"""
    return start.python().says(code, path=start.path)


def in_spawned_child(*flags: str) -> Callable[[Start], str]:
    def run(start: Start) -> str:
        script = start.script(
            f"""
import multiprocessing, sys
def child():
    {start.imports_vllm}
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0 and "vllm" not in sys.modules
"""
        )
        outcome = start.python().run(*flags, script, path=start.path)
        assert (outcome.status, outcome.err) == (0, ""), outcome
        return outcome.out

    return run


INSTALL = "install it"
WAYS = (
    Way("in a virtual environment", with_flags()),
    Way("in one that sees the system's packages", with_flags(options=("--system-site-packages",))),
    Way("by `uv run`", by_uv),
    Way("after `pip install -e`", by_editable_install, only_installed=True),
    Way("after `pip install --user`", in_user_site(), only_installed=True),
    Way("the same, with `-s`", in_user_site("-s"), "install it without `--user`", True),
    Way("with `-s`", with_flags("-s")),
    Way("with `-P`", with_flags("-P"), since="3.11"),
    Way("with `-B`", with_flags("-B")),
    Way("with `-E`", with_flags("-E"), INSTALL),
    Way("with `-I`", with_flags("-I"), INSTALL),
    Way("with `-S`", with_flags("-S"), "start it without `-S`"),
    Way("with another `sitecustomize` after ours", beside_another_sitecustomize(first=False)),
    Way(
        "with another `sitecustomize` before ours", beside_another_sitecustomize(first=True),
        "put the shim's folder first, or install it",
    ),
    Way("and another `.pth` has imported vLLM", after_vllm),
    Way("as a forked child", in_forked_child),
    Way("as a spawned child", in_spawned_child()),
    Way("as a spawned child of `-I`", in_spawned_child("-I"), INSTALL),
)  # fmt: skip


def seen(way: Way, version: str, folder: Path) -> tuple[str, str]:
    """What the two columns are on one Python; skips the ways that it does not have."""
    find_python(version)
    if tuple(map(int, version.split("."))) < tuple(map(int, way.since.split("."))):
        pytest.skip(f"new in Python {way.since}")
    folders = folder / "installed", folder / "path"
    for each in folders:
        each.mkdir(parents=True)
    return way.starts(version, True, folders[0]), way.starts(version, False, folders[1])


def row(way: Way, cells: tuple[str, str]) -> tuple[str, ...]:
    return (way.name, *cells, way.remedy if "no" in cells else "")


def found_versions() -> Iterator[str]:
    for version in VERSIONS:
        try:
            find_python(version)
        except pytest.skip.Exception:
            continue
        yield version


def table(folder: Path) -> str:
    """The table, and the sentence below it. AssertionError where two Pythons differ."""
    rows, versions = [HEAD, ("---",) * len(HEAD)], list(found_versions())
    for way in WAYS:
        found = {}
        for version in versions:
            try:
                found[version] = seen(way, version, folder / f"{len(rows)}-{version}")
            except pytest.skip.Exception as skipped:
                print(f"{way.name}, Python {version}: {skipped}")
        assert len(set(found.values())) == 1, f"{way.name}: {found}"
        rows.append(row(way, next(iter(found.values()))))
    lines = [f"| {' | '.join(cells)} |".replace("  |", " |") for cells in rows]
    return "\n".join([*lines, "", f"Seen on Python {', '.join(versions)}.\n"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        text = table(Path(name))
    DOCUMENT.write_text(PLACE.sub(lambda _: text, DOCUMENT.read_text(), count=1))
    print(text)
