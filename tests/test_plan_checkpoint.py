"""Checkpoints by their headers: the tensors that a config.json foretells, and damaged files."""

import json
import re
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_cache_shim.commands import CommandError, plan_checkpoint, plan_config
from expert_cache_shim.commands.plan_families import describe
from expert_cache_shim.commands.plan_sizes import sizes_of

pytest.importorskip("safetensors", reason="needs torch, safetensors and tokenizers")
pytest.importorskip("tokenizers")
from examples import quantised_moe, tiny_moe

SMALL = tiny_moe.Shape(layers=2, experts=8)
KINDS = sorted(tiny_moe.KINDS)
# w4a16_dequantised: float32 beside bfloat16, which no published checkpoint mixes.
SCHEMES = [name for name in sorted(quantised_moe.SCHEMES) if name != "w4a16_dequantised"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Writes a checkpoint of a kind, or of a quantisation scheme, once."""
    made = {}

    def write(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            if name in KINDS:
                tiny_moe.write_checkpoint(name, folder, SMALL)
            else:
                quantised_moe.write_quantised(name, folder, SMALL)
            made[name] = folder
        return made[name]

    return write


def described(folder):
    return describe(plan_config.read(plan_config.find(str(folder))))


@pytest.mark.parametrize("name", [*KINDS, *SCHEMES])
def test_a_config_foretells_the_checkpoint(checkpoint, name):
    folder = checkpoint(name)
    model = described(folder)
    found = {(t.name, t.shape) for t in plan_checkpoint.read(folder) if ".experts." not in t.name}
    assert found == {(t.name, t.shape) for t in model.tensors if ".experts." not in t.name}
    # Of experts that have tensors of their own the first one's; scalars may have a dimension.
    first = {
        t.name: t.shape or (1,)
        for t in plan_checkpoint.read(folder)
        if re.search(r"\.experts\.(0\.|[a-z])", t.name)
    }
    assert first == {t.name: t.shape for t in model.tensors if ".experts." in t.name}


@pytest.mark.parametrize("name", [*KINDS, *SCHEMES])
@pytest.mark.parametrize("ranks", [1, 2])
def test_both_come_to_the_same_bytes(checkpoint, name, ranks):
    folder = checkpoint(name)
    model = described(folder)
    from_headers = sizes_of(model, plan_checkpoint.read(folder), ranks)
    from_config = sizes_of(model, model.tensors, ranks)
    assert from_headers.rest == from_config.rest
    for one, other in zip(from_headers.shapes, from_config.shapes, strict=True):
        # GPTQ's scales may be bfloat16 or float16, and 8-bit ones float32 or not: of equal size.
        assert one == other


def test_a_folder_without_a_checkpoint_has_no_tensors(tmp_path):
    assert plan_checkpoint.read(tmp_path) == []


def with_index(folder, names):
    weight_map = {f"tensor{index}": name for index, name in enumerate(names)}
    (folder / plan_checkpoint.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_files_that_the_index_does_not_name_are_left_out(checkpoint, tmp_path):
    source = checkpoint("olmoe") / "model.safetensors"
    shutil.copy(source, tmp_path / "a.safetensors")
    shutil.copy(source, tmp_path / "consolidated.safetensors")
    assert len(plan_checkpoint.read(tmp_path)) == len(plan_checkpoint.read(checkpoint("olmoe")))
    shutil.copy(source, tmp_path / "b.safetensors")
    with_index(tmp_path, ["b.safetensors"])
    assert len(plan_checkpoint.read(tmp_path)) == len(plan_checkpoint.read(checkpoint("olmoe")))


def test_a_download_that_broke_off_is_noticed(checkpoint, tmp_path):
    whole = (checkpoint("olmoe") / "model.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole)
    with_index(tmp_path, ["a.safetensors", "b.safetensors"])
    with pytest.raises(CommandError, match=r"1 of 2 files are missing, b\.safetensors for one"):
        plan_checkpoint.read(tmp_path)
    with_index(tmp_path, ["a.safetensors"])
    (tmp_path / "a.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CommandError, match=r"a\.safetensors: has .* bytes where .* belong"):
        plan_checkpoint.read(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    assert plan_checkpoint.read(tmp_path) == []


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "not a safetensors file"),
        (b"version of the pointer\noid sha256:0", "a pointer of Git LFS"),
        (b"\xff" * 64, "not a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "its header is damaged"),
        (b"\x02\0\0\0\0\0\0\0{]", "its header is damaged"),
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path, content, said):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CommandError, match=rf"x\.safetensors: {said}"):
        plan_checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}']
)
def test_an_index_that_is_none_is_named(tmp_path, index):
    (tmp_path / plan_checkpoint.INDEX).write_text(index)
    with pytest.raises(CommandError, match=r"index\.json: .*; download it again"):
        plan_checkpoint.read(tmp_path)


@settings(max_examples=300, deadline=None)
@given(entry=st.dictionaries(
    st.sampled_from(["dtype", "shape", "data_offsets", "x"]),
    st.one_of(st.none(), st.integers(-3, 2**70), st.text(max_size=4), st.sampled_from(["BF16"]),
              st.lists(st.one_of(st.integers(-1, 9), st.none(), st.text(max_size=2)), max_size=3)),
))  # fmt: skip
def test_no_header_raises_anything_but_one_line(tmp_path_factory, entry):
    folder = tmp_path_factory.mktemp("header")
    header = json.dumps({"t": entry}).encode()
    (folder / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    try:
        plan_checkpoint.read(folder)
    except CommandError as refusal:
        assert "\n" not in str(refusal)
