"""Takes single files out of wheels that lie on a package index, with pip's own means.

pip knows the index, its proxies, certificates and credentials, and can read a wheel piecewise
by range requests. All of that is private to pip, so this file runs in a process of its own:

    python -m tools.vllm_contract.fetch list
    python -m tools.vllm_contract.fetch get FOLDER VERSION...

`list` prints a JSON object that maps the versions to wheels' names. `get` unpacks what the
contract reads (`SELECTION`) to FOLDER/VERSION.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from .sources import EVERYTHING, SELECTION, mark_complete, selected

# Files whose distance in the wheel is smaller are read by one request.
GAP = 64 * 1024
PIECE = 64 * 1024


class Index:
    """The wheels of one distribution, as pip would find them for this machine."""

    def __init__(self, distribution: str, session: object, finder: object) -> None:
        self._session = session
        self.links = {}
        found = finder.find_all_candidates(distribution)
        for candidate in sorted(found, key=lambda c: c.link.filename):
            # Of several builds of one version any will do: they differ in binaries.
            if candidate.link.is_wheel and not candidate.version.is_prerelease:
                self.links[str(candidate.version)] = candidate.link

    def open(self, version: str) -> ZipFile:
        """A wheel whose parts are transferred when they are read. Raises
        HTTPRangeRequestUnsupported."""
        from pip._internal.network.lazy_wheel import LazyZipOverHTTP

        link = self.links[version]
        if link.is_file:
            return ZipFile(link.file_path)
        return ZipFile(LazyZipOverHTTP(link.url_without_fragment, self._session, PIECE))


def unpack(wheel: ZipFile, wanted: list[ZipInfo], folder: Path) -> None:
    """Files that lie close together in the wheel are transferred at once, into a sparse copy of
    it that has nothing but them: reading them one by one would ask the index for each."""
    starts = sorted(info.header_offset for info in wheel.infolist())
    ends = dict(zip(starts, [*starts[1:], wheel.start_dir]))
    spans = [(info.header_offset, ends[info.header_offset]) for info in wanted]
    with tempfile.TemporaryFile() as copy:
        for start, end in [*_runs(spans), (wheel.start_dir, wheel.fp.seek(0, os.SEEK_END))]:
            wheel.fp.seek(start)
            copy.seek(start)
            copy.write(wheel.fp.read(end - start))
        with ZipFile(copy) as local:
            local.extractall(folder, wanted)


def _runs(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Joins spans whose distance is below GAP."""
    run: tuple[int, int] | None = None
    for start, end in sorted(spans):
        if run is not None and start - run[1] < GAP:
            run = run[0], max(run[1], end)
            continue
        if run is not None:
            yield run
        run = start, end
    if run is not None:
        yield run


def whole_wheel(distribution: str, version: str, folder: Path) -> ZipFile:
    command = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run([sys.executable, "-m", "pip", *command, f"{distribution}=={version}"])
    if done.returncode:
        raise SystemExit(f"pip cannot download {distribution} {version}")
    (path,) = folder.glob("*.whl")
    return ZipFile(path)


def get(index: Index, arguments: argparse.Namespace) -> None:
    from pip._internal.network.lazy_wheel import HTTPRangeRequestUnsupported

    for version in arguments.versions:
        if version not in index.links:
            raise SystemExit(f"the index has no wheel of {arguments.distribution} {version}")
        target = arguments.folder / version
        shutil.rmtree(target, ignore_errors=True)
        with tempfile.TemporaryDirectory() as temporary:
            try:
                wheel = index.open(version)
            except HTTPRangeRequestUnsupported:
                if not arguments.whole_wheels:
                    raise SystemExit(
                        "the index does not serve parts of a wheel; --whole-wheels transfers "
                        "all of it, 250 to 400 MB a release"
                    ) from None
                wheel = whole_wheel(arguments.distribution, version, Path(temporary))
            prefixes = EVERYTHING if arguments.everything else SELECTION
            wanted = [i for i in wheel.infolist() if selected(i.filename, prefixes)]
            unpack(wheel, wanted, target)
        mark_complete(target, arguments.everything)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_contract.fetch")
    parser.add_argument("--distribution", default="vllm")
    parser.add_argument("--everything", action="store_true")
    parser.add_argument("--whole-wheels", action="store_true")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    getting = commands.add_parser("get")
    getting.add_argument("folder", type=Path)
    getting.add_argument("versions", nargs="+")
    arguments = parser.parse_args()
    try:
        from pip._internal.commands import create_command
    except ImportError:
        raise SystemExit(f"{sys.executable} has no pip, which finds the index") from None
    pip = create_command("download")
    options, _ = pip.parse_args(["--retries=1", "--timeout=15", "--quiet", "--quiet"])
    with pip.main_context():
        session = pip.get_default_session(options)
        finder = pip._build_package_finder(options, session, ignore_requires_python=True)
        index = Index(arguments.distribution, session, finder)
        if arguments.command == "get":
            get(index, arguments)
        else:
            print(json.dumps({v: link.filename for v, link in index.links.items()}))


if __name__ == "__main__":
    main()
