"""vLLM's own quantisation methods through the cache: on equals off.

Only the experts' arithmetic is replaced (torch_experts.py): what the cache discovers, mirrors
and rebinds are the tensors and configs that the real methods leave.
"""

import pytest
from engine import IN_PROCESS, Job, run, shim, snapshots_of

SLOTS = 16
METHODS = {
    "int8_channel": "CompressedTensorsW8A8Int8MoEMethod",
    "fp8_channel": "CompressedTensorsW8A8Fp8MoEMethod",
    "fp8_static": "CompressedTensorsW8A8Fp8MoEMethod",
    "fp8_tensor": "Fp8MoEMethod",
    "fp8_block": "Fp8MoEMethod",
    "w4a16": "CompressedTensorsWNA16MoEMethod",
    "w8a16": "CompressedTensorsWNA16MoEMethod",
    "gptq": "AutoGPTQMoEMethod",
}


def job(model: str, dtype: str = "bfloat16", plugins: tuple[str, ...] = ()) -> Job:
    engine = {"moe_backend": "triton", "dtype": dtype}
    return Job(model, engine, plugins=("torch_experts", *plugins))


@pytest.fixture(scope="module")
def off(folder, checkpoint, environment):
    jobs = {scheme: job(checkpoint(scheme)) for scheme in METHODS}
    jobs["float32"] = job(checkpoint("w4a16"), dtype="float32")
    jobs["transformers"] = Job(checkpoint("w4a16_dequantised"), reference=True)
    answers = run(list(jobs.values()), folder / "quantised", environment(**IN_PROCESS))
    return dict(zip(jobs, answers))


@pytest.fixture(scope="module")
def on(folder, checkpoint, environment):
    jobs = {scheme: job(checkpoint(scheme)) for scheme in METHODS}
    jobs["wrong expert"] = job(checkpoint("w4a16"), plugins=("wrong_expert",))
    settings = shim(folder / "quantised-snapshots", slots=SLOTS)
    variables = environment(**IN_PROCESS, **settings)
    answers = run(list(jobs.values()), folder / "quantised-cached", variables)
    return dict(zip(jobs, answers))


@pytest.mark.parametrize("scheme", METHODS)
def test_a_quantised_model_serves_the_same_tokens(scheme, on, off, folder, checkpoint):
    assert off[scheme]["methods"] == on[scheme]["methods"] == [METHODS[scheme]]
    assert on[scheme]["tokens"] == off[scheme]["tokens"]

    snapshot = snapshots_of(folder / "quantised-snapshots", checkpoint(scheme))[0]
    assert len(snapshot.layers) == 4
    assert all(snapshot.total(counter) > 0 for counter in ("steps", "hits", "misses", "overflow"))


def test_four_bit_tokens_are_those_of_transformers_with_the_dequantised_weights(off):
    assert off["float32"]["tokens"] == off["transformers"]["tokens"]


def test_two_formats_of_the_same_four_bit_weights_agree(off):
    assert off["gptq"]["tokens"] == off["w4a16"]["tokens"]


def test_wrong_quantised_experts_would_change_the_tokens(on, off):
    changed = zip(on["wrong expert"]["tokens"], off["w4a16"]["tokens"])
    assert all(tokens != right for tokens, right in changed)
