"""Prints a line for every layer whose experts are fetched ahead."""


def install() -> None:
    from expert_cache_shim.layer import ExpertCache

    original = ExpertCache.preload
    if original.__name__ == "preload_and_say":
        return

    def preload_and_say(cache, stream):
        print("fetched ahead", flush=True)
        original(cache, stream)

    ExpertCache.preload = preload_and_say
