"""What is read about Marlin's kernel, in made-up releases: as it should be, and changed."""

from __future__ import annotations

import pytest
from releases import examined

from tools.vllm_contract.facts import DIFFERS, OK

MODULE = "model_executor/layers/fused_moe/experts/marlin_moe.py"
QUARK = "model_executor/layers/quantization/quark_moe.py"
MARLIN = """
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

def _fused_marlin_moe(expert_ids):
    return ops.moe_wna16_marlin_gemm(expert_ids)

def fused_marlin_moe(topk_ids, global_num_experts, expert_map):
    sorted_token_ids, expert_ids, count = moe_align_block_size(
        topk_ids, block_size_m, global_num_experts, expert_map, ignore_invalid_experts=True
    )
    return _fused_marlin_moe(expert_ids)

class MarlinExperts:
    def apply(self, topk_ids):
        return fused_marlin_moe(topk_ids, 8, None)
"""
SORTS = "fused_marlin_moe sorts by moe_align_block_size, a name of its module, and once"
NOTHING_ELSE = "nothing else comes to Marlin's kernel for experts, but BatchedMarlinExperts"


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("import moe_align_block_size", "import other", "does not import it"),
        ("def fused", "@custom_op\ndef fused", "is decorated"),
        ("(\n        topk_ids", "(\n        expert_map[topk_ids]", "calls it otherwise"),
        ("= moe_align_block_size", "= moe_sort", "calls it otherwise"),
    ],
)
def test_another_way_to_sort_is_caught(tmp_path, old, new, said):
    assert examined(SORTS, tmp_path, {MODULE: MARLIN}).status == OK
    assert old in MARLIN
    result = examined(SORTS, tmp_path, {MODULE: MARLIN.replace(old, new)})
    assert result.status == DIFFERS and said in result.reason


@pytest.mark.parametrize("function", ["fused_marlin_moe", "moe_wna16_marlin_gemm"])
def test_another_caller_is_caught(tmp_path, function):
    assert examined(NOTHING_ELSE, tmp_path, {MODULE: MARLIN}).status == OK
    new = f"class NewMoEMethod:\n    def apply(self, x):\n        return {function}(x)\n"
    result = examined(NOTHING_ELSE, tmp_path, {QUARK: new})
    assert result.status == DIFFERS
    assert f"NewMoEMethod calls it at vllm/{QUARK}:3" in result.reason


def test_a_method_that_chooses_by_something_else_is_caught(tmp_path):
    name = "QuarkW8A8Fp8MoEMethod calls fused_marlin_moe by its name"
    method = (
        "class QuarkW8A8Fp8MoEMethod:\n"
        "    def __init__(self, capability):\n        self.use_marlin = capability < 89\n"
        "    def apply(self, x):\n"
        "        return fused_marlin_moe(x) if self.use_marlin else fused_experts(x)\n"
    )
    assert examined(name, tmp_path, {QUARK: method}, "0.23.0").status == OK
    other = method.replace("if self.use_marlin", "if self.has_fp8")
    result = examined(name, tmp_path, {QUARK: other}, "0.23.0")
    assert "does not go by QuarkW8A8Fp8MoEMethod.use_marlin" in result.reason


def test_the_second_result_of_sorting_is_looked_at(tmp_path):
    name = "moe_align_block_size returns the experts of blocks second"
    module = "model_executor/layers/fused_moe/moe_align_block_size.py"
    text = "def moe_align_block_size():\n    return sorted_ids, expert_ids, num_tokens_post_pad\n"
    assert examined(name, tmp_path, {module: text}).status == OK
    other = text.replace("sorted_ids, expert_ids", "expert_ids, sorted_ids")
    assert examined(name, tmp_path, {module: other}).status == DIFFERS
