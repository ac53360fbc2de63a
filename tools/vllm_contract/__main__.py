"""Checks in the sources of vLLM releases what the shim relies on.

Without further words: every release on the package index from 0.21.0 on, about 2 MB each, kept
in a cache folder. Exits with 1 if a fact differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from expert_cache_shim.versions import NEWEST_TRIED

from . import report, sources
from .contract import FACTS, examine_all


def main() -> int:
    arguments = _arguments()
    try:
        results = {v: examine_all(v, folder) for v, folder in _folders(arguments).items()}
    except sources.SourcesError as error:
        print(f"vllm_contract: {error}", file=sys.stderr)
        return 2
    print(report.table(FACTS, results))
    if arguments.places:
        _print_places(results)
    found = report.differences(results)
    print(f"\n{len(FACTS)} facts, {len(results)} releases, {len(found)} differences")
    print("".join(f"  {line}\n" for line in found), end="")
    newest = list(results)[-1]
    if arguments.write:
        report.write(
            {
                "releases": report.releases_table(FACTS, results),
                "facts": report.facts_table(results[newest]),
            }
        )
        if newest != NEWEST_TRIED:
            print(f"Now set NEWEST_TRIED in expert_cache_shim/versions.py to {newest!r}.")
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_contract", description=__doc__)
    parser.add_argument("releases", nargs="*", help="only these, for example 0.25.1")
    parser.add_argument("--sources", type=Path, help="a folder of unpacked wheels, no index")
    parser.add_argument("--cache", type=Path, default=sources.default_cache())
    parser.add_argument(
        "--everything", action="store_true", help="all Python files, 6 to 12 MB a release"
    )
    parser.add_argument(
        "--whole-wheels", action="store_true",
        help="transfer whole wheels, 250 to 400 MB each, where an index serves no parts",
    )  # fmt: skip
    parser.add_argument("--places", action="store_true", help="file and line of every fact")
    parser.add_argument("--write", action="store_true", help="write docs/compatibility.md")
    arguments = parser.parse_args()
    if arguments.write and (arguments.sources or arguments.releases):
        parser.error("--write is for all releases of the index")
    return arguments


def _folders(arguments: argparse.Namespace) -> dict[str, Path]:
    """The sources of every release asked for. Raises SourcesError."""
    if arguments.sources:
        found = sources.unpacked(arguments.sources)
        wanted = arguments.releases or list(found)
        missing = [version for version in wanted if version not in found]
        if missing:
            raise sources.SourcesError(f"{arguments.sources} has no {', '.join(missing)}")
        return {version: found[version] for version in wanted}
    return {
        version: sources.fetched(
            version, arguments.cache, arguments.everything, arguments.whole_wheels
        )
        for version in arguments.releases or sources.listed()
    }


def _print_places(results: report.Results) -> None:
    for version, found in results.items():
        for result in found:
            print(f"\n{version}: {result.fact.name}: {result.status}")
            print("".join(f"  {place}\n" for place in result.places or (result.reason,)), end="")


if __name__ == "__main__":
    sys.exit(main())
