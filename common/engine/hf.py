"""The rollout engine's twin on transformers alone: for machines without vLLM, and as an independent
check of it."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.engine.books import WeightBooks
from common.engine.protocol import EngineConfig, Weights, without_placeholder
from common.files import memory_advice, refuse
from common.progress import Progress
from common.rotary import check_lengths, num_positions
from common.torch_repair import transformers
from common.types import Completion, Request, Sampling
from common.vision import auto_class, clamped

MAX_SEQUENCES = 256  # of a batch


class HuggingFaceEngine:
    """The methods of `VllmEngine`; batches of as many requests as fit into the KV cache, one token
    a forward."""

    def __init__(self, config: EngineConfig):
        trust, vision = config.trust_remote_code, config.vision
        architecture = transformers.AutoConfig.from_pretrained(config.path, trust_remote_code=trust)
        positions, length = num_positions(architecture.get_text_config()), config.max_model_len
        flags = f"--max-prompt-tokens and --max-response-tokens: {length} tokens together"
        refuse(
            length > positions,
            f"{flags}, and the model has {positions:.0f} positions (config.json)",
        )
        check_lengths(architecture.get_text_config(), "hf", length)
        load = auto_class(architecture).from_pretrained
        self.model = (
            load(config.path, dtype=config.dtype, trust_remote_code=trust)
            .eval()
            .to(config.world.device)
        )
        self.device, self.dtype, self.vision = config.world.device, config.dtype, vision
        if vision:
            self.model.base_model.visual.merger.register_forward_pre_hook(clamped)
        self.sleep_level, self.max_model_len = config.sleep_level, config.max_model_len
        self.end_ids = [*config.end_ids, *(vision.forbidden_ids if vision else ())]
        text = architecture.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = (
            2
            * heads
            * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        )
        token_bytes = text.num_hidden_layers * width * self.dtype.itemsize
        fitting = int(config.memory_gib * 2**30 / (self.max_model_len * token_bytes))
        self.max_sequences = max(1, min(MAX_SEQUENCES, fitting))
        self.requests: list[Request] = []
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self.books = WeightBooks(
            {name: parameter.numel() for name, parameter in self.parameters.items()}
        )

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
        for name, tensor in self.books.record(weights, self.dtype):
            self.parameters[name].copy_(tensor)
        self.books.close(step)

    def submit(self, request: Request) -> None:
        """As `VllmEngine.submit`; a sample's random numbers depend on its seed alone, not on its
        neighbours."""
        self.books.check(request.weights_step)
        self.requests += [
            replace(request, seed=request.seed + j) for j in range(request.sampling.n)
        ]

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    @memory_advice("the rollout")
    @torch.no_grad()
    def step(self) -> list[tuple[int, list[Completion]]]:
        """Complete all requests; those that follow from them come too late for these batches."""
        requests, self.requests = self.requests, []
        completions: dict[int, list[Completion]] = {}
        for start in Progress("sampling", range(0, len(requests), self.max_sequences)):
            batch = requests[start : start + self.max_sequences]
            for request, completion in zip(batch, self._generate_batch(batch)):
                completions.setdefault(request.key, []).append(
                    without_placeholder(completion, self.vision)
                )
        return list(completions.items())

    def _pictures(self, requests: list[Request], width: int) -> tuple[dict, Tensor]:
        """Arguments of the first forward that hold pictures, and M-RoPE positions [3, B, width]."""
        positions = np.zeros((3, len(requests), width), dtype=np.int64)
        for row, request in enumerate(requests):
            ids = request.prompt_ids
            positions[:, row, width - len(ids) :] = self.vision.positions(ids, request.media)
        arguments: dict = {}
        for kind, suffix in (("image", ""), ("video", "_videos")):
            if media := [m for request in requests for m in request.media if m.kind == kind]:
                patches, grids = self.vision.patches(media, self.device)
                arguments |= {f"pixel_values{suffix}": patches, f"{kind}_grid_thw": grids}
        return arguments, torch.from_numpy(positions).to(self.device)

    def _generate_batch(self, requests: list[Request]) -> list[Completion]:
        prompts = [request.prompt_ids for request in requests]
        width = max(len(prompt) for prompt in prompts)
        # left-padded
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor(
            [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device
        )
        positions, pictures = (mask.cumsum(-1) - 1).clamp(min=0), {}
        if self.vision:
            pictures, positions = self._pictures(requests, width)
        generators = [
            torch.Generator(self.device).manual_seed(request.seed) for request in requests
        ]
        results = [Completion([], [], "length") for _ in requests]
        running = list(range(len(requests)))
        cache = transformers.DynamicCache(config=self.model.config)
        limits = [
            min(r.sampling.max_tokens, self.max_model_len - len(r.prompt_ids)) for r in requests
        ]
        sampling = requests[0].sampling  # of a batch only max_tokens differ
        for length in Progress("token", range(1, max(limits) + 1)):
            inputs = {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": positions,
                **pictures,
            }
            output = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            pictures = {}
            tokens, logprobs = sample(
                output.logits[:, -1], sampling, [generators[i] for i in running]
            )
            keep = []
            for row, i in enumerate(running):
                results[i].token_ids.append(tokens[row].item())
                results[i].logprobs.append(logprobs[row].item())
                if results[i].token_ids[-1] in self.end_ids:
                    results[i].finish_reason = "stop"
                elif length < limits[i]:
                    keep.append(row)
            if not keep:
                break
            if len(keep) < len(running):
                cache.batch_select_indices(torch.tensor(keep, device=self.device))
                running = [running[row] for row in keep]
            ids = tokens[keep, None]
            mask = torch.cat([mask[keep], mask.new_ones(len(keep), 1)], -1)
            positions = positions[..., keep, -1:] + 1
        return results


def sample(
    logits: Tensor, sampling: Sampling, generators: list[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Next tokens [B] and their log-probs [B] from logits [B, V], row b with its own generator."""
    if sampling.temperature == 0:
        logprobs = logits.float().log_softmax(-1)
        tokens = logprobs.argmax(-1)
    else:
        scaled = logits.float() / sampling.temperature
        if sampling.top_p < 1:
            scaled = transformers.TopPLogitsWarper(sampling.top_p)(None, scaled)
        logprobs = scaled.log_softmax(-1)
        noise = [
            torch.empty_like(row).exponential_(generator=g) for row, g in zip(logprobs, generators)
        ]
        # the exponential form of Gumbel-max
        tokens = (logprobs.exp() / torch.stack(noise)).argmax(-1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
