"""What speculative decoding and the prefix cache did, as vLLM counts it."""

import sys

COUNTERS = {
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "prefix_hits": "vllm:prefix_cache_hits",
}


def play(llm, generate) -> dict:
    """The counters, after serving the same prompts once more; and how many models of this process
    the cache serves, which those that were served before must not be among."""
    again = generate()
    values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    arming = sys.modules.get("expert_cache_shim.arming")
    return {
        "again": again,
        "models": len(list(arming.reports())) if arming else 0,
        **{name: values.get(key, 0) for name, key in COUNTERS.items()},
    }
