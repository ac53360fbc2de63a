"""Reloads a quantised model in checkpoint format, its experts' scales twice what they were."""

from safetensors.torch import load_file


def play(llm, generate, folder: str) -> dict:
    def served(factor: int) -> list[list[int]]:
        weights = load_file(f"{folder}/model.safetensors").items()
        scaled = [(n, t * factor if n.endswith("weight_scale") else t) for n, t in weights]
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": scaled})
        llm.reset_prefix_cache()  # its keys and values are those of the old weights
        return generate()

    return {"doubled": served(2), "as before": served(1)}
