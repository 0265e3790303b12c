"""Gigabytes of an update of a Qwen2 under FSDP2, by torch's tracker: nothing is allocated, other
ranks are pretended.

    python tests/workers/tracked_memory.py RANKS TOKENS CONFIG_FOLDER [checkpointing]

Weights, gradients, what FSDP2 gathers and reduces, activations; of a second micro-batch. No moments
of Adam, whose place the tracker takes for whole tensors, and neither attention's nor the head's
work space.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.distributed import wrap_model
from common.torch_repair import transformers


class Opaque(torch.autograd.Function):
    """An attention that keeps what flex attention keeps."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(
            query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def opaque_attention(
    _, query: Tensor, key: Tensor, value: Tensor, mask: None, **options
) -> tuple[Tensor, None]:
    return Opaque.apply(query, key, value).transpose(1, 2).contiguous(), None


class Head(torch.autograd.Function):
    """The shapes that `token_logprobs` keeps and returns."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


class Scored(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return Head.apply(hidden, self.model.get_output_embeddings().weight)


def main(ranks: int, tokens: int, folder: str, checkpointing: bool) -> float:
    transformers.AttentionInterface.register("opaque", opaque_attention)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    config = transformers.AutoConfig.from_pretrained(folder)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="opaque"
        )
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = wrap_model(Scored(model).train(), mesh, torch.bfloat16)
        tracker = FSDPMemTracker(policy)
        tracker.track_inputs(())
        with tracker:
            for _ in range(2):
                policy(torch.zeros(1, tokens, dtype=torch.int64)).backward()
                (peak,) = tracker.get_tracker_snapshot("peak").values()
                tracker.reset_mod_stats()
    return peak["Total"] / 1e9


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], "checkpointing" in sys.argv[4:]))
