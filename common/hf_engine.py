"""The rollout engine's twin on transformers alone: for machines without vLLM, and as an independent check of it."""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, TopKLogitsWarper, TopPLogitsWarper

from common.distributed import World
from common.engine import Completion, Sampling, WeightBooks, Weights


class HuggingFaceEngine:
    """The methods of `VllmEngine`; batches of up to `max_sequences` requests, one token a forward."""

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        world: World,
        *,
        end_ids: list[int],
        max_model_len: int,
        memory_gib: float | None = None,
        sleep_level: int = 1,
        max_sequences: int = 256,
        trust_remote_code: bool = False,
    ):
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust_remote_code
        ).eval()
        self.model.to(world.device)
        self.device, self.dtype, self.end_ids, self.sleep_level = world.device, dtype, end_ids, sleep_level
        self.max_model_len, self.max_sequences = max_model_len, max_sequences
        self.books = WeightBooks()

    def wake(self, part: str) -> None:
        if part == "weights" and self.sleep_level:
            self.model.to(self.device)

    def sleep(self) -> None:
        if self.sleep_level:
            self.model.to("cpu")

    @torch.no_grad()
    def sync_weights(self, weights: Weights, expected: dict[str, int], step: int) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in self.books.record(weights, expected, self.dtype):
            parameters[name].copy_(tensor)
        self.books.close(step)

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], sampling: Sampling, seeds: list[int], weights_step: int
    ) -> list[list[Completion]]:
        """As `VllmEngine.generate`; a sample's random numbers depend on its seed alone, not on its neighbours."""
        self.books.check(weights_step)
        requests = [(prompt, seed + j) for prompt, seed in zip(prompts, seeds) for j in range(sampling.n)]
        completions: list[Completion] = []
        for start in range(0, len(requests), self.max_sequences):
            completions += self._generate_batch(requests[start : start + self.max_sequences], sampling)
        return [completions[i : i + sampling.n] for i in range(0, len(completions), sampling.n)]

    def _generate_batch(self, requests: list[tuple[list[int], int]], sampling: Sampling) -> list[Completion]:
        width = max(len(prompt) for prompt, _ in requests)
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in requests], device=self.device)  # left-padded
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in requests], device=self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        generators = [torch.Generator(self.device).manual_seed(seed) for _, seed in requests]
        results = [Completion([], [], "length") for _ in requests]
        running = list(range(len(requests)))
        cache = DynamicCache(config=self.model.config)
        limits = [min(sampling.max_tokens, self.max_model_len - len(prompt)) for prompt, _ in requests]
        for length in range(1, max(limits) + 1):
            output = self.model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            tokens, logprobs = sample(output.logits[:, -1], sampling, [generators[i] for i in running])
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
            positions = positions[keep, -1:] + 1
        return results


def sample(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Next tokens [B] and their log-probs [B] from logits [B, V], row b with its own generator."""
    if sampling.temperature == 0:
        logprobs = logits.float().log_softmax(-1)
        tokens = logprobs.argmax(-1)
    else:
        scaled = logits.float() / sampling.temperature
        if sampling.top_k > 0:
            scaled = TopKLogitsWarper(sampling.top_k)(None, scaled)
        if sampling.top_p < 1:
            scaled = TopPLogitsWarper(sampling.top_p)(None, scaled)
        logprobs = scaled.log_softmax(-1)
        noise = [torch.empty_like(row).exponential_(generator=g) for row, g in zip(logprobs, generators)]
        tokens = (logprobs.exp() / torch.stack(noise)).argmax(-1)  # the exponential form of Gumbel-max
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
