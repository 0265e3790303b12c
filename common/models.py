"""The policy, how models are loaded, and how the policy's weights reach the engine."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from common.attention import block_masks, flash_inputs, register_attention
from common.distributed import gathered, repeated_blocks, reshard
from common.engine.protocol import Engine, Weights
from common.exactness import checked_skeleton
from common.files import user_errors
from common.flags import Machine
from common.hub import check_weights
from common.logprobs import LogitTransform, is_greedy, token_logprobs
from common.lora import adapted_layers, add_adapters, merged
from common.offload import HostBase
from common.packing import MicroBatch
from common.pictures import blank
from common.recurrent import is_recurrent, recurrent_inputs, share_prompts
from common.rotary import num_positions, set_text_lengths
from common.torch_repair import transformers
from common.vision import Vision, attend_in_windows, auto_class, clamp_inputs, is_composite
from common.weights import as_saved, saved_buffers

# attributes of a config by which the logits are multiplied, divided or capped
LOGIT_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
LOGIT_DIVISORS = ("logits_scaling",)
LOGIT_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def logit_transform(config) -> LogitTransform:
    """What a model of this configuration makes of its head's products."""
    text_config = config.get_text_config()
    scale = 1.0
    for name in LOGIT_FACTORS:
        scale *= getattr(text_config, name, None) or 1.0
    for name in LOGIT_DIVISORS:
        scale /= getattr(text_config, name, None) or 1.0
    softcap = None
    for name in LOGIT_SOFTCAPS:
        softcap = softcap or getattr(text_config, name, None)
    return LogitTransform(scale, softcap or None)


def hidden_states(
    model: nn.Module, batch: MicroBatch, attention: str, vision: Vision | None
) -> Tensor:
    """Last hidden states [N, H] at which the trained tokens of a micro-batch are predicted."""
    inputs = {"position_ids": batch.position_ids, "attention_mask": None, "use_cache": False}
    if vision:
        inputs |= embed_pictures(model, batch, vision)
        model = model.language_model
    else:
        inputs["input_ids"] = batch.input_ids
    if attention == "flex":
        window = getattr(model.config.get_text_config(), "sliding_window", None)
        device = batch.input_ids.device
        inputs["masks"] = block_masks(batch.units, (None, window), device)
    elif attention == "flash":
        inputs |= flash_inputs(batch.units, batch.input_ids.device)
    elif attention == "sdpa":
        inputs["units"] = batch.units
    if attention != "rows" and is_recurrent(model.config):
        inputs |= recurrent_inputs(batch.units)
    hidden = model(**inputs).last_hidden_state  # [B, L, H]
    return take(hidden.flatten(0, 1), batch.hidden_index)


def take(values: Tensor, index: Tensor) -> Tensor:
    """values[index]; where indices repeat, its gradient is added up in a fixed order. Threads race
    in the backward of `values[index]` on CPUs, and in that of `index_select` on GPUs."""
    return values.index_select(0, index) if values.device.type == "cpu" else values[index]


def embed_pictures(model: nn.Module, batch: MicroBatch, vision: Vision) -> dict[str, object]:
    """Arguments of the language model: embeddings [B, L, H] of a micro-batch, those of placeholders
    replaced by the features of pictures. With DeepStack (arXiv 2406.04334) also the features [S, H]
    that are added at the placeholders [B, L] to the outputs of the first layers.

    Every rank runs the vision tower on every micro-batch, on a blank picture if there is none: the
    tower takes part in collectives.
    """
    embeddings = model.get_input_embeddings()(batch.input_ids)
    is_trained = any(parameter.requires_grad for parameter in model.visual.parameters())
    with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
        media = batch.media or [blank(vision.limits.cell)]
        patches, grids = vision.patches(media, embeddings.device)
        output = model.visual(patches.to(model.visual.dtype), grid_thw=grids)
        features = output.pooler_output.to(embeddings.dtype)
        # the features of some of the tower's layers
        deepstack = getattr(output, "deepstack_features", None) or []
    if not batch.media:  # 0 times its features: so the tower has its backward, too
        unused = sum(level.sum() for level in [features, *deepstack])
        return {"inputs_embeds": embeddings + 0 * unused}
    pictures = take(features, batch.feature_index)
    flat = embeddings.flatten(0, 1).index_put((batch.slots,), pictures)
    inputs: dict[str, object] = {"inputs_embeds": flat.view_as(embeddings)}
    if deepstack:
        is_placeholder = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        is_placeholder.view(-1)[batch.slots] = True
        inputs["visual_pos_masks"] = is_placeholder
        inputs["deepstack_visual_embeds"] = [
            take(level, batch.feature_index) for level in deepstack
        ]
    return inputs


class Policy(nn.Module):
    """A causal language model whose forward returns log-probs and entropies of the trained tokens.

    The head is applied inside `forward`, which FSDP2 wraps: outside of it, `lm_head.weight` would
    be a shard.
    """

    def __init__(self, model: nn.Module, attention: str, vision: Vision | None = None):
        super().__init__()
        self.model = model
        self.attention = attention
        self.vision = vision
        # with --offload base: the frozen weights of this model, and of a critic if there is one,
        # which are on the host while the engine is awake
        self.host_bases: list[HostBase] = []

    def forward(
        self, batch: MicroBatch, temperature: float = 1.0, with_greedy: bool = False
    ) -> tuple[Tensor, ...]:
        """(log p of the trained tokens [N], entropy [N]) at the sampling temperature, float32
        (float64 for float64).

        `with_greedy` adds whether they are the most likely ones, [N] bool.
        """
        hidden = hidden_states(self.model.base_model, batch, self.attention, self.vision)
        head = self.model.get_output_embeddings().weight
        transform = logit_transform(self.model.config)
        logprobs, entropy = token_logprobs(hidden, head, batch.targets, temperature, transform)
        if with_greedy:
            return logprobs, entropy, is_greedy(hidden, head, batch.targets)
        return logprobs, entropy

    def own_logits(self, ids: Tensor) -> Tensor:
        """The logits [1, L, V] that transformers' model itself makes of a text [1, L]."""
        return self.model(input_ids=ids, use_cache=False).logits


def load_model(
    path: str,
    attention: str,
    *,
    flag: str = "--model",
    dtype: torch.dtype = torch.float32,
    recurrent_kernels: str = "torch",
    gradient_checkpointing: bool = False,
    compile_layers: bool = False,
    activation_memory: float = 1.0,
    trust_remote_code: bool = False,
    from_scratch: bool = False,
    vision: Vision | None = None,
    freeze_vision: bool = False,
    lora_flags: Machine | None = None,
    seed: int = 0,
    max_model_len: int | None = None,
    model_class: type[nn.Module] = Policy,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> nn.Module:
    """The model of a folder, wrapped by `model_class` and then by `wrap`: parameters in `dtype`
    (float32 master weights by default), no dropout. Weights that `wrap` shards are read as shards,
    never as a whole.

    flag: the one that names the folder, for messages. model_class: `Policy`, or a critic on the
    backbone of a language model or reward model. from_scratch: take the architecture from the
    folder's config.json and initialise at random. lora_flags: the layers of the language model get
    adapters, initialised with `seed`, and everything else is frozen. max_model_len: that of the
    engine that samples for the model, see `set_text_lengths`. activation_memory: the share of the
    activations that compiled layers keep for their backward. recurrent_kernels: "torch" or "fla".
    SystemExit for a model that cannot be trained here, and for files that cannot be read or do not
    match it.
    """
    is_critic = not issubclass(model_class, Policy)
    empty_model = checked_skeleton(path, attention, trust_remote_code, flag)
    if not from_scratch:
        check_weights(empty_model, path, flag, headless=is_critic)
    if is_critic and max_model_len is not None:  # the engine checks the policy's
        check_critic_positions(empty_model, path, max_model_len)
    register_attention()
    if attention != "rows" and is_recurrent(empty_model.config):
        if compile_layers:
            raise SystemExit(
                f"--compile: the recurrent layers of {flag} {path} compile every pack anew"
            )
        # all models of its kind, and so the one that is loaded
        share_prompts(empty_model, recurrent_kernels)
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    disable_dropout(config)
    # filled by `assemble`, before FSDP2 renames the classes by which the layers are found
    language_layers: list[nn.Module] = []

    def assemble(model: nn.Module) -> nn.Module:
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        language_model = getattr(model.base_model, "language_model", model)
        if vision:
            model.base_model.visual.requires_grad_(not freeze_vision)
            prepare_tower(model.base_model.visual, vision, attention)
        elif is_composite(model.config):  # text trains the language model alone
            for name, part in model.base_model.named_children():
                part.requires_grad_(name == "language_model")
        language_layers.extend(repeated_blocks(language_model))
        # before FSDP2 wraps the model: a head tied later would be gathered and reduced twice
        model.tie_weights()
        return wrap(model_class(model, attention, vision))

    options = {
        "dtype": dtype,
        "attn_implementation": attention_implementation(config, attention, vision),
        "trust_remote_code": trust_remote_code,
    }
    if from_scratch:
        wrapped = assemble(auto_class(config).from_config(config, **options))
    else:
        wrapped = read_weights(path, flag, config, assemble, options)
        if config.tie_word_embeddings and not is_critic:
            check_tied_head(wrapped.model, path, flag)
    if lora_flags:
        add_adapters(wrapped.model, language_layers, lora_flags, seed)
    if compile_layers:
        # not the vision tower: pictures have many sizes, and each would be compiled anew
        compile_in_place(language_layers, activation_memory)
    set_text_lengths(wrapped, max_model_len)
    return wrapped.train()


def prepare_tower(tower: nn.Module, vision: Vision, attention: str) -> None:
    """Clamp what a vision tower's merger reads, as the engine does, and attend in few calls."""
    if vision.family.clamps_merger:
        tower.merger.register_forward_pre_hook(clamp_inputs)
    if attention != "flash":
        for block in tower.blocks:
            attend_in_windows(block.attn)


def compile_in_place(layers: list[nn.Module], activation_memory: float) -> None:
    """Compile each layer by itself. activation_memory: the share of its activations that a layer
    keeps for its backward."""
    from torch._functorch import config as functorch

    functorch.activation_memory_budget = activation_memory
    # layers of several kinds, with adapters and without, with gradients and without
    torch._dynamo.config.recompile_limit = 32
    for layer in layers:
        layer.compile()


def check_critic_positions(model: nn.Module, path: str, max_model_len: int) -> None:
    """SystemExit if a critic was made for shorter sequences than the engine samples."""
    positions = num_positions(model.config.get_text_config())
    if max_model_len > positions:
        lengths = f"--max-prompt-tokens and --max-response-tokens: {max_model_len} tokens together"
        raise SystemExit(
            f"{lengths}, and --critic-model {path} has {positions:.0f} positions (config.json)"
        )


def check_tied_head(model: nn.Module, path: str, flag: str) -> None:
    """SystemExit if config.json ties the head to the embeddings, but the weight files hold another
    head: transformers has not tied it then."""
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise SystemExit(
            f"{flag} {path}: tie_word_embeddings is true, and its files have a head of their own"
        )


def attention_implementation(
    config, attention: str, vision: Vision | None
) -> str | dict[str, str | None] | None:
    """What transformers calls `attention`; with vision, for each part of the model. None: its
    default."""
    names = {
        "flash": "packed_flash",
        "flex": "shared_prompts_flex",
        "sdpa": "shared_prompts",
        "rows": None,
    }
    name = names[attention]
    if attention == "rows" and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        name = "eager"  # transformers' SDPA leaves the cap out, without a word
    if not vision:
        return name
    # a tower has no prompts to share
    tower = "flash_attention_2" if attention == "flash" else "sdpa"
    return {"text_config": name, "vision_config": tower}


def disable_dropout(config) -> None:
    """Turn off dropout in the language model's config, in place: the engine has none, and on-policy
    ratios would not be 1."""
    text_config = config.get_text_config()
    for name, value in list(vars(text_config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(text_config, name, 0.0)


def read_weights(path: str, flag: str, config, assemble: Callable, options: dict) -> nn.Module:
    """What `assemble(model)` returns, with the weights of a folder.

    transformers makes the model on the meta device, and then reads each parameter in the form that
    it has at that moment, whole or sharded. It has no hook between the two steps, so during this
    call its second step is replaced.

    By hand (`from_config` on the meta device, then `convert_and_load_state_dict_in_model` and
    `_finalize_model_loading`) bits, memory and seconds are the same: results/benchmarks/README.md.
    But that uses more private functions, and we would have to find the dtypes of parameters, the
    files and the generation config ourselves.
    """
    base = transformers.PreTrainedModel
    read = base._load_pretrained_model
    assembled: list[nn.Module] = []

    def assemble_and_read(model: nn.Module, *arguments: object, **kwargs: object) -> object:
        assembled.append(assemble(model))
        return read(model, *arguments, **kwargs)

    problem = f"{flag} {path}: its weights cannot be read (are all files there, and whole?)"
    base._load_pretrained_model = staticmethod(assemble_and_read)
    try:
        with user_errors(problem):
            auto_class(config).from_pretrained(path, config=config, **options)
    finally:
        base._load_pretrained_model = staticmethod(read)
    return assembled[0]


@torch.no_grad()  # while it runs, not while it waits for the next call
def full_parameters(
    policy: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name in the model, whole tensor) of what a checkpoint has of it, in a fixed order.

    A parameter is cast to `dtype` and gathered only when the iterator reaches it. Adapters are
    merged, in the dtype of the frozen weight. Buffers keep their dtype: the router's bias decides
    between experts in float32. All ranks must exhaust the iterator together. A tied head is yielded
    under both names: an engine that keeps a repacked copy of the head would otherwise keep the old
    one.
    """
    reshard(policy)
    model = policy.model
    head = model.get_output_embeddings().weight
    device = policy.host_bases[0].device if policy.host_bases else head.device
    layer_of_name = dict(adapted_layers(model))
    for name, parameter in model.named_parameters(remove_duplicate=True):
        layer_name, _, kind = name.rpartition(".")
        if kind in ("lora_A", "lora_B"):
            continue
        adapted_layer = layer_of_name.get(layer_name) if kind == "weight" else None
        tensor = parameter.detach().to(device)  # it may be on the host
        if dtype is not None and adapted_layer is None:
            tensor = tensor.to(dtype)
        tensor = gathered(tensor)
        if adapted_layer is not None:
            tensor = merged(tensor, adapted_layer.lora_A, adapted_layer.lora_B, adapted_layer.scale)
        yield name, tensor
        if parameter is head and "lm_head" not in name:
            yield "lm_head.weight", tensor
    yield from saved_buffers(model)


def engine_weights(engine: Engine, policy: nn.Module) -> Weights:
    """The policy's weights, with the names and in the dtype that the engine takes."""
    weights = full_parameters(policy, engine.dtype)
    if engine.weight_names == "checkpoint":
        return as_saved(policy.model, weights)
    return weights


def sync_engine(engine: Engine, policy: nn.Module, step: int) -> None:
    """Wake the engine, and give it the policy's weights, those of `step`. All ranks call it
    together. With --offload base the policy cannot compute before `sleep_engine`."""
    for base in policy.host_bases:
        base.to_host()
    engine.wake("weights")
    engine.sync_weights(engine_weights(engine, policy), step)
    engine.wake("kv_cache")


def sleep_engine(engine: Engine, policy: nn.Module | None) -> None:
    """Let the engine sleep, and the policy compute. None: there is only the engine, as in tests."""
    engine.sleep()
    if policy is not None:
        for base in policy.host_bases:
            base.to_device()
