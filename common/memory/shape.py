"""What memory depends on of a model: numbers of parameters and widths, by its config.json alone."""

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
    """What memory depends on. Widths are of one token in one layer."""

    parameters: int
    frozen: int  # of them, of a tower that is not trained
    adapters: int  # of LoRA, on top
    root: int  # parameters outside of layers, which FSDP2 gathers for all of a forward and backward
    head: int  # of them a head that is not the embeddings: a critic has none
    block: int  # parameters of the largest layer
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    queries: int  # heads x head size
    keys: int  # heads of keys x head size
    norms: int  # all norms of a layer together, but for those of heads
    head_norms: int  # those of queries and keys
    mlp: int  # of experts those that a token visits
    experts: int  # that a token visits; 0: dense
    tower: TowerShape | None = None

    @property
    def backbone(self) -> "ModelShape":
        """A critic's: its own head is a vector."""
        return replace(
            self, parameters=self.parameters - self.head, root=self.root - self.head, head=0
        )


def model_shape(path: str, machine: Machine) -> ModelShape:
    """Of the model in a folder; no weights are read."""
    model = skeleton(path, machine.trust_remote_code)
    text = model.config.get_text_config()
    blocks = repeated_blocks(model)
    blocks_of_text = repeated_blocks(getattr(model.base_model, "language_model", model))
    parameters = count_parameters(model)
    in_blocks = sum(count_parameters(block) for block in blocks)
    tower = sum(p.numel() for name, p in model.named_parameters() if "visual." in name)
    head = model.get_output_embeddings()
    own_head = head is not None and head.weight is not model.get_input_embeddings().weight
    heads = getattr(text, "num_attention_heads", None) or 1
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    queries = heads * head_size
    keys = (getattr(text, "num_key_value_heads", None) or heads) * head_size
    shape = ModelShape(
        parameters=parameters,
        frozen=tower if machine.freeze_vision else 0,
        adapters=0,
        root=parameters - in_blocks,
        head=head.weight.numel() if own_head else 0,
        block=max((count_parameters(block) for block in blocks), default=0),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        heads=heads,
        queries=queries,
        keys=keys,
        norms=max((width_of_norms(block, text.hidden_size) for block in blocks_of_text), default=0),
        head_norms=queries + keys if any(map(has_head_norms, blocks_of_text)) else 0,
        mlp=mlp_width(text),
        experts=getattr(text, "num_experts_per_tok", None) or 0,
        tower=tower_shape(model.config)
        if tower and not (machine.freeze_vision or machine.lora_rank)
        else None,
    )
    if machine.lora_rank:
        add_adapters(model, blocks_of_text, machine)
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        shape = replace(shape, adapters=adapters)
    return shape


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def width_of_norms(block: nn.Module, hidden: int) -> int:
    """Values of a token that the norms of a layer compute, but for those of single heads."""
    width = 0
    for name, module in block.named_modules():
        if type(module).__name__.endswith("Norm") and name.rpartition(".")[2] not in HEAD_NORMS:
            weight = getattr(module, "weight", None)
            width += hidden if weight is None else weight.numel()
    return width


def has_head_norms(block: nn.Module) -> bool:
    return any(name.rpartition(".")[2] in HEAD_NORMS for name, _ in block.named_modules())


def mlp_width(text: Any) -> int:
    """Intermediate values of a token, of all the experts that it visits."""
    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    experts = getattr(text, "num_experts_per_tok", None)
    if not experts:
        return dense
    of_expert = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    shared += of_expert * (getattr(text, "n_shared_experts", None) or 0)
    return experts * of_expert + shared


def tower_shape(config: Any) -> TowerShape:
    vision = config.vision_config
    # Qwen2-VL's hidden_size is the output's
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    mlp = getattr(vision, "intermediate_size", None) or int(
        hidden * getattr(vision, "mlp_ratio", 4)
    )
    return TowerShape(vision.depth, hidden, mlp)
