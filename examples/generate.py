"""An ordinary vLLM script: greedy answers of one model, as JSON. It knows nothing of the cache.

python examples/generate.py MODEL ANSWERS.json
"""

import argparse
import json
from pathlib import Path

PROMPTS = (
    "the quick brown fox jumps over the lazy dog",
    "a mixture of experts routes each token to a few experts",
    "0 1 2 3 4 5 6 7 8 9",
    "least recently, least frequently",
    "hello world",
    "slots",
    "what is resident stays resident until it does not",
    "?",
)
# The answers end one after the other: the steps get narrower, down to a single token.
MAX_TOKENS = (8, 16, 24, 32, 40, 48, 56, 64)


def progress(stage: str) -> None:
    print(f"progress: {stage}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write greedy answers of a model as JSON.")
    parser.add_argument("model")
    parser.add_argument("answers", type=Path)
    arguments = parser.parse_args()

    progress("importing vLLM")
    from vllm import LLM, SamplingParams

    progress("loading the model")
    llm = LLM(arguments.model, max_model_len=256, max_num_seqs=8, enforce_eager=True, seed=0)

    progress(f"decoding {sum(MAX_TOKENS)} tokens of {len(PROMPTS)} answers")
    samplings = [
        SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True) for limit in MAX_TOKENS
    ]
    outputs = llm.generate(list(PROMPTS), samplings, use_tqdm=False)
    arguments.answers.write_text(json.dumps([list(o.outputs[0].token_ids) for o in outputs]))


if __name__ == "__main__":
    main()
