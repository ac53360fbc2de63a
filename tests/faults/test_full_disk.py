"""No room for the snapshot, for real: the model serves, and no part of a file stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic.checks import assert_same, model_of, outputs

pytest_plugins = ["synthetic.fixtures"]

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def limit(what: int, value: int):
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def test_files_may_not_grow(arm, library, tmp_path, caplog):
    """The limit is on memory files too, so there is no virtual storage either."""
    model, uncached = model_of(), model_of()
    with limit(resource.RLIMIT_FSIZE, 1000):
        report = arm(model)
    assert [armed.cache.storage.kind for armed in report.armed] == ["plain", "plain"]
    assert report.snapshot is None
    assert f"no counter snapshot in {tmp_path / 'snapshots'} ([Errno 27]" in caplog.text
    assert list((tmp_path / "snapshots").iterdir()) == []
    assert_same(outputs(model), outputs(uncached))
    assert report.steps() == 6
    assert library.all_is_freed()


def descriptors_but(spare: int) -> int:
    """The limit under which so many more files can be opened, however many are open."""
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = (number for number in itertools.count() if number not in taken)
    return next(itertools.islice(free, spare, None))


@pytest.mark.parametrize("spare", range(24))
def test_files_may_not_be_opened(arm, library, tmp_path, spare):
    """With this many descriptors left; the fewest do not suffice for the proof of virtual
    storage, more for one layer, yet more for all and the snapshot."""
    model, uncached = model_of(), model_of()
    with limit(resource.RLIMIT_NOFILE, descriptors_but(spare)):
        report = arm(model)
    assert len(report.armed) + len(report.refused) == 2
    assert_same(outputs(model), outputs(uncached))
    del model, report
    assert library.all_is_freed()


WRITER = """
import errno, sys
from pathlib import Path
from expert_cache_shim import telemetry

folder = Path(sys.argv[1])
layers = [{"name": "x" * 100}] * int(sys.argv[2])
file = telemetry.open_snapshot(str(folder), "model", 0, layers)
print("none" if file is None else file.size, len(list(folder.iterdir())))
"""


@pytest.mark.parametrize("layers, said", [(200, "none 0\n"), (1, "4168 1\n")])
def test_a_disk_of_a_few_pages(tmp_path, layers, said):
    mount = 'mount -t tmpfs -o size=16k none "$1" && shift && exec "$@"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh", str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system of its own")
    done = subprocess.run(
        [*command, sys.executable, "-c", WRITER, str(tmp_path), str(layers)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == said, done.stderr
