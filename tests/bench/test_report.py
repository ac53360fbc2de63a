"""Figures made of measurements whose answer is known."""

import pytest

from bench import report

GIGABYTE_MS = 20.0  # at 50 GB/s


def task(name: str, ms: list[float], misses: int | None = None, steps: int = 10, **size) -> dict:
    counters = {} if misses is None else {"misses": misses * steps, "hits": 1}
    return {
        "name": name, **size,
        "windows": [
            {"seconds": value * steps / 1e3, "steps": steps, "counters": counters} for value in ms
        ],
    }  # fmt: skip


def run(*arms: tuple[str, dict]) -> dict:
    start = {"record_bytes": 10**9, "copy_gb_s": {"median": 50.0}}
    return {"arms": [{"name": name, "start": start, "tasks": [cell]} for name, cell in arms]}


@pytest.fixture
def decode() -> dict:
    return run(
        ("resident", task("decode-4", [2.0, 2.0, 3.0], streams=4)),
        ("uncached", task("decode-4", [200.0], streams=4)),
        ("cache-64", task("decode-4", [44.0, 45.0, 50.0], misses=2, streams=4)),
    )


def test_the_floor_is_the_resident_step_and_the_bytes_over_the_link(decode):
    cell = report.cells(decode)[2]
    assert cell.misses == 2
    assert cell.link_ms == pytest.approx(2 * GIGABYTE_MS)
    assert cell.floor_ms == pytest.approx(42)
    assert cell.over_floor.median == pytest.approx(45 / 42)
    assert cell.over_floor.high == pytest.approx(50 / 42)
    assert cell.over_longer == pytest.approx(45 / 40)


def test_rates_and_ratios_are_those_of_the_median(decode):
    cell = report.cells(decode)[2]
    assert cell.tokens_per_second == pytest.approx(4 / 0.045)
    assert cell.times_uncached == pytest.approx(200 / 45)
    assert cell.over_resident == pytest.approx(45 / 2)


def test_an_arm_without_a_cache_has_no_floor(decode):
    resident = report.cells(decode)[0]
    assert resident.over_resident == 1
    assert resident.floor_ms is None
    assert resident.misses is None


def test_a_cell_is_known_before_the_other_arms_are():
    cell = report.cells(run(("cache-8", task("prefill-512", [100.0], 3, 1, tokens=512))))[0]
    assert cell.tokens_per_second == pytest.approx(5120)
    assert cell.link_ms == pytest.approx(60)
    assert cell.floor_ms is cell.times_uncached is cell.over_resident is None


def test_device_time_is_compared_where_both_arms_have_it(decode):
    for arm, device_ms in zip(decode["arms"], (1.0, 190.0, 43.05)):
        for window in arm["tasks"][0]["windows"]:
            window["device_ms"] = device_ms
    cell = report.cells(decode)[2]
    assert cell.floor_ms == pytest.approx(1 + 40)
    assert cell.over_floor.median == pytest.approx(1.05)
    assert cell.over_resident == pytest.approx(43.05)
    # A rate is that of the whole step.
    assert cell.tokens_per_second == pytest.approx(4 / 0.045)

    del decode["arms"][0]["tasks"][0]["windows"][0]["device_ms"]
    assert report.cells(decode)[2].floor_ms == pytest.approx(2 + 40)


def test_every_row_has_the_columns_of_the_header(decode):
    columns = {line.count("|") for line in report.table(decode).splitlines()}
    assert columns == {len(report.HEADERS) + 1}
