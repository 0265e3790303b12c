"""The numbers of a model that memory depends on, parameters and widths, by its config.json
alone."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from common.distributed import repeated_blocks
from common.flags import Machine
from common.lora import add_adapters
from common.vision import skeleton

HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class TowerShape:
    """A vision tower's layers."""

    layers: int
    hidden: int
    mlp: int


@dataclass(frozen=True)
class ModelShape:
    """Numbers of parameters, and widths: numbers of values of one token in one layer."""

    parameters: int  # of the whole model, without adapters
    frozen: int  # those of a tower under --freeze-vision
    adapters: int  # those of LoRA
    root: int  # those outside of layers, which FSDP2 gathers for a whole forward and backward
    head: int  # those of a head that is not tied to the embeddings: a critic has none
    block: int  # those of the largest layer
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    queries: int  # heads x head size
    keys: int  # heads of keys x head size
    norms: int  # all norms of a layer together, without those of heads
    head_norms: int  # norms of queries and keys
    mlp: int  # of a mixture: of the experts that a token visits
    experts: int  # number of experts that a token visits; 0: dense
    tower: TowerShape | None = None  # None also of a tower that is not trained

    @property
    def backbone(self) -> "ModelShape":
        """The shape of a critic, whose own head is a vector."""
        parameters = self.parameters - self.head
        return replace(self, parameters=parameters, root=self.root - self.head, head=0)


def model_shape(path: str, machine: Machine) -> ModelShape:
    """The shape of the model in a folder; no weights are read."""
    model = skeleton(path, machine.trust_remote_code)
    text_config = model.config.get_text_config()
    blocks = repeated_blocks(model)
    text_blocks = repeated_blocks(getattr(model.base_model, "language_model", model))
    parameters = count_parameters(model)
    block_sizes = [count_parameters(block) for block in blocks]
    tower_size = sum(p.numel() for name, p in model.named_parameters() if "visual." in name)
    tower = None
    if tower_size > 0 and not machine.freeze_vision and not machine.lora_rank:
        tower = tower_shape(model.config)

    head = model.get_output_embeddings()
    head_parameters = 0
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        head_parameters = head.weight.numel()

    heads = getattr(text_config, "num_attention_heads", None) or 1
    head_size = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    queries = heads * head_size
    keys = (getattr(text_config, "num_key_value_heads", None) or heads) * head_size
    norm_widths = [width_of_norms(block, text_config.hidden_size) for block in text_blocks]
    shape = ModelShape(
        parameters=parameters,
        frozen=tower_size if machine.freeze_vision else 0,
        adapters=0,
        root=parameters - sum(block_sizes),
        head=head_parameters,
        block=max(block_sizes, default=0),
        layers=text_config.num_hidden_layers,
        hidden=text_config.hidden_size,
        vocabulary=text_config.vocab_size,
        heads=heads,
        queries=queries,
        keys=keys,
        norms=max(norm_widths, default=0),
        head_norms=queries + keys if any(map(has_head_norms, text_blocks)) else 0,
        mlp=mlp_width(text_config),
        experts=getattr(text_config, "num_experts_per_tok", None) or 0,
        tower=tower,
    )
    if machine.lora_rank:
        add_adapters(model, text_blocks, machine)
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        shape = replace(shape, adapters=adapters)
    return shape


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def width_of_norms(block: nn.Module, hidden: int) -> int:
    """Values of a token that the norms of a layer compute, without those of single heads."""
    width = 0
    for name, module in block.named_modules():
        if type(module).__name__.endswith("Norm") and name.rpartition(".")[2] not in HEAD_NORMS:
            weight = getattr(module, "weight", None)
            width += hidden if weight is None else weight.numel()
    return width


def has_head_norms(block: nn.Module) -> bool:
    return any(name.rpartition(".")[2] in HEAD_NORMS for name, _ in block.named_modules())


def mlp_width(text_config: Any) -> int:
    """Intermediate values of a token in an MLP, or in all the experts that it visits."""
    dense_width = getattr(text_config, "intermediate_size", None) or 4 * text_config.hidden_size
    experts = getattr(text_config, "num_experts_per_tok", None)
    if not experts:
        return dense_width
    expert_width = getattr(text_config, "moe_intermediate_size", None) or dense_width
    shared_width = getattr(text_config, "shared_expert_intermediate_size", None) or 0
    shared_width += expert_width * (getattr(text_config, "n_shared_experts", None) or 0)
    return experts * expert_width + shared_width


def tower_shape(config: Any) -> TowerShape:
    vision_config = config.vision_config
    # Qwen2-VL's hidden_size is the output's
    hidden = getattr(vision_config, "embed_dim", None) or vision_config.hidden_size
    mlp = getattr(vision_config, "intermediate_size", None)
    if not mlp:
        mlp = int(hidden * getattr(vision_config, "mlp_ratio", 4))
    return TowerShape(vision_config.depth, hidden, mlp)
