"""Serves models one after the other in this process, as its job file says.

    python runner.py JOBS.json RESULTS.json

Runs in a process of its own, started by `engine.py`, because a test needs vLLM with a given
environment from its first import on. Several jobs share one process: importing vLLM takes longer
than serving a tiny model. A job that fails leaves its traceback as its result.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path

from expert_methods import expert_methods

MARK = "=== job "


def generate(llm, job: dict) -> list[list[int]]:
    """Greedy token ids of vLLM, a list for each prompt."""
    from vllm import SamplingParams

    samplings = [
        SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
        for limit in job["max_tokens"]
    ]
    outputs = llm.generate(job["prompts"], samplings, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def serve(job: dict) -> dict:
    """Token ids, the experts' quant methods, and what the job's scenario adds to these."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    for plugin in job["plugins"]:
        importlib.import_module(plugin).install()
    options = dict(job["engine"])
    if "cpu_offload_params" in options:
        options["cpu_offload_params"] = set(options["cpu_offload_params"])  # JSON has no sets
    llm = LLM(model=job["model"], **options)
    try:
        answer = {"tokens": generate(llm, job), "methods": llm.apply_model(expert_methods)[0]}
        if job["scenario"]:
            module, *arguments = job["scenario"]
            play = importlib.import_module(module).play
            answer |= play(llm, partial(generate, llm, job), *arguments)
        return answer
    finally:
        del llm
        cleanup_dist_env_and_memory()


def reference(job: dict) -> dict:
    """Greedy token ids of transformers in float32, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt, limit in zip(job["prompts"], job["max_tokens"]):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = model.generate(ids, max_new_tokens=limit, do_sample=False)
        answers.append(output[0, ids.shape[1] :].tolist())
    return {"tokens": answers}


def run(job: dict) -> dict:
    before = dict(os.environ)
    os.environ.update(job["environment"])
    try:
        return reference(job) if job["reference"] else serve(job)
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        os.environ.clear()
        os.environ.update(before)
        gc.collect()


def main() -> None:
    jobs, results = Path(sys.argv[1]), Path(sys.argv[2])
    answers = []
    for number, job in enumerate(json.loads(jobs.read_text())):
        print(f"{MARK}{number}", flush=True)
        answers.append(run(job))
        results.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
