"""What vLLM does wrong in this process, or to weights that are replaced, and its repair.

Each was seen in vLLM 0.32.0. Without a repair tests fail: `tests/runs/test_engine_families.py`, for
`share_the_machine` test_grpo_engines.py and test_engine_parallel.py beside it.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from common.engine.protocol import Weights


def repair_cpu() -> None:
    """What vLLM gets wrong on CPUs."""
    share_the_machine()
    repack_experts()
    rotate_rows()


def share_the_machine() -> None:
    """On CPUs vLLM assumes that it has the machine to itself: replace what follows from that."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms import cpu

    # gloo instead of vLLM's shared memory, which has one name for all runs of a machine and
    # outlives them
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    # vLLM would have child processes preload libraries that it finds. It has no children here, and
    # each of ours would complain about both halves of a path with a space.
    cpu.glob = SimpleNamespace(glob=lambda pattern: [])


def repack_experts() -> None:
    """On CPUs vLLM packs experts for its kernel when it loads them, and not when they are replaced:
    it would go on with the old ones."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

    method_class = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    set_up = method_class._setup_kernel
    if hasattr(set_up, "repaired"):
        return

    def set_up_and_pack(self, layer: nn.Module, w13: Tensor, w2: Tensor) -> None:
        is_replaced = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if is_replaced:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    set_up_and_pack.repaired = True
    method_class._setup_kernel = set_up_and_pack


def rotate_rows() -> None:
    """vLLM's rotary kernel on CPUs takes each head of [tokens, heads, size], as LFM2 passes it, for
    a token of its own: it rotates the first heads, by wrong positions, and leaves the rest."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu
    if hasattr(rotate, "repaired"):
        return

    def rotate_flat(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if query.dim() < 3:
            return rotate(self, positions, query, key)
        flat_key = None if key is None else key.flatten(1)
        rotated_query, rotated_key = rotate(self, positions, query.flatten(1), flat_key)
        if rotated_key is not None:
            rotated_key = rotated_key.view(key.shape)
        return rotated_query.view(query.shape), rotated_key

    rotate_flat.repaired = True
    RotaryEmbedding.forward_cpu = rotate_flat


def leave_transformers_alone() -> None:
    """For torch.compile vLLM's transformers backend rewrites transformers' class of the decoder,
    which the trainer uses in this process, too. Prevent that: the backend then runs uncompiled."""
    from vllm.model_executor.models.transformers.base import Base

    Base._decorate_for_torch_compile = lambda self: None


class GptOssWeights:
    """The weights of gpt-oss, in a form in which a reload by vLLM replaces them all.

    vLLM copies its fused experts and its sinks past its weight loaders; in a reload such a copy
    writes nowhere. Single experts do have loaders, and sinks are copied when all else is loaded.
    """

    def __init__(self, weights: Weights):
        self.weights = weights
        self.sinks: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            if ".experts." in name:
                experts, _, part = name.rpartition(".")
                for i, expert in enumerate(tensor):
                    yield f"{experts}.{i}.{part}", expert
            elif name.endswith(".sinks"):
                self.sinks[name.replace(".self_attn.", ".attn.")] = tensor.clone()
            else:
                yield name, tensor

    @torch.no_grad()
    def copy_sinks(self, model: nn.Module) -> None:
        """Copy the sinks of this rank's heads into vLLM's model."""
        from vllm.distributed import get_tensor_model_parallel_rank

        for name, tensor in self.sinks.items():
            parameter = model.get_parameter(name)
            heads = len(parameter)
            start = get_tensor_model_parallel_rank() * heads
            parameter.copy_(tensor[start : start + heads])
