"""vLLM's tuned kernel configurations: `vllm.model_executor.layers.fused_moe` and its `fused_moe`.

A kernel looks one up by the shapes of the weights it is given, the number of experts among them,
unless `get_config` gives one that overrides it. Another configuration adds in another order.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

package: Any = ModuleType("vllm.model_executor.layers.fused_moe")
package.get_config = lambda: None

fused_moe: Any = ModuleType("vllm.model_executor.layers.fused_moe.fused_moe")


def try_get_optimal_moe_config(
    w1_shape: tuple[int, ...], w2_shape: tuple[int, ...], top_k: int, dtype: str | None, M: int,
    block_shape: list[int] | None = None,
) -> dict[str, int]:  # fmt: skip
    if package.get_config():
        return package.get_config()
    return {"BLOCK_SIZE_K": 32 if w2_shape[0] % 8 == 0 else 16}


fused_moe.try_get_optimal_moe_config = try_get_optimal_moe_config
