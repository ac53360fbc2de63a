"""`expert-cache plan` on a config.json, or a checkpoint, that somebody made to do harm."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from limited_commands import Run, limited
from model_configs import CONFIGS, NAMES, values

from expert_cache_shim.commands import plan_checkpoint, plan_config

QWEN = "qwen3-30b-a3b"


@pytest.fixture(scope="module")
def planner():
    yield from limited(2 * 2**30)


def outcome(planner: Run, folder: Path) -> str:
    """ "" where there is a plan, else the one line of a refusal, after the name of the command."""
    status, out, err = planner("plan", folder, "--vram", "24", "--json")
    if not err:
        assert json.loads(out)["budget"]["rows"] and status in (0, 1)
        return ""
    assert (status, out, err.count("\n")) == (1, "", 1), err
    assert err[:-1].isprintable() and len(err) < 1000
    return err.split(" plan: ", 1)[1][:-1]


# --- config.json, mutated -------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-3, 3), st.integers(-(2**70), 2**70), st.floats(),
    st.sampled_from([2**24, 2**24 + 1, 2**31, 2**63, 10**4000, -0.0, 1.5, 1e16, 5e-324]),
)  # fmt: skip
WORDS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["../../../etc/passwd", "\0", "\ud800", "a\nb", "\x1b[2J", "x" * 100_000,
                     "re:(", "re:" + "(" * 900, "re:a{99999999999}", "re:[[a]", "*[z-a]*",
                     "re:" + "a" * 2000]),
)  # fmt: skip
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=8,
)
QUANTIZED = st.fixed_dictionaries(
    {"quant_method": st.sampled_from(["fp8", "gptq", "awq", "modelopt", "mxfp4",
                                      "compressed-tensors", "x"])},
    optional={
        name: st.one_of(ANYTHING, st.sampled_from([4, 8, -1, 128, "int", "float", "NVFP4", [0, 1],
                        ["Linear"], {"g": {"targets": ["Linear"], "weights": {"num_bits": 4}}}]))
        for name in ("bits", "group_size", "quant_algo", "weight_block_size", "config_groups",
                     "ignore", "modules_to_not_convert", "dynamic", "activation_scheme", "format")
    },
)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(NAMES), data=st.data())
def test_any_mutation_is_planned_for_or_refused_in_one_line(planner, tmp_path_factory, name, data):
    config = values(name)
    for field in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        change = data.draw(st.sampled_from(["value", "missing", "nested"]))
        if change == "missing":
            config.pop(field, None)
        else:
            config[field] = data.draw(ANYTHING)
        if change == "nested":
            config = {"text_config": config}
            break
    if data.draw(st.booleans()):
        config["quantization_config"] = data.draw(QUANTIZED)
    folder = tmp_path_factory.mktemp("mutated")
    (folder / "config.json").write_text(json.dumps(config))
    said = outcome(planner, folder)
    assert not said or str(folder) in said or said.startswith(("--", "quantization_config: ")), said


@pytest.mark.parametrize("content, said", [
    (b'{"model_type": "qwen3_moe", "hidden_size": 1e400}', "num_hidden_layers is missing"),
    (b"[" * 1_000_000, "is not JSON"),
    (b'{"a":' * 400 + b"1" + b"}" * 400, "model_type is missing"),
    (b'{"model_type": ' + b"9" * 10_000_000 + b"}", "is not JSON"),
    (b"\xef\xbb\xbf{}", "model_type is missing"),
    ("{}".encode("utf-16"), "model_type is missing"),
    (b'{"model_type": "\xff"}', "is not JSON"),
    (b"\0" * 100, "is not JSON"),
    (b" " * (plan_config.MAX_BYTES + 1), "larger than"),
    (b'{"model_type": 1, "model_type": 2}', "model_type is 2"),
])  # fmt: skip
def test_a_file_that_is_made_to_do_harm(planner, tmp_path, content, said):
    (tmp_path / "config.json").write_bytes(content)
    assert said in outcome(planner, tmp_path)


def changed(folder: Path, **fields) -> Path:
    (folder / "config.json").write_text(json.dumps(values(QWEN, **fields)))
    return folder


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize("fields, said", [
    ({"mlp_only_layers": [1] * 5_000_000}, "mlp_only_layers is [1, "),
    ({"layer_types": ["x"] * 1_000_000}, "layer_types is ["),
    ({"quantization_config": {**GPTQ, "ignore": ["x" * 2_000_000]}}, "ignore is "),
    ({"quantization_config": {**GPTQ, "ignore": [f"re:.*{n}$" for n in range(300)]}}, ""),
    ({"quantization_config": {**GPTQ, "ignore": [f"re:({n}a*)*b" for n in range(16385)]}},
     "ignore is ["),
    ({"quantization_config": {**GPTQ, "dynamic": dict.fromkeys(map(str, range(16385)))}},
     "dynamic is {"),
    # Exponential in the length of a name.
    ({"quantization_config": {**GPTQ, "ignore": [r"re:([\w.]+)+!"]}}, "take more than 10 s"),
    ({"num_hidden_layers": 1024, "num_experts": 1024, "num_experts_per_tok": 1024}, ""),
])  # fmt: skip
def test_what_would_take_time_or_memory_is_bounded(planner, tmp_path, fields, said):
    found = outcome(planner, changed(tmp_path, **fields))
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize("lay", [
    lambda path: os.mkfifo(path),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path),
    lambda path: path.symlink_to("none"),
    lambda path: path.mkdir(),
])  # fmt: skip
def test_what_is_no_file_is_not_waited_for(planner, tmp_path, lay):
    lay(tmp_path / "config.json")
    assert "no such file" in outcome(planner, tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "a/" + "x" * 5000, "a\0b", "\udcff"])
def test_a_name_that_no_file_has(planner, tmp_path, name):
    status, _, err = planner("plan", name, "--vram", "24")
    assert status == 1 and err.count("\n") == 1


# --- Checkpoints ----------------------------------------------------------------------------


def checkpoint(folder: Path, header, name="x.safetensors", size=None, length=None) -> Path:
    """A file with this header beside a sound config.json; its length, and that of the file."""
    shutil.copy(CONFIGS / f"{QWEN}.json", folder / "config.json")
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path = folder / name
    path.write_bytes(length.to_bytes(8, "little") + text)
    if size is not None:
        os.truncate(path, size)
    return folder


def entry(shape=(2, 2), dtype="BF16", offsets=None) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": offsets or [0, 8]}


EXPERT = "model.layers.0.mlp.experts.0.gate_proj.weight"


@pytest.mark.parametrize("header, how, said", [
    ({}, {"length": 2**64 - 1}, "not a safetensors file"),
    ({}, {"length": 2**40, "size": 2**42}, "larger than"),
    (b"\0" * 8, {"length": plan_checkpoint.MAX_HEADERS + 1, "size": 2**40}, "larger than"),
    (b"\0" * 8, {"length": plan_checkpoint.MAX_HEADERS, "size": 2**40}, "its header is damaged"),
    ({"w": entry()}, {"size": 2**43}, "bytes where"),
    ({"w": entry([2**41], offsets=[0, 2**42])}, {"size": 2**42}, "bytes where"),
    ({"w": entry([2**40, 2**40])}, {}, "does not have the bytes of its shape"),
    ({"w": entry([10**4000] * 1000)}, {}, "no name or shape of a weight"),
    ({"w": entry([10**4000] * 10)}, {}, "its header is damaged"),
    ({"w": entry([0] * 16, offsets=[0, 0])}, {}, "x.safetensors|layer 0"),
    ({"w": entry([-1, -4])}, {}, "its header is damaged"),
    ({"w": entry([True, 4])}, {}, "its header is damaged"),
    ({"w" * 300: entry()}, {}, "no name or shape of a weight"),
    ({"a\n\x1b[2J": entry(dtype="X")}, {}, "which is not known here"),
    ({"layers." + "9" * 200 + ".x": entry([], offsets=[0, 2])}, {}, "layer 0"),
    ({EXPERT.replace(".0.gate", ".gate"): entry([], offsets=[0, 2])}, {}, "layer"),
    ({EXPERT.replace("0.mlp", "٣.mlp"): entry()}, {}, "layer"),
    ({"layers.1." * 25 + EXPERT[:20]: entry()}, {}, "layer"),
    (b'{"w": {}, "w": {}}', {}, "its header is damaged"),
    (b"[" * 1_000_000, {}, "its header is damaged"),
    ({"model.embed_tokens.weight": entry([], offsets=[0, 2])}, {}, "layer 0"),
])  # fmt: skip
def test_a_header_that_is_made_to_do_harm(planner, tmp_path, header, how, said):
    if isinstance(header, dict) and "size" not in how:
        end = max([0, *(one["data_offsets"][1] for one in header.values())])
        how["size"] = 8 + len(json.dumps(header)) + end
    found = outcome(planner, checkpoint(tmp_path, header, **how))
    assert any(word in found for word in said.split("|")) and str(tmp_path) in found


def test_many_names_of_one_file_are_not_read_again_and_again(planner, tmp_path):
    checkpoint(tmp_path, {"__metadata__": {"x": "y" * 10_000_000}})
    for number in range(20):
        (tmp_path / f"{number}.safetensors").symlink_to("x.safetensors")
    assert "the headers of all files are larger than" in outcome(planner, tmp_path)


def as_a_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_a_folder(path: Path) -> None:
    path.mkdir()


def as_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("lay", [as_a_pipe, as_a_folder, as_a_device])
def test_a_checkpoint_that_is_no_file_is_not_waited_for(planner, tmp_path, lay):
    shutil.copy(CONFIGS / f"{QWEN}.json", tmp_path / "config.json")
    lay(tmp_path / "a\x1b[2J\n.safetensors")
    assert "not a regular file" in outcome(planner, tmp_path)


@pytest.mark.parametrize("names, said", [
    (["../../../etc/passwd"], "names what is no file of its folder"),
    (["/etc/passwd"], "names what is no file of its folder"),
    ([".."], ""),
    (["x" * 5000], "names what is no file of its folder"),
    (["x.safetensors", "a\nb"], "1 of 2 files are missing"),
    (["\0"], ""),
    ([{"a": ["/"]}], "names what is no file of its folder"),
    ([[[[]]]], ""),
])  # fmt: skip
def test_an_index_that_is_made_to_do_harm(planner, tmp_path, names, said):
    checkpoint(tmp_path, {})
    (tmp_path / plan_checkpoint.INDEX).write_text(
        json.dumps({"weight_map": {str(number): name for number, name in enumerate(names)}})
    )
    found = outcome(planner, tmp_path)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize("content, said", [
    (b'{"weight_map": ' + b"[" * 100_000, "is no index"),
    (b" " * (plan_checkpoint.MAX_HEADERS + 1), "larger than"),
    (b'{"weight_map": {"a": "\xff"}}', "is no index"),
    (b'{"weight_map": "abc"}', "is no index"),
])  # fmt: skip
def test_an_index_that_is_none(planner, tmp_path, content, said):
    checkpoint(tmp_path, {})
    (tmp_path / plan_checkpoint.INDEX).write_bytes(content)
    assert said in outcome(planner, tmp_path)


SIZES = st.lists(st.one_of(st.integers(0, 300), st.integers(-2, 2**64)), max_size=5)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(header=st.dictionaries(
    st.one_of(
        st.text(max_size=5),
        st.builds("model.layers.{}.mlp.experts.{}{}.{}".format, st.integers(0, 99),
                  st.sampled_from(["", "0.", "127.", "x."]),
                  st.sampled_from(["gate_proj", "up_proj", "down_proj", "w2", "gate_up_proj"]),
                  st.sampled_from(["weight", "blocks", "weight_scale", "_bias", "weight_g_idx"])),
        st.sampled_from(["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
                         "model.layers.0.self_attn.k_proj.weight"]),
    ),
    st.one_of(ANYTHING, st.builds(entry, SIZES, st.sampled_from(["BF16", "U8", "X"]))),
    max_size=5,
))  # fmt: skip
def test_any_header_is_planned_for_or_refused_in_one_line(planner, tmp_path_factory, header):
    place = 0
    for one in header.values():  # offsets and a size that fit, as far as that can be
        if isinstance(one, dict) and isinstance(one.get("shape"), list):
            count = 2 if one["dtype"] == "BF16" else 1
            for size in one["shape"]:
                count *= size
            one["data_offsets"] = [place, place + max(0, count)]
            place += max(0, min(count, 2**40))
    folder = tmp_path_factory.mktemp("header")
    size = 8 + len(json.dumps(header)) + place
    said = outcome(planner, checkpoint(folder, header, size=size))
    assert bool(header) == bool(said) and (not said or str(folder) in said)  # never a whole one
