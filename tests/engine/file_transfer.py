"""A way for weights to come while a model serves: vLLM's weight transfer, out of files.

The sessions and the loading are vLLM's own; only the transport is another, because vLLM's need
NCCL or CUDA.
"""

from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine


@dataclass
class Part(WeightTransferUpdateInfo):
    """One of `of` parts of a checkpoint, in the order of its names."""

    folder: str
    number: int
    of: int


class FileTransferEngine(IPCWeightTransferEngine):
    update_info_cls = Part

    def receive_weights(self, part: Part) -> None:
        weights = sorted(load_file(f"{part.folder}/model.safetensors").items())
        first, last = (len(weights) * n // part.of for n in (part.number, part.number + 1))
        self.model.load_weights(weights[first:last])


def install() -> None:
    if "files" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("files", FileTransferEngine)
