"""The rollout engine on transformers alone: for machines without vLLM, and as an independent check
of it."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.engine.books import WeightBooks
from common.engine.protocol import Engine, EngineConfig, Weights, without_placeholder
from common.files import memory_advice
from common.pictures import Media
from common.progress import Progress
from common.rotary import check_lengths, num_positions
from common.torch_repair import transformers
from common.types import Completion, Request, Sampling
from common.vision import auto_class, clamp_inputs, placeholder_ids
from common.weights import saved_buffers

MAX_SEQUENCES = 256  # of a batch


class HuggingFaceEngine(Engine):
    """Samples in batches of as many requests as fit into the KV cache; each forward adds one token
    to each request of the batch."""

    def __init__(self, config: EngineConfig):
        model_config = transformers.AutoConfig.from_pretrained(
            config.path, trust_remote_code=config.trust_remote_code
        )
        text_config = model_config.get_text_config()
        positions = num_positions(text_config)
        if config.max_model_len > positions:
            raise SystemExit(
                f"--max-prompt-tokens and --max-response-tokens: {config.max_model_len} tokens "
                f"together, and the model has {positions:.0f} positions (config.json)"
            )
        check_lengths(text_config, "hf", config.max_model_len)
        options: dict[str, object] = {"dtype": config.dtype}
        if getattr(text_config, "attn_logit_softcapping", None):
            options["attn_implementation"] = "eager"  # transformers' SDPA drops the cap in silence
        model = auto_class(model_config).from_pretrained(
            config.path, trust_remote_code=config.trust_remote_code, **options
        )
        self.model = model.eval().to(config.world.device)
        self.device = config.world.device
        self.dtype = config.dtype
        self.weight_names = "modules"
        self.vision = config.vision
        self.sleep_level = config.sleep_level
        self.max_model_len = config.max_model_len
        self.placeholders = placeholder_ids(model_config)
        # a placeholder of a picture ends the response: see without_placeholder
        self.end_ids = [*config.end_ids, *self.placeholders]
        if self.vision and self.vision.family.clamps_merger:
            self.model.base_model.visual.merger.register_forward_pre_hook(clamp_inputs)
        sequence_bytes = self.max_model_len * cache_bytes_of_token(text_config, self.dtype)
        num_fitting = int(config.memory_gib * 2**30 / sequence_bytes)
        self.max_sequences = max(1, min(MAX_SEQUENCES, num_fitting))
        self.requests: list[Request] = []  # one for each sample
        sizes = {name: tensor.numel() for name, tensor in all_weights(self.model).items()}
        self.books = WeightBooks(sizes)

    @memory_advice("the weight sync")
    def wake(self, part: str) -> None:
        if part == "weights" and self.sleep_level:
            self.model.to(self.device)

    def sleep(self) -> None:
        if self.sleep_level:
            self.model.to("cpu")

    @memory_advice("the weight sync")
    @torch.no_grad()
    def sync_weights(self, weights: Weights, step: int) -> None:
        recorded = self.books.record(weights)
        own_weights = all_weights(self.model)  # now: sleep and wake replace the buffers of a GPU
        for name, tensor in recorded:
            own_weights[name].copy_(tensor)
        self.books.close(step)

    def submit(self, request: Request) -> None:
        """Queue each sample as a request of its own: its random numbers depend on its seed alone,
        not on its neighbours in a batch."""
        self.books.check(request.weights_step)
        for sample_index in range(request.sampling.n):
            self.requests.append(replace(request, seed=request.seed + sample_index))

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    @memory_advice("the rollout")
    @torch.no_grad()
    def step(self) -> list[tuple[int, list[Completion]]]:
        """Complete all requests that have been submitted so far."""
        requests = self.requests
        self.requests = []
        completions: dict[int, list[Completion]] = {}
        for start in Progress("sampling", range(0, len(requests), self.max_sequences)):
            batch = requests[start : start + self.max_sequences]
            for request, completion in zip(batch, self._generate_batch(batch)):
                completion = without_placeholder(completion, self.placeholders)
                completions.setdefault(request.key, []).append(completion)
        return list(completions.items())

    def _vision_inputs(self, requests: list[Request], width: int) -> tuple[dict, Tensor]:
        """Arguments of the first forward that hold pictures, and M-RoPE positions [3, B, width]."""
        positions = np.zeros((3, len(requests), width), dtype=np.int64)
        for row, request in enumerate(requests):
            ids = request.prompt_ids
            positions[:, row, width - len(ids) :] = self.vision.positions(ids, request.media)
        media: list[Media] = []
        for request in requests:
            media += request.media
        images = [picture for picture in media if picture.kind == "image"]
        videos = [picture for picture in media if picture.kind == "video"]
        arguments: dict[str, Tensor] = {}
        if images:
            patches, grids = self.vision.patches(images, self.device)
            arguments["pixel_values"] = patches
            arguments["image_grid_thw"] = grids
        if videos:
            patches, grids = self.vision.patches(videos, self.device)
            arguments["pixel_values_videos"] = patches
            arguments["video_grid_thw"] = grids
        return arguments, torch.from_numpy(positions).to(self.device)

    def _generate_batch(self, requests: list[Request]) -> list[Completion]:
        """A completion of each request. Those that are complete leave the batch."""
        ids, mask = left_padded([request.prompt_ids for request in requests], self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        vision_inputs: dict[str, Tensor] = {}
        if self.vision:
            vision_inputs, positions = self._vision_inputs(requests, width=ids.shape[1])
        generators = []
        max_lengths = []
        for request in requests:
            generators.append(torch.Generator(self.device).manual_seed(request.seed))
            room = self.max_model_len - len(request.prompt_ids)
            max_lengths.append(min(request.sampling.max_tokens, room))
        sampling = requests[0].sampling  # within a batch only max_tokens differs
        completions = [Completion([], [], "length") for _ in requests]
        running = list(range(len(requests)))  # for each row of the batch, its index in `requests`
        cache = transformers.DynamicCache(config=self.model.config)
        for length in Progress("token", range(1, max(max_lengths) + 1)):
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                **vision_inputs,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            vision_inputs = {}  # the pictures are in the cache now
            tokens, logprobs = sample(
                output.logits[:, -1], sampling, [generators[i] for i in running]
            )
            # two copies to the host, however many requests there are
            token_ids = tokens.tolist()
            token_logprobs = logprobs.tolist()
            kept_rows = []
            for row, i in enumerate(running):
                completions[i].token_ids.append(token_ids[row])
                completions[i].logprobs.append(token_logprobs[row])
                if token_ids[row] in self.end_ids:
                    completions[i].finish_reason = "stop"
                elif length < max_lengths[i]:
                    kept_rows.append(row)
            if not kept_rows:
                break
            if len(kept_rows) < len(running):
                row_index = torch.tensor(kept_rows, device=self.device)
                # recurrent layers have no batch_select_indices
                cache.reorder_cache(row_index)
                running = [running[row] for row in kept_rows]
                tokens = tokens[row_index]
                mask = mask[row_index]
                positions = positions[..., row_index, :]
            ids = tokens[:, None]
            mask = torch.cat([mask, mask.new_ones(len(kept_rows), 1)], -1)
            positions = positions[..., -1:] + 1  # [B, 1], or [3, B, 1] for M-RoPE
        return completions


def all_weights(model: "transformers.PreTrainedModel") -> dict[str, Tensor]:
    """Parameters, under each of their names, and the buffers that a checkpoint has."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    weights.update(saved_buffers(model))
    return weights


def cache_bytes_of_token(text_config, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of a token in all layers."""
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    head_size = getattr(text_config, "head_dim", None)
    if not head_size:
        head_size = text_config.hidden_size // text_config.num_attention_heads
    return text_config.num_hidden_layers * 2 * heads * head_size * dtype.itemsize


def left_padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both [B, longest prompt] int64."""
    width = max(len(prompt) for prompt in prompts)
    ids = []
    mask = []
    for prompt in prompts:
        padding = [0] * (width - len(prompt))
        ids.append(padding + prompt)
        mask.append(padding + [1] * len(prompt))
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def sample(
    logits: Tensor, sampling: Sampling, generators: list[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Next tokens [B] int64 and their log-probs [B] float32 from logits [B, V], each row with a
    generator of its own."""
    scaled = logits.float()
    if sampling.temperature > 0:
        scaled = scaled / sampling.temperature
        if sampling.top_p < 1:
            scaled = transformers.TopPLogitsWarper(sampling.top_p)(None, scaled)
    logprobs = scaled.log_softmax(-1)
    if sampling.temperature == 0:
        tokens = logprobs.argmax(-1)
    else:  # the exponential form of Gumbel-max
        noise = torch.empty_like(logprobs)
        for row, generator in zip(noise, generators):
            row.exponential_(generator=generator)
        tokens = (logprobs.exp() / noise).argmax(-1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
