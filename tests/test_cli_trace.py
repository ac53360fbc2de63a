"""`expert-cache trace`, as a user types it, on recorded routing."""

import base64
import functools
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from expert_cache_shim import cli, trace
from expert_cache_shim.mapped_file import MappedFile
from expert_cache_shim.policy import Reference
from expert_cache_shim.processes import lineage
from expert_cache_shim.trace_ring import MAGIC, SUFFIX, Layout

DATA = Path(__file__).parents[1] / "bench" / "data"
OLMOE = str(DATA / "olmoe.npz")

pytest.importorskip("rich")


@pytest.fixture
def call(capsys, monkeypatch):
    """Runs `expert-cache trace WORDS` on a wide terminal without colours."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words):
        status = cli.main(["trace", *map(str, words)])
        return status, *capsys.readouterr()

    return run


def test_info_says_what_a_trace_holds(call):
    status, said, _ = call("info", OLMOE)
    assert status == 0
    words = [re.split(r"\s{2,}", line.strip()) for line in said.splitlines()]
    for row in (["model", "OLMoE"], ["forward passes", "897"], ["experts a token", "8"]):
        assert row in words


def test_info_for_scripts(call):
    status, said, _ = call("info", OLMOE, DATA / "gpt_oss_20b.npz", "--json")
    first, second = json.loads(said)
    assert (status, first["layers"], second["prompts"]) == (0, 16, 10)
    # Uneven, but not by much: a quarter of the experts takes more than a quarter of the routing.
    assert 0.25 < first["to the busiest quarter"] < 0.5


def test_replay_counts_what_the_reference_counts(call):
    status, said, _ = call(
        "replay", OLMOE, "--steps", 60, "--slots", "1/4,20", "--policy", "lru,lrfu", "--policy",
        "lfu", "--half-life", 8, "--decay", 16, "--json",
    )  # fmt: skip
    assert status == 0
    found = {counts["policy"]: counts for counts in json.loads(said)}
    assert list(found) == ["lru", "lrfu", "lfu"]
    ids = trace.load(OLMOE).ids[:60]
    for policy, decay in (("lru", 0), ("lrfu", round(65536 * 0.5 ** (1 / 8))), ("lfu", 16)):
        cache = Reference(64, 16, policy, decay)
        for token in ids[:, 5]:
            cache.step(token)
        assert found[policy]["slots"] == [16, 20]
        assert found[policy]["misses_by_layer"][0][5] == cache.counters["misses"]
        assert found[policy]["routed"] == 60 * 16 * 8


def test_replay_shows_every_policy_on_one_line(call):
    status, said, _ = call("replay", OLMOE, "--steps", "40")
    rows = [line.split() for line in said.splitlines() if line.strip()]
    assert status == 0
    assert rows[1] == ["misses,", "%", *(f"S={64 * i // 16}" for i in (1, 2, 3, 4, 6, 8, 10, 12))]
    assert [row[0] for row in rows[3:]] == ["lrfu", "lru", "lfu", "fifo", "slru", "opt"]
    assert all(len(row) == 9 for row in rows[3:])


def test_replay_of_a_control(call):
    status, said, _ = call(
        "replay", OLMOE, "--control", "uniform", "--slots", "1/2", "--policy", "lrfu", "--json"
    )
    (counts,) = json.loads(said)
    assert (status, counts["control"]) == (0, "uniform")
    assert counts["miss_rate"] == [pytest.approx(0.5, abs=0.01)]


@pytest.mark.parametrize(
    "words, message",
    [
        (["info", "none.npz"], "trace info: none.npz: No such file or directory"),
        (["replay", "."], "trace replay: .: not a regular file"),
        (["replay", __file__], f"trace replay: {__file__}: is not a routing trace: File is not a "
                               "zip file"),
        (["replay", OLMOE, "--slots", "64"],
         "trace replay: --slots 64: is 64 slots of 64 experts, allowed is 1 to 63"),
        (["replay", OLMOE, "--slots", "1/0"],
         "trace replay: --slots 1/0: allowed is a number or a share as 1/4"),
        (["replay", OLMOE, "--slots", "many"],
         "trace replay: --slots many: allowed is a number or a share as 1/4"),
        (["replay", OLMOE, "--policy", "mru"],
         "trace replay: --policy mru: allowed is one of lrfu, lru, lfu, fifo, slru, opt"),
        (["replay", OLMOE, "--half-life", "0"],
         "trace replay: half-life is 0.0 steps; it must be above 0"),
        (["replay", OLMOE, "--steps", "-1"],
         "trace replay: --steps -1: allowed is a number above 0"),
        (["replay", OLMOE, "--control", "none"],
         "trace replay: --control none: allowed is one of uniform, shuffled"),
        (["plot", OLMOE, "--kind", "pie"],
         "trace plot: --kind pie: allowed is one of curves, layers, reuse"),
        (["plot", OLMOE, "--output", "x.pdf"],
         "trace plot: x.pdf: allowed is a name in .png or .svg"),
        (["plot", OLMOE, "--output", "/no/folder/x.svg"],
         "trace plot: /no/folder/x.svg: /no/folder: no folder that can be written"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line(call, words, message):
    status, said, err = call(*words)
    assert (status, said) == (1, "")
    assert err.count("\n") == 1 and err.endswith(f"{message}\n")


# record

ENDED = [2**22, 1]  # a process that cannot be


def passes(*tokens: int) -> list[np.ndarray]:
    """Ids of so many tokens each, `[tokens, 2 layers, 2]`, no two alike."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 12, (count, 2, 2)) for count in tokens]


@pytest.fixture
def worker(tmp_path):
    """Makes the ring of a worker in tmp_path/rings; returns what runs one pass."""
    torch = pytest.importorskip("torch")
    recorder = pytest.importorskip("expert_cache_shim.recorder")

    def make(**header):
        layout = Layout(tokens=16, layers=2, top_k=2)
        values = {
            "process": lineage()[0], "rank": 0, "model": "m", "started": 1.0, "experts": 12,
            "expert_map": None, "tokens": 16, "layers": 2, "top_k": 2, **header,
        }  # fmt: skip
        file = MappedFile(tmp_path / "rings", SUFFIX, MAGIC, values, layout.length)
        memory = torch.from_numpy(file.content("u1", layout.length))
        model = recorder.Recorder(2, lambda top_k: recorder.Ring(file, layout, memory))

        def run(ids: np.ndarray) -> None:
            for layer in range(2):
                model.record(layer, torch.from_numpy(ids[:, layer].copy()))

        return run

    return make


def test_record_takes_what_a_worker_kept(call, worker, tmp_path):
    run = worker()
    ran = passes(2, 1, 4)
    for ids in ran:
        run(ids)
    output = tmp_path / "out.npz"
    words = ("record", output, "--folder", tmp_path / "rings", "--seconds", 0)
    status, said, _ = call(*words)
    assert (status, said) == (0, f"wrote {output}: 7 tokens in 3 forward passes\n")
    found = trace.load(output)
    assert found.ids.tolist() == np.concatenate(ran).tolist()
    assert found.bounds.tolist() == [0, 2, 3, 7]
    assert (found.experts, found.meta["lost_tokens"]) == (12, 0)


@pytest.fixture
def between_looks(monkeypatch):
    """Runs the next of some functions where `record` would wait; Ctrl-C after the last."""
    from expert_cache_shim.commands import trace_record

    def plan(*actions):
        todo = iter(actions)

        def wait(_seconds):
            action = next(todo, None)
            if action is None:
                raise KeyboardInterrupt
            action()

        monkeypatch.setattr(trace_record.time, "sleep", wait)

    return plan


def test_record_follows_a_worker_until_it_has_enough(call, worker, tmp_path, between_looks):
    run = worker()
    ran = passes(*[3] * 12)
    between_looks(*(functools.partial(run, ids) for ids in ran))
    output = tmp_path / "out.npz"
    status, _, _ = call("record", output, "--folder", tmp_path / "rings", "--tokens", 25)
    assert status == 0
    assert trace.load(output).ids.tolist() == np.concatenate(ran)[:27].tolist()


def test_record_says_what_was_lost(call, worker, tmp_path, between_looks):
    run = worker()
    first, second, third = passes(1, 10, 9)
    run(first)
    between_looks(lambda: (run(second), run(second)), lambda: (run(third), run(third)))
    output = tmp_path / "out.npz"
    status, said, _ = call("record", output, "--folder", tmp_path / "rings")
    assert status == 0
    assert "6 tokens are missing" in said  # 4 of 20 and 2 of 18: the ring holds 16
    found = trace.load(output)
    assert found.meta["lost_tokens"] == 6
    kept = [first, np.concatenate([second, second])[4:], np.concatenate([third, third])[2:]]
    assert found.ids.tolist() == np.concatenate(kept).tolist()


def test_record_ends_with_its_worker(call, worker, tmp_path):
    worker(process=ENDED)(passes(3)[0])
    status, said, _ = call("record", tmp_path / "out.npz", "--folder", tmp_path / "rings")
    assert status == 0 and "3 tokens in 1 forward passes" in said


def test_record_takes_the_worker_that_runs_and_of_ranks_the_first(call, worker, tmp_path):
    worker(process=ENDED, started=9.0)(passes(1)[0])
    for rank in (1, 0):
        worker(rank=rank)(passes(2 + rank)[0])
    words = ("record", tmp_path / "out.npz", "--folder", tmp_path / "rings", "--seconds", 0)
    assert "2 tokens" in call(*words)[1]
    assert "1 tokens" in call(*words, "--pid", ENDED[0])[1]


def test_record_refuses_to_choose_between_models(call, worker, tmp_path):
    for model in ("a", "b"):
        worker(model=model)(passes(1)[0])
    folder = tmp_path / "rings"
    status, _, err = call("record", tmp_path / "o.npz", "--folder", folder, "--seconds", 0)
    assert status == 1 and "choose one by --pid" in err and "(a, rank 0)" in err


def test_record_without_a_worker_names_the_variable(call, tmp_path, worker):
    output = tmp_path / "out.npz"
    status, _, err = call("record", output, "--folder", tmp_path)
    assert (status, err.count("\n")) == (1, 1)
    assert "no worker keeps its routing there; start the server with EXPERT_CACHE_TRACE=on" in err
    (tmp_path / "rings").mkdir()
    (tmp_path / "rings" / f"1-x{SUFFIX}").write_bytes(b"no ring")
    assert "no worker" in call("record", output, "--folder", tmp_path / "rings")[2]
    worker()
    _, _, err = call("record", output, "--folder", tmp_path / "rings", "--seconds", 0)
    assert "no token was run meanwhile by m; nothing is written" in err
    assert not output.exists()


# import

FIRST = np.array([[[0, 5]], [[1, 2]], [[3, 4]]], np.uint8)  # as vLLM returns them
SECOND = np.array([[[7, 6]], [[6, -1]]], np.int32)


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def test_import_joins_the_outputs_of_several_requests(call, tmp_path):
    words = [saved(tmp_path / f"{i}.npy", array) for i, array in enumerate((FIRST, SECOND))]
    output = tmp_path / "out.npz"
    status, said, _ = call("import", output, *words, "--prompt-tokens", "2,0", "--model", "m")
    assert (status, said) == (0, f"wrote {output}: 5 tokens of 2 requests\n")
    found = trace.load(output)
    assert found.ids.tolist() == [[[0, 5]], [[1, 2]], [[3, 4]], [[7, 6]], [[6, 65535]]]
    assert found.seq.tolist() == [0, 0, 0, 1, 1]
    assert found.bounds.tolist() == [0, 2, 3, 4, 5]  # the first prompt ran at once
    assert (found.experts, found.meta["model"]) == (8, "m")


def test_import_reads_a_response_of_the_server(call, tmp_path):
    stream = io.BytesIO()
    np.save(stream, FIRST)
    text = base64.b64encode(stream.getvalue()).decode()
    response = tmp_path / "response.json"
    response.write_text(json.dumps({"choices": [{"index": 0, "routed_experts": text}] * 2}))
    output = tmp_path / "out.npz"
    assert call("import", output, response, "--experts", 16)[0] == 0
    found = trace.load(output)
    assert found.ids.tolist() == [*FIRST.tolist(), *FIRST.tolist()]
    assert found.experts == 16 and found.steps == 6


@pytest.mark.parametrize(
    "content, words, message",
    [
        (b"{", (), "has no routed experts: "),
        (b"\xff\xfe", (), "has no routed experts: "),
        (b"[" * 100000, (), "has no routed experts: "),
        (b"{}", (), "was the server started with --enable-return-routed-experts?"),
        (b'{"routed_experts": "x"}', (), "has no routed experts: "),
        (FIRST[0], (), "'routed_experts' is uint8 of shape (1, 2)"),
        (FIRST.astype(float), (), "'routed_experts' is float64 of shape (3, 1, 2)"),
        (FIRST, ("--prompt-tokens", "4"), "--prompt-tokens 4: an array has 3 tokens"),
        (FIRST, ("--prompt-tokens", "1,2"), "--prompt-tokens has 2 numbers for 1 arrays"),
        (FIRST, ("--prompt-tokens", "-1"), "--prompt-tokens -1: allowed are numbers"),
        (FIRST, ("--experts", "3"), "'num_experts' is '3' with expert 5 in use"),
    ],
)
def test_what_cannot_be_imported_is_one_line(call, tmp_path, content, words, message):
    source = tmp_path / "array"
    if isinstance(content, bytes):
        source.write_bytes(content)
    else:
        with source.open("wb") as stream:
            np.save(stream, content)
    status, said, err = call("import", tmp_path / "out.npz", source, *words)
    assert (status, said) == (1, "")
    assert err.count("\n") == 1 and message in err
    assert not (tmp_path / "out.npz").exists()


def test_import_refuses_arrays_of_different_models(call, tmp_path):
    words = [saved(tmp_path / "a.npy", FIRST), saved(tmp_path / "b.npy", FIRST[:, :, :1])]
    _, _, err = call("import", tmp_path / "out.npz", *words)
    assert "layers and experts a token are [1, 1] and [1, 2]" in err


# The rest


def test_without_the_extra_it_says_what_brings_it(call, monkeypatch):
    monkeypatch.setattr("expert_cache_shim.commands.trace.find_spec", lambda name: None)
    status, _, err = call("info", OLMOE)
    assert status == 1
    assert err.count("\n") == 1
    assert "needs numpy and rich; pip install 'expert-cache-shim[tools]' brings them" in err


@pytest.mark.parametrize("kind", ["curves", "layers", "reuse"])
@pytest.mark.parametrize("ending, start", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot_draws_a_picture(call, tmp_path, kind, ending, start):
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"picture.{ending}"
    words = ("plot", OLMOE, "--steps", 30, "--kind", kind, "--output", picture)
    status, said, _ = call(*words)
    assert (status, said) == (0, f"wrote {picture}\n")
    drawn = picture.read_bytes()
    assert drawn.startswith(start)
    call(*words)
    assert picture.read_bytes() == drawn  # nothing of the time or the machine is in it


def test_a_picture_shows_what_was_counted(tmp_path, monkeypatch):
    """The lines of the picture, as matplotlib holds them."""
    trace_plot = pytest.importorskip("expert_cache_shim.trace_plot")
    from expert_cache_shim.trace_replay import Replay

    found = trace.load(OLMOE).first(50)
    counts = [Replay(found, [8, 32], policy).run() for policy in ("lrfu", "opt")]
    drawn = []
    monkeypatch.setattr(trace_plot, "_save", lambda figure, path: drawn.append(figure))
    trace_plot.curves([("t", found, counts)], tmp_path / "x.png")
    lines = {line.get_label(): line for line in drawn[0].axes[0].lines}
    for line, count in zip((lines["lrfu"], lines["opt"]), counts):
        assert list(line.get_xdata()) == [8 / 64, 32 / 64]
        assert np.allclose(line.get_ydata(), count.miss_rates)
