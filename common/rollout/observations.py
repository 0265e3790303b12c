"""Replies of tools and environments as tokens that the policy reads."""

from collections.abc import Sequence

from common.data.protocols import UNSEEN, ToolProtocol
from common.pictures import Media
from common.torch_repair import transformers
from common.types import Row, ToolReply
from common.vision import Vision

PROBE = "7 apples"  # a reply that the chat template must render


class Observations:
    def __init__(
        self,
        tokenizer: "transformers.PreTrainedTokenizerBase",
        protocol: ToolProtocol,
        vision: Vision | None = None,
    ):
        self.tokenizer = tokenizer
        self.protocol = protocol
        self.vision = vision

    def check_role(self, role: str) -> None:
        """ValueError if the chat template leaves out or refuses messages of a role, or does not end
        turns with the end token, or if the tokenizer does not keep that token apart from them."""
        if PROBE not in self.protocol.observation([PROBE], role):
            raise ValueError(
                f"tools: the chat template leaves out messages of role {role!r}: {UNSEEN}"
            )
        self.ids([PROBE], role)

    def can_show(self, role: str) -> bool:
        try:
            self.check_role(role)
        except ValueError:
            return False
        return True

    def prompt_ids(self, row: Row, opening: str) -> list[int]:
        """The tokens of the row's prompt, with an environment's opening at the end of its last
        message."""
        opening = self.protocol.space_control_tokens(opening)
        last = row.messages[-1]
        content = last["content"]
        if isinstance(content, str):
            content = content + opening
        else:
            content = [*content, {"type": "text", "text": opening}]
        messages = [*row.messages[:-1], last | {"content": content}]
        ids = self.tokenizer.encode(self.protocol.prompt(messages), add_special_tokens=False)
        if self.vision:
            ids = self.vision.expand(ids, row.media)
        return ids

    def open_pictures(self, reply: ToolReply) -> list[Media]:
        """The images of a reply, decoded; none for a model without vision. ValueError for one that
        cannot be read."""
        if not self.vision:
            return []
        limits = self.vision.limits
        is_frame = "frames" in reply.info
        return [Media.open("image", [image], limits, is_frame) for image in reply.images]

    def ids(
        self,
        parts: Sequence[str | Media],
        role: str,
        num_pictures: int = 0,
        protocol: ToolProtocol | None = None,
    ) -> list[int]:
        """The tokens between an end-of-turn token and the next turn, from the new message alone.

        num_pictures: shown before. protocol: None for that of the constructor. The message is
        tokenised behind an end-of-turn token, since some tokenizers put a space before the first
        word of a text. ValueError if its tokens depend on what comes before.
        """
        protocol = protocol or self.protocol
        text = protocol.observation(parts, role, num_pictures)
        end = self.tokenizer.eos_token
        # "-": the text of the turn that ends
        before = self.tokenizer.encode("-" + end, add_special_tokens=False)
        whole = self.tokenizer.encode("-" + end + text, add_special_tokens=False)
        ids = whole[len(before) :]
        if whole[: len(before)] != before or before[-1] != self.tokenizer.eos_token_id:
            raise ValueError(
                f"tools: the tokenizer of {self.tokenizer.name_or_path!r} does not keep {end!r} "
                "apart from what follows: take another model"
            )
        if self.vision:
            ids = self.vision.expand(ids, [part for part in parts if isinstance(part, Media)])
        return ids
