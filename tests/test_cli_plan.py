"""`expert-cache plan`: its screen, its JSON, its refusals."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_configs import CONFIGS, NAMES, values
from start_up import ROOT

from expert_cache_shim import cli
from expert_cache_shim.commands import plan

QWEN = str(CONFIGS / "qwen3-30b-a3b.json")
GIB = 2**30


def run(*words):
    """Status, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["plan", *map(str, words)])
    return status, out.getvalue(), err.getvalue()


def report(*words, status=0) -> dict:
    found, out, err = run(*words, "--json")
    assert (found, err) == (status, ""), err
    return json.loads(out)


def refusal(*words) -> str:
    status, out, err = run(*words)
    assert (status, out, err.count("\n")) == (1, "", 1), (status, out, err)
    return err.split(" plan: ", 1)[1].rstrip("\n")


def write(folder, **changes) -> Path:
    (folder / "config.json").write_text(json.dumps(values("qwen3-30b-a3b", **changes)))
    return folder


# --- What it says ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("more", [[], ["--max-num-seqs", "16", "--tensor-parallel-size", "2"]])
def test_the_screen_fits_80_columns(name, more, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = run(CONFIGS / f"{name}.json", "--vram", "48", *more)
    assert (status, err) == (0, "")
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    for word in ("Memory", "Experts by type", "Slots a layer", "vllm serve", "Misses: "):
        assert word in out


def test_memory_adds_up():
    found = report(QWEN, "--vram", "24", "--max-num-seqs", "4")
    budget, usable = found["budget"], int(24 * GIB * 0.92)
    for row in budget["rows"]:
        assert sum(budget["fixed"].values()) + row["own"] + row["overflow"] + row["left"] == usable
    best = next(row for row in budget["rows"] if row["slots"] == budget["best"])
    assert best["left"] >= 0 and budget["overflow"]
    assert best["slots"] < 1 + max(row["slots"] for row in budget["rows"] if row["left"] >= 0)


def test_a_step_is_the_resident_one_and_the_missed_bytes_over_the_link(tmp_path):
    np = pytest.importorskip("numpy")
    from expert_cache_shim import trace

    ids = np.tile(np.arange(8, dtype=np.uint16), (400, 1, 1))
    meta = {"num_experts": 128}
    recorded = trace.Trace(ids, np.zeros(400, np.int32), np.arange(400), meta)
    trace.save(recorded, tmp_path / "same.npz")
    words = (QWEN, "--vram", "24", "--link", "55.5", "--resident-ms", "0.9584")
    found = report(*words, "--trace", tmp_path / "same.npz")
    by_slots = {row["slots"]: row for row in found["budget"]["rows"]}
    # Eight experts, always the same: all are missed without slots, none with 16.
    missed = 8 * 48 * 9437184
    assert by_slots[0]["step"][0] == pytest.approx(0.9584e-3 + missed / 55.5e9)
    assert by_slots[16]["step"] == pytest.approx([0.9584e-3] * 2)
    assert by_slots[16]["alone"][0] == pytest.approx(1 / 0.9584e-3)


def test_the_resident_step_reads_every_weight_once_at_the_rate_of_the_memory():
    words = (QWEN, "--vram", "24", "--max-model-len", "1024", "--vram-bandwidth", "4800")
    found = report(*words, "--link", "1e9")  # no time on the link
    last = found["budget"]["rows"][-1]
    rest = found["budget"]["fixed"]["rest"] - 151936 * 2048 * 2
    read = rest + 1024 * 98304 + 8 * 48 * 9437184
    assert last["step"] == pytest.approx([read / 4.8e12] * 2, rel=1e-3)


def test_a_model_that_fits_is_told_to_do_without_the_cache():
    found = report(CONFIGS / "olmoe-1b-7b.json", "--vram", "24")
    assert found["budget"]["whole"]
    assert not any(word.startswith(("EXPERT_CACHE", "--cpu-offload")) for word in found["command"])


def test_where_nothing_fits_the_status_is_1_and_the_lack_is_named():
    found = report(CONFIGS / "deepseek-v3.json", "--vram", "16", status=1)
    assert found["budget"]["best"] == 0 and found["budget"]["short"] > 0
    enough = 16 + found["budget"]["short"] / 0.92 / GIB
    assert report(CONFIGS / "deepseek-v3.json", "--vram", enough + 0.01)["budget"]["best"] == 1
    assert report(CONFIGS / "deepseek-v3.json", "--vram", enough - 0.01, status=1)
    pytest.importorskip("rich")
    status, out, _ = run(CONFIGS / "deepseek-v3.json", "--vram", "16")
    assert status == 1 and "Nothing fits" in out and "EXPERT_CACHE" not in out


def test_a_little_room_goes_to_slots_without_overflow_rows():
    found = report(CONFIGS / "mixtral-8x7b.json", "--vram", "20")
    assert found["budget"]["best"] == 1 and not found["budget"]["overflow"]
    assert found["command"][:2] == ["EXPERT_CACHE_SLOTS=1", "EXPERT_CACHE_OVERFLOW=off"]


def test_types_of_experts_and_a_plan_for_another(tmp_path):
    found = report(QWEN, "--vram", "24")
    assert found["other_types"]["bf16"]["expert"] == 9437184
    assert found["other_types"]["int4"]["slots"] == 128
    other = report(QWEN, "--vram", "24", "--quantization", "fp8")
    assert other["model"]["shapes"][0]["bytes_per_expert"] == found["other_types"]["fp8"]["expert"]
    assert other["budget"]["best"] == found["other_types"]["fp8"]["slots"]


def test_host_memory_and_a_host_that_is_too_small():
    found = report(QWEN, "--vram", "24", "--ram", "64")
    assert (found["budget"]["host"], found["budget"]["pinned"]) == (54 * GIB, 72 * GIB)
    pytest.importorskip("rich")
    assert "The host has 64 GiB, and 72 GiB will be pinned." in run(
        QWEN, "--vram", "24", "--ram", "64"
    )[1].replace("\n", " ").replace("  ", " ")


def test_expert_parallel_ranks_hold_whole_experts():
    words = (QWEN, "--vram", "16", "--tensor-parallel-size", "2", "--enable-expert-parallel")
    found = report(*words)
    assert found["model"]["experts_of_a_rank"] == 64
    assert found["model"]["shapes"][0]["bytes_per_expert"] == 9437184
    assert "--enable-expert-parallel" in found["command"]
    apart = report(*words[:-1])
    miss = {row["slots"]: row["miss"] for row in apart["budget"]["rows"]}
    rows = found["budget"]["rows"]
    # The same share of the experts, the same misses, the same bytes a rank.
    assert [r["miss"] for r in rows if r["slots"] == 32] == [miss[64]]
    assert found["budget"]["host"] == apart["budget"]["host"]


def test_a_checkpoint_is_sized_by_its_headers(tmp_path):
    pytest.importorskip("tokenizers")
    from examples.tiny_moe import write_checkpoint

    write_checkpoint("deepseek_v2", tmp_path)
    exact = report(tmp_path, "--vram", "3")
    assert exact["model"]["sizes_from"] == "the headers of its checkpoint"
    (tmp_path / "model.safetensors").unlink()
    foretold = report(tmp_path, "--vram", "3")
    assert foretold["model"].pop("sizes_from") == "config.json"
    del exact["model"]["sizes_from"]
    assert exact == foretold


def test_a_checkpoint_of_an_unknown_format_is_sized_and_a_config_alone_refused(tmp_path):
    pytest.importorskip("tokenizers")
    from examples.quantised_moe import write_quantised

    write_quantised("w4a16", tmp_path)
    known = report(tmp_path, "--vram", "3")["model"]
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "of tomorrow"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    unknown = report(tmp_path, "--vram", "3")["model"]
    assert unknown.pop("stored_as") == "of tomorrow" and known.pop("stored_as") == "int4"
    assert unknown == known
    (tmp_path / "model.safetensors").unlink()
    said = refusal(tmp_path, "--vram", "3")
    assert 'quantization_config: quant_method is "of tomorrow"; it must be one of' in said


def test_a_model_that_was_downloaded_before_is_found_by_name(tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--an--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write(snapshot)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert report("an/model", "--vram", "24")["command"][3] == "an/model"


# --- The machine ----------------------------------------------------------------------------


def test_a_gpu_here_gives_its_memory_and_its_link(monkeypatch):
    from expert_cache_shim.commands import probe

    found = {"torch": {"gpus": [{"bytes": 24 * GIB}]}, "link": {"bytes": 2**30, "seconds": 0.04}}
    monkeypatch.setattr(plan, "torch_backend", lambda: ("cuda", "2.99"))
    monkeypatch.setattr(probe, "probe", lambda steps, *rest: {step: found[step] for step in steps})
    machine = report(QWEN)["machine"]
    assert machine["vram"] == 24 * GIB and machine["link"] == pytest.approx(2**30 / 0.04)
    assert machine["assumed"] == ["memory_rate"] and machine["ram"]
    assert report(QWEN, "--link", "12")["machine"]["link"] == 12e9


def test_without_a_gpu_it_asks_for_its_memory():
    if plan.torch_backend()[0] in ("cuda", "hip"):
        pytest.skip("a PyTorch for a GPU is here")
    assert refusal(QWEN) == "this Python has no PyTorch for a GPU; say --vram GIB"


# --- What it refuses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        (["--vram", "0"], "--vram 0: it must be above 0"),
        (["--vram", "nan"], "--vram nan: it must be above 0"),
        (["--vram", "24", "--max-num-seqs", "0"], "--max-num-seqs 0: it must be above 0"),
        (["--vram", "24", "--max-num-seqs", "-3"], "--max-num-seqs -3: it must be above 0"),
        (["--vram", "24", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization 1.5: it"),
        (["--vram", "24", "--max-model-len", "0"], "--max-model-len 0: it must be above 0"),
        (
            ["--vram", "24", "--max-model-len", "99999"],
            "--max-model-len 99999: the model has",
        ),
        (
            ["--vram", "24", "--tensor-parallel-size", "3"],
            "--tensor-parallel-size 3: num_att",
        ),
        (["--vram", "24", "--kv-cache-dtype", "int3"], "--kv-cache-dtype 'int3': it must be auto"),
        (
            ["--vram", "24", "--quantization", "int3"],
            "--quantization 'int3': it must be one of",
        ),
        (["--vram", "24", "--link", "-1"], "--link -1: it must be above 0"),
        (["--vram", "24", "--trace", "/no/such"], "/no/such: No such file or directory"),
    ],
)
def test_an_option_that_cannot_be_is_named(words, said):
    assert refusal(QWEN, *words).startswith(said)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "is not JSON"), (b"{", "is not JSON"), (b"\xff\xfe", "is not JSON"),
        (b"[]", "is JSON, but no object"), (b"3", "is JSON, but no object"),
        (b"[" * 100_000, "is not JSON"), (b'{"model_type": 3}', ": model_type is 3; it must be"),
        (b"{}", ": model_type is missing"),
        (b'{"model_type": "qwen3_moe"}', ": num_hidden_layers is missing"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_named(tmp_path, content, said):
    (tmp_path / "config.json").write_bytes(content)
    text = refusal(tmp_path, "--vram", "24")
    assert text.startswith(str(tmp_path / "config.json")) and said in text


@pytest.mark.parametrize("model", ["/no/such/folder", "an/unknown-model", "..", ""])
def test_a_model_that_is_not_here_is_not_downloaded(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert "nothing is downloaded" in refusal(model, "--vram", "24")


def test_without_rich_it_says_what_brings_it_and_json_goes_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert "pip install 'expert-cache-shim[tools]'" in refusal(QWEN, "--vram", "24")
    assert report(QWEN, "--vram", "24")["budget"]["best"]


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-4, 2**70), st.floats(), st.text(max_size=6),
    st.lists(st.one_of(st.integers(-2, 99), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.sampled_from(["quant_method", "bits", "group_size", "config_groups"]),
                    st.one_of(st.integers(-2, 9), st.sampled_from(["gptq", "fp8", "x"]),
                              st.dictionaries(st.text(max_size=2), st.integers())), max_size=3),
)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(NAMES), data=st.data())
def test_any_config_is_planned_for_or_refused_in_one_line(tmp_path_factory, name, data):
    config = values(name)
    for field in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[field] = data.draw(ODD)
    folder = tmp_path_factory.mktemp("odd")
    (folder / "config.json").write_text(json.dumps(config))
    status, out, err = run(folder, "--vram", "24", "--json")
    if err:
        assert status == 1 and out == "" and err.count("\n") == 1
        assert re.search(rf"config\.json: |--max-model-len|: {name}|layer \d+: |--tensor", err), err
    else:
        assert json.loads(out)["budget"]["rows"]


# --- vLLM itself ----------------------------------------------------------------------------

ASK_VLLM = """
import json, sys
from vllm.config import ModelConfig, ParallelConfig
found = {}
for folder in sys.argv[1:]:
    config = ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16")
    for ranks in (1, 2):
        parallel = ParallelConfig()
        parallel.tensor_parallel_size = ranks
        heads = 1 if config.use_mla else 2 * config.get_num_kv_heads(parallel)
        layers = config.get_num_layers(parallel)
        found[f"{folder} {ranks}"] = layers * heads * config.get_head_size() * 2
print(json.dumps(found))
"""


def test_vllm_gives_a_token_as_much_kv_cache(tmp_path):
    """Of models all of whose layers keep every token."""
    pytest.importorskip("vllm")
    folders = {}
    for name in ("qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b", "deepseek-v2-lite", "deepseek-v3",
                 "glm-4.5-air"):  # fmt: skip
        folders[name] = tmp_path / name
        folders[name].mkdir()
        # Only what the KV cache has to do with: a CPU build of vLLM refuses some storage.
        config = json.dumps(values(name, quantization_config=None))
        (folders[name] / "config.json").write_text(config)
    done = subprocess.run(
        [sys.executable, "-c", ASK_VLLM, *map(str, folders.values())],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    asked = json.loads(done.stdout.splitlines()[-1])
    for name, folder in folders.items():
        for ranks in (1, 2):
            words = (CONFIGS / f"{name}.json", "--vram", "2000", "--tensor-parallel-size", ranks)
            assert report(*words)["budget"]["kv_token"] == asked[f"{folder} {ranks}"], name


# --- The documents --------------------------------------------------------------------------


def test_the_worked_example_is_what_the_command_says(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    page = (ROOT / "docs" / "sizing.md").read_text()
    words, said = re.search(r"```console\n\$ expert-cache plan (.*)\n((?s:.*?))```", page).groups()
    name, *options = words.split()
    folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "x"
    folder.mkdir(parents=True)
    write(folder)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(name, *options)
    assert status == 0
    assert [line.rstrip() for line in out.splitlines()] == said.splitlines()
