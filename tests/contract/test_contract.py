"""The oldest and the newest release that were tried have what the shim relies on.

Their sources come from the package index, about 2 MB each, and stay in a cache folder.
"""

from __future__ import annotations

import pytest
from releases import emptied

from expert_cache_shim.versions import NEWEST_TRIED, OLDEST_TRIED
from tools.vllm_contract import report
from tools.vllm_contract.contract import FACTS, examine_all
from tools.vllm_contract.facts import ABSENT, DIFFERS, OK, examine
from tools.vllm_contract.reading import Release
from tools.vllm_contract.sources import SourcesError, default_cache, fetched, listed
from tools.vllm_contract.sources import release as numbers

RUN = "run `make contract`"


def folder_of(version: str):
    try:
        return fetched(version, default_cache())
    except SourcesError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def results() -> dict:
    return {v: examine_all(v, folder_of(v)) for v in (OLDEST_TRIED, NEWEST_TRIED)}


@pytest.mark.parametrize("version", [OLDEST_TRIED, NEWEST_TRIED])
def test_every_fact_is_as_stated(results, version):
    assert report.differences({version: results[version]}) == []
    assert {r.status for r in results[version]} == {OK, ABSENT}


@pytest.mark.parametrize("version", [OLDEST_TRIED, NEWEST_TRIED])
def test_the_documented_row_is_what_the_sources_say(results, version):
    row = f"| {' | '.join(report.release_row(version, results[version]))} |\n"
    assert row in report.committed("releases"), RUN


def test_the_documented_facts_are_those_that_are_checked_and_lie_where_they_say(results):
    assert report.committed("facts") == report.facts_table(results[NEWEST_TRIED]), RUN


def test_the_documented_releases_reach_from_the_oldest_to_the_newest_tried():
    rows = report.committed("releases").splitlines()[2:]
    versions = [row.split(" | ")[0].strip("| ") for row in rows]
    assert (versions[0], versions[-1]) == (OLDEST_TRIED, NEWEST_TRIED)
    assert versions == sorted(versions, key=numbers)


def test_no_documented_release_differs():
    assert DIFFERS not in report.committed("releases")


def test_a_release_that_is_newer_than_those_tried_is_reported():
    try:
        newest = listed()[-1]
    except SourcesError as error:
        pytest.skip(str(error))
    if numbers(newest) > numbers(NEWEST_TRIED):
        found = report.differences({newest: examine_all(newest, folder_of(newest))})
        pytest.skip(f"vLLM {newest} is out and not in the table: {RUN}; differences: {found}")


def test_control_a_fact_differs_where_its_files_say_nothing(results):
    """Each fact in turn: without the content of the files that it was found in."""
    original = Release(NEWEST_TRIED, folder_of(NEWEST_TRIED))
    list(original.sources())
    unmoved = []
    for fact, result in zip(FACTS, results[NEWEST_TRIED]):
        if result.status == OK:
            names = {place.rsplit(":", 1)[0] for place in result.places}
            if examine(fact, emptied(original, names)).status != DIFFERS:
                unmoved.append(fact.name)
    assert unmoved == []


def test_control_facts_with_a_first_or_a_last_release_are_absent_outside_of_them(results):
    bounded = {fact.name for fact in FACTS if fact.stated != "all"}
    for version, found in results.items():
        absent = {result.fact.name for result in found if result.status == ABSENT}
        assert absent == {f.name for f in FACTS if not f.expected(version)}
        assert absent <= bounded
