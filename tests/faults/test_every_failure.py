"""Whatever a model's arming asks for is refused once, call by call: the model serves the same
output, armed as far as it could be, and keeps nothing when it goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from held import Held
from injection import LibraryCalls, SystemCalls, TorchOperations
from synthetic import methods
from synthetic.checks import assert_same, model_of, outputs
from synthetic.counted_library import CountedLibrary

from expert_cache_shim import arming, native
from expert_cache_shim.native import Manage

pytest_plugins = ["synthetic.fixtures"]

WAYS = {
    "operation": lambda library: TorchOperations(),
    "library call": LibraryCalls,
    "system call": SystemCalls,
}


@pytest.fixture(scope="module")
def failing_library_path(build_host_library, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("failing") / "failing.so"
    build_host_library(path, "-include", Path(__file__).with_name("failing_calls.h"))
    return path


@pytest.fixture
def library(failing_library_path, monkeypatch) -> CountedLibrary:
    """In place of the fixture of that name: the library whose system calls can fail."""
    counted = CountedLibrary(native.load("host", failing_library_path))
    monkeypatch.setattr(native, "load", lambda backend, path=None: counted)
    return counted


@pytest.fixture
def emulator(library):
    """Gives the emulator the stacks that it will need: they come from the same mmap."""
    experts = 1024
    state = torch.zeros(native.state_words(experts), dtype=torch.int32)
    state[8 : 8 + 2 * experts] = -1
    counters, ids = torch.zeros(8, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int32)
    library.manage(Manage(
        ids=ids.data_ptr(), row_ids=ids.data_ptr() + 4, id_rows=1, id_columns=1, id_row_stride=1,
        id_column_stride=1, state=state.data_ptr(), counters=counters.data_ptr(), experts=experts,
        slots=1, policy=1,
    ))  # fmt: skip


def two_layers():
    """A layer whose tensors all get rows of their own, and one with large ones too."""
    return model_of(methods.Int8ChannelMoEMethod, methods.Bfloat16MoEMethod)


def take_snapshots(folder: Path) -> int:
    """Removes the snapshot files of a folder; how many there were."""
    files = list(folder.iterdir()) if folder.exists() else []
    for file in files:
        file.unlink()
    return len(files)


@pytest.mark.parametrize(
    ("way", "storage"),
    [
        ("operation", "virtual"),
        ("operation", "plain"),
        ("library call", "virtual"),
        ("library call", "plain"),
        ("system call", "virtual"),  # plain makes none
    ],
)
def test_the_model_serves_and_nothing_is_kept(
    arm, settings, library, emulator, discarded_log, tmp_path, way, storage
):
    folder = tmp_path / "snapshots"
    settings(storage=storage)
    injection = WAYS[way](library)
    expected = outputs(two_layers())
    calls = injection.count(lambda: arm(two_layers()))
    take_snapshots(folder)
    before = Held.now(library)
    hurt = set()
    for number in range(calls):
        model = two_layers()
        with injection.failing(number):
            report = arm(model)
        armed = len(report.armed)
        if armed < len(model.routed):
            hurt.add(number)
        assert_same(outputs(model), expected)
        snapshots = take_snapshots(folder)
        assert snapshots <= (armed > 0), f"{way} {number}: a snapshot, and nothing armed"
        del model, report
        assert Held.now(library) == before, f"{way} {number}"
    # The control: failures did reach what arming needs. The others met the search for leaks, the
    # proof of virtual storage or a question with a second answer.
    assert len(hurt) > calls / 2


def test_a_model_of_which_nothing_could_be_armed_leaves_no_snapshot(arm, tmp_path, monkeypatch):
    monkeypatch.setattr(arming, "ExpertCache", lambda *arguments: 1 // 0)
    report = arm(two_layers())
    assert (len(report.armed), len(report.refused)) == (0, 2)
    assert take_snapshots(tmp_path / "snapshots") == 0
