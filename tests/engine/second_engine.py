"""Another engine of the same model, alive in the same process."""

from functools import partial


def play(llm, generate: partial) -> dict:
    """What the two serve in turn. vLLM lets no engine go while another is to serve on: its end
    takes the process's groups of ranks with it."""
    from vllm import LLM

    serve, (_, job) = generate.func, generate.args
    other = LLM(model=job["model"], **job["engine"])
    return {
        "second": serve(other, job),
        "first again": generate(),
        "second again": serve(other, job),
        "first at last": generate(),
    }
