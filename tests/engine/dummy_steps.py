"""Steps without a request: what an idle data-parallel rank runs, and profiling's widest step."""

IDLE = 3


def play(llm, generate) -> dict:
    """What is served after each kind, and by how much it raised the step count of each layer."""
    from expert_cache_shim import arming

    (report,) = arming.reports()

    def steps() -> list[int]:
        return [layer.cache.calls() for layer in report.armed]

    counts = [steps()]
    for _ in range(IDLE):
        llm.collective_rpc("execute_dummy_batch")
    counts.append(steps())
    llm.collective_rpc(profile)
    counts.append(steps())
    return {"after": generate(), "counts": counts}


def profile(worker) -> None:
    worker.model_runner.profile_run()
