"""A reward model: a sequence classifier with one output. It stays on the host, and moves to the
device while it scores."""

from collections.abc import Mapping
from math import inf, nan

import torch
from jinja2 import TemplateError

from common.files import DAMAGE
from common.hub import check_weights
from common.rewards import MAX_SCORE, is_usable, sampled_turns
from common.rotary import length_limits, num_positions, set_text_lengths
from common.torch_repair import transformers
from common.types import Episode, Row, with_replies

CHUNK_TOKENS = 16384  # of one forward, padding included


def check_reward_model(path: str) -> None:
    """SystemExit, before anything is loaded, unless the folder holds a classifier with all its
    weights."""
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = transformers.AutoModelForSequenceClassification.from_config(config)
    except DAMAGE as error:
        raise unreadable(path, error) from error
    check_weights(model, path, "--reward-model")


def unreadable(path: str, error: Exception) -> SystemExit:
    reason = " ".join(str(error).split())[:300]
    return SystemExit(f"--reward-model {path}: no classifier, or damaged ({reason})")


class RewardModel:
    """The model of a folder. SystemExit as from `check_reward_model`, if it has several outputs, or
    if its tokenizer has neither a padding nor a start nor an end token."""

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device):
        check_reward_model(path)
        self.path = path
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            model = transformers.AutoModelForSequenceClassification.from_pretrained(
                path, dtype=dtype
            )
        except DAMAGE as error:
            raise unreadable(path, error) from error
        self.model = model.eval().requires_grad_(False)
        self.device = device
        set_text_lengths(self.model, None)
        # longer texts do not share a batch: its longest would decide the rotary frequencies of all
        self.batched_length = min(length_limits(self.model.config).values(), default=inf)
        num_outputs = self.model.config.num_labels
        if num_outputs != 1:
            raise SystemExit(f"--reward-model {path} has {num_outputs} outputs, expected one")
        if not self.tokenizer.pad_token:
            # the end token only if there is no other: the output is read at the last token that is
            # not padding, and the end token of a text would count as padding
            self.tokenizer.pad_token = self.tokenizer.bos_token or self.tokenizer.eos_token
        if self.tokenizer.pad_token is None:
            raise SystemExit(
                f"--reward-model {path}: its tokenizer has neither a padding nor an end token"
            )
        self.tokenizer.padding_side = "right"
        # transformers finds the padding by the config's id
        text_config = self.model.config.get_text_config()
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        text_config.pad_token_id = self.tokenizer.pad_token_id
        self.num_positions = num_positions(text_config)

    def text(self, row: Row, episode: Episode, response: str, policy_tokenizer) -> str:
        """The conversation in the reward model's template; prompt and response as plain text if the
        prompt is no conversation, or the tokenizer has no template."""
        if isinstance(row.prompt, list) and self.tokenizer.chat_template:
            *earlier_messages, last = row.prompt
            last_message = last | {"content": last["content"] + episode.opening}
            reply = {"role": "assistant", "content": response}
            messages = with_replies([*earlier_messages, last_message], [reply])
            try:
                return self.tokenizer.apply_chat_template(messages, tokenize=False)
            except TemplateError as error:
                raise SystemExit(
                    f"--reward-model {self.path}: its chat template refuses a prompt ({error})"
                ) from error
        return policy_tokenizer.decode(episode.prompt_ids) + response

    @torch.no_grad()
    def score_episodes(
        self, episodes: list[Episode], rows: Mapping[int, Row], policy_tokenizer
    ) -> None:
        """Fill `model_reward` of each episode from the text that the policy sampled; if that is not
        a usable score, the episode's "score" becomes NaN. rows: prompt index -> Row."""
        ids = self._tokenize(episodes, rows, policy_tokenizer)
        # a text that is longer than the model's positions has no score
        scorable = [i for i in range(len(ids)) if len(ids[i]) <= self.num_positions]
        num_long = len(ids) - len(scorable)
        if num_long:
            print(
                f"--reward-model: {num_long} of {len(ids)} texts are longer than its "
                f"{self.num_positions:.0f} positions, and have no score",
                flush=True,
            )
        order = sorted(scorable, key=lambda i: len(ids[i]))
        self.model.to(self.device)
        chunk_tokens = CHUNK_TOKENS
        while order:
            longest = len(ids[order[-1]])
            size = 1
            if longest <= self.batched_length:
                size = max(1, chunk_tokens // max(longest, 1))
            chunk = order[-size:]
            inputs = {"input_ids": [ids[i] for i in chunk]}
            batch = self.tokenizer.pad(inputs, return_tensors="pt").to(self.device)
            try:
                scores = self.model(**batch).logits[:, 0].float().tolist()
            except torch.OutOfMemoryError as error:
                if size == 1:
                    raise SystemExit(
                        "out of GPU memory in --reward-model: take a smaller one"
                    ) from error
                chunk_tokens //= 2
                torch.cuda.empty_cache()
                continue
            for i, score in zip(chunk, scores):
                episodes[i].model_reward = score
            order = order[:-size]
        self.model.to("cpu")
        failed = [episode for episode in episodes if not is_usable(episode.model_reward)]
        for episode in failed:
            episode.set_rewards({**episode.rewards, "score": nan})
        unusable = [e.model_reward for e in failed if e.model_reward is not None]
        if unusable:
            print(
                f"--reward-model: {len(unusable)} of {len(scorable)} scores are not finite or "
                f"above {MAX_SCORE:g} in magnitude, the first: {unusable[0]}",
                flush=True,
            )

    def _tokenize(
        self, episodes: list[Episode], rows: Mapping[int, Row], policy_tokenizer
    ) -> list[list[int]]:
        """The token ids of each conversation."""
        texts = []
        for episode in episodes:
            response = "\n".join(sampled_turns(episode, policy_tokenizer))
            row = rows[episode.prompt_index]
            texts.append(self.text(row, episode, response, policy_tokenizer))
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]
