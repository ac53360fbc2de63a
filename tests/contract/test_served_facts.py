"""What is read about kernels that are served, in made-up releases: as it should be, and changed."""

from __future__ import annotations

import pytest
from releases import examined

from tools.vllm_contract.facts import DIFFERS, OK

COMES = "on a GPU their steps come to functions that were tried, or to experts of a kernel"
TRITON = """
class TritonExperts(FusedMoEExpertsModular):
    def apply(self, x):
        invoke_fused_moe_triton_kernel(x)

class Int4EmulationTritonExperts(TritonExperts):
    def apply(self, x):
        return super().apply(x)

class MoeWNA16Method(FusedMoEMethodBase):
    def apply(self, x):
        return self.moe_kernel.apply(x)
"""


@pytest.mark.parametrize(
    "old, new, said",
    [
        (
            "invoke_fused_moe_triton_kernel(x)",
            "invoke_other(x)",
            "TritonExperts calls invoke_other",
        ),
        ("super().apply(x)", "fused_emulation(x)", "calls fused_emulation at vllm/a.py:7"),
        ("super().apply(x)", "x", "vllm/a.py:7 calls nothing known"),
        ("self.moe_kernel", "self.kernel", "vllm/a.py:11 calls nothing known"),
    ],
)
def test_a_step_that_comes_to_something_else_is_caught(tmp_path, old, new, said):
    assert examined(COMES, tmp_path, {"a.py": TRITON}).status == OK
    assert old in TRITON
    result = examined(COMES, tmp_path, {"a.py": TRITON.replace(old, new)})
    assert result.status == DIFFERS and said in result.reason


def test_a_new_choice_of_experts_is_caught(tmp_path):
    name = "TritonOrCutlassExperts chooses of CutlassExpertsFp8 and TritonExperts"
    text = "class TritonOrCutlassExperts:\n    def get_clses():\n"
    text += "        return (CutlassExpertsFp8, TritonExperts)\n"
    assert examined(name, tmp_path, {"a.py": text}).status == OK
    other = text.replace("CutlassExpertsFp8", "CutlassExpertsFp4")
    assert examined(name, tmp_path, {"a.py": other}).status == DIFFERS


def test_another_launch_by_fused_experts_is_caught(tmp_path):
    name = "fused_experts launches Triton's kernels, or on NVIDIA for 4 bits moe_wna16_gemm"
    module = "model_executor/layers/fused_moe/fused_moe.py"
    text = "def dispatch_fused_moe_kernel(x):\n"
    for kernel in ("triton", "wna16_triton", "wna16_cuda"):
        text += f"    invoke_fused_moe_{kernel}_kernel(x)\n"
    text += "def should_moe_wna16_use_cuda(bit):\n"
    text += "    return current_platform.is_cuda() and bit == 4\n"
    assert examined(name, tmp_path, {module: text}).status == OK
    for old, new in [("moe_triton", "moe_new"), ("is_cuda()", "is_cuda_alike()")]:
        assert examined(name, tmp_path, {module: text.replace(old, new)}).status == DIFFERS


def test_a_new_method_that_calls_fused_experts_is_caught(tmp_path):
    name = "of methods, only those served and bitsandbytes call fused_experts"
    text = "class MoeWNA16Method(FusedMoEMethodBase):\n    def apply(self, x):\n"
    text += "        return fused_experts(x)\n"
    assert examined(name, tmp_path, {"a.py": text}).status == OK
    new = {"b.py": text.replace("MoeWNA16Method", "NewMoEMethod")}
    assert "NewMoEMethod does at vllm/b.py:3" in examined(name, tmp_path, new).reason


def test_another_way_to_choose_aiter_is_caught(tmp_path):
    name = "QuarkW8A8Fp8MoEMethod chooses AITER by rocm_aiter_moe_enabled"
    text = "class QuarkW8A8Fp8MoEMethod:\n    def apply(self, x):\n"
    text += "        if self.rocm_aiter_moe_enabled:\n            rocm_aiter_fused_experts(x)\n"
    assert examined(name, tmp_path, {"a.py": text}, "0.23.0").status == OK
    other = text.replace("self.rocm_aiter_moe_enabled", "self.use_aiter")
    assert examined(name, tmp_path, {"a.py": other}, "0.23.0").status == DIFFERS


def test_experts_of_aiter_by_another_name_are_caught(tmp_path):
    name = "experts in files of AITER are named Aiter"
    text = "class AiterExperts(FusedMoEExperts): ...\n"
    assert examined(name, tmp_path, {"rocm_aiter_moe.py": text}).status == OK
    other = text.replace("AiterExperts", "RocmExperts")
    assert "RocmExperts" in examined(name, tmp_path, {"rocm_aiter_moe.py": other}).reason
