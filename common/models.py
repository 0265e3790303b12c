"""Policy, critic and reference models, and the walk over full parameters."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from common.attention import block_mask, register_attention
from common.distributed import repeated_blocks, reshard, whole
from common.files import user_errors
from common.flags import Machine
from common.hub import check_weights
from common.logprobs import is_greedy, token_logprobs
from common.lora import adapters, add_adapters, merged
from common.packing import MicroBatch
from common.pictures import blank
from common.rotary import length_limits, num_positions, set_text_lengths
from common.torch_repair import transformers
from common.vision import FAMILY, Vision, auto_class, clamped, skeleton

RESCALED = [
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
]


def hidden_states(
    model: nn.Module, batch: MicroBatch, attention: str, vision: Vision | None
) -> Tensor:
    """Last hidden states [N, H] at which the trained tokens of a micro-batch are predicted."""
    inputs = {"input_ids": batch.input_ids}
    if vision:
        inputs = {"inputs_embeds": embed_pictures(model, batch, vision)}
        model = model.language_model
    hidden = model(
        **inputs,
        position_ids=batch.position_ids,
        attention_mask=block_mask(batch.units, batch.input_ids.device)
        if attention == "flex"
        else None,
        use_cache=False,
        **({"units": batch.units} if attention == "sdpa" else {}),
    ).last_hidden_state
    return hidden[0, batch.hidden_index]


def embed_pictures(model: nn.Module, batch: MicroBatch, vision: Vision) -> Tensor:
    """Embeddings [1, L, H] of a micro-batch, features of pictures in place of their placeholders'.

    Every rank runs the vision tower on every micro-batch, if need be on a blank: it takes part in
    collectives.
    """
    embeddings = model.get_input_embeddings()(batch.input_ids)
    trained = any(p.requires_grad for p in model.visual.parameters())
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        patches, grids = vision.patches(batch.media or [blank()], embeddings.device)
        features = model.visual(patches.to(model.visual.dtype), grid_thw=grids).pooler_output.to(
            embeddings.dtype
        )
    if not batch.media:
        return embeddings + 0 * features.sum()
    return embeddings.index_put(
        (torch.zeros_like(batch.slots), batch.slots), features[batch.features]
    )


class Policy(nn.Module):
    """A causal language model whose forward returns log-probs and entropies of the trained tokens.

    The head is applied inside `forward`, which FSDP2 wraps: outside it, `lm_head.weight` would be a
    shard.
    """

    def __init__(self, model: nn.Module, attention: str, vision: Vision | None = None):
        super().__init__()
        self.model, self.attention, self.vision = model, attention, vision

    def forward(
        self, batch: MicroBatch, temperature: float = 1.0, with_greedy: bool = False
    ) -> tuple[Tensor, ...]:
        """(log p of the trained tokens [N], entropy [N]), float32, at the sampling temperature.

        `with_greedy` adds whether they are the most likely ones, [N] bool.
        """
        hidden = hidden_states(self.model.base_model, batch, self.attention, self.vision)
        head = self.model.get_output_embeddings().weight
        greedy = (is_greedy(hidden, head, batch.targets),) if with_greedy else ()
        return *token_logprobs(hidden, head, batch.targets, temperature), *greedy


class Critic(nn.Module):
    """A backbone of its own with a scalar head, zero at first, so that all values are."""

    def __init__(self, model: nn.Module, attention: str, vision: Vision | None = None):
        super().__init__()
        self.model, self.attention, self.vision = model.base_model, attention, vision
        # without data, if it is on the meta device
        embeddings = self.model.get_input_embeddings().weight
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        self.head = nn.Parameter(torch.zeros(embeddings.shape[1], dtype=dtype))

    def forward(self, batch: MicroBatch) -> Tensor:
        """Value [N], float32, of the state in which each trained token was chosen: read at the
        token before it."""
        hidden = hidden_states(self.model, batch, self.attention, self.vision)
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        return (hidden.to(accumulate) * self.head.to(accumulate)).sum(-1)


def unsupported(model: nn.Module, attention: str) -> str | None:
    """What our log-probs, packs or masks do not express about a model; unnoticed, they would be
    another model's."""
    config = model.config.get_text_config()
    scaled = [name for name in RESCALED if getattr(config, name, None) not in (None, 1, 1.0)]
    kinds = set(getattr(config, "layer_types", None) or [])
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    window = "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None))
    mixed = "in which packed conversations would see each other"
    pictured = model.config.model_type in FAMILY
    problems = {
        f"rescales its logits ({', '.join(scaled)})": scaled,
        "has a head with a bias": getattr(model.get_output_embeddings(), "bias", None) is not None,
        f"has {', '.join(others)} layers, {mixed}": others,
        f"passes its attention no options, {mixed}": config.model_type == "nemotron",  # nor `units`
        "reads pictures, and has rotary frequencies that depend on a text's length": pictured
        and length_limits(config),
        "draws its experts at random in training (router_jitter_noise)": getattr(
            config, "router_jitter_noise", 0
        ),
        f"has recurrent layers, {mixed}": model._is_stateful,
        f"has an attention of its own, {mixed}": not model._supports_attention_backend,
        "has sliding windows (--attention flash has them)": window and attention != "flash",
    }
    return next((problem for problem, found in problems.items() if found), None)


def check_model(path: str, attention: str, trust_remote_code: bool) -> nn.Module:
    """The model of a folder without its weights. SystemExit, by the folder's config.json alone, for
    one that would not be trained as it is sampled from."""
    model = skeleton(path, trust_remote_code)
    if problem := unsupported(model, attention):
        raise SystemExit(f"--model {path}: {model.config.model_type} {problem}, not supported here")
    return model


def load_policy(
    path: str,
    attention: str,
    *,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    compile_layers: bool = False,
    trust_remote_code: bool = False,
    from_scratch: bool = False,
    vision: Vision | None = None,
    freeze_vision: bool = False,
    lora: Machine | None = None,
    seed: int = 0,
    max_model_len: int | None = None,
    make: Callable[..., nn.Module] = Policy,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> nn.Module:
    """The model of a folder with parameters in `dtype` (float32 master weights by default),
    wrapped.

    `from_scratch` takes the architecture from the folder's config.json and initialises at random.
    Without dropout. `make=Critic` makes a critic of its backbone, a reward model's too. With `lora`
    the layers of the language model get adapters, drawn by `seed`, and all else is frozen. What
    `wrap` shards is read in shards, never as a whole. max_model_len: of the engine whose samples it
    is to read, see `set_text_lengths`.
    """
    model = check_model(path, attention, trust_remote_code)
    if not from_scratch:
        flag = "--model" if make is Policy else "--critic-model"
        check_weights(model, path, flag, headless=make is not Policy)
    positions = num_positions(model.config.get_text_config())
    if make is not Policy and (max_model_len or 0) > positions:  # of the policy its engine says so
        lengths = f"--max-prompt-tokens and --max-response-tokens: {max_model_len} tokens together"
        raise SystemExit(
            f"{lengths}, and --critic-model {path} has {positions:.0f} positions (config.json)"
        )
    register_attention()
    implementation = {
        "flash": "flash_attention_2",
        "flex": "shared_prompts_flex",
        "sdpa": "shared_prompts",
    }[attention]
    if vision:  # whose tower has no prompts to share
        tower = implementation if attention == "flash" else "sdpa"
        implementation = {"text_config": implementation, "vision_config": tower}
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    for name in [
        name for name, value in vars(text).items() if "drop" in name and isinstance(value, float)
    ]:
        setattr(text, name, 0.0)  # the engine has no dropout: ratios would not be 1

    readers: list[nn.Module] = []  # layers of the language model

    def assemble(model: nn.Module) -> nn.Module:
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if vision:
            model.base_model.visual.requires_grad_(not freeze_vision)
            model.base_model.visual.merger.register_forward_pre_hook(clamped)
        readers.extend(repeated_blocks(getattr(model.base_model, "language_model", model)))
        # before they are read: FSDP2 would gather and reduce a tied head a second time
        model.tie_weights()
        return wrap(make(model, attention, vision))

    options = {
        "dtype": dtype,
        "attn_implementation": implementation,
        "trust_remote_code": trust_remote_code,
    }
    if from_scratch:
        policy = assemble(auto_class(config).from_config(config, **options))
    else:
        policy = read_weights(path, config, assemble, options)
        head, embeddings = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
        if make is Policy and config.tie_word_embeddings and head.weight is not embeddings.weight:
            raise SystemExit(
                f"--model {path}: tie_word_embeddings is true, and its files have a head of "
                "their own"
            )
    if lora:
        add_adapters(policy.model, readers, lora, seed)
    # not of the tower: every picture has another size
    for layer in readers if compile_layers else ():
        layer.compile()
    set_text_lengths(policy, max_model_len)
    return policy.train()


def read_weights(path: str, config, assemble: Callable, options: dict) -> nn.Module:
    """What `assemble` has made of the model, with the weights of its files.

    transformers makes the model on the meta device, and reads into each parameter what that is:
    whole or a shard.
    """
    made, base = [], transformers.PreTrainedModel
    read = base._load_pretrained_model

    def assemble_and_read(model: nn.Module, *arguments: object, **more: object) -> object:
        made.append(assemble(model))
        return read(model, *arguments, **more)

    base._load_pretrained_model = staticmethod(assemble_and_read)
    try:
        with user_errors(
            f"--model {path}: its weights cannot be read (are all files there, and whole?)"
        ):
            auto_class(config).from_pretrained(path, config=config, **options)
    finally:
        base._load_pretrained_model = staticmethod(read)
    return made[0]


def full_parameters(
    policy: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Walk (name in the Hugging Face checkpoint, whole tensor): one at a time is cast, then
    gathered, in one order.

    Adapters are merged. All ranks must exhaust it together. Tied heads are sent under both names:
    an engine that keeps a repacked copy of the head would otherwise keep the old one.
    """
    reshard(policy)
    model = policy.model
    head, adapted = model.get_output_embeddings().weight, dict(adapters(model))
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=True):
            owner, _, kind = name.rpartition(".")
            if kind in ("lora_A", "lora_B"):
                continue
            layer = adapted.get(owner) if kind == "weight" else None
            tensor = whole(
                parameter.detach() if dtype is None or layer else parameter.detach().to(dtype)
            )
            if layer:
                tensor = merged(tensor, layer.lora_A, layer.lora_B, layer.scale)
            yield name, tensor
            if parameter is head and "lm_head" not in name:
                yield "lm_head.weight", tensor


def sync_engine(engine, policy: nn.Module, step: int) -> None:
    """Wake the engine with the policy's weights, which are those of optimizer step `step`. All
    ranks call it."""
    engine.wake("weights")
    engine.sync_weights(full_parameters(policy, engine.dtype), step)
    engine.wake("kv_cache")
