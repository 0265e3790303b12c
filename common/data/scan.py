"""A look at all rows of a data set before the first step: lengths without tokenising everything,
once per machine."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from common.data.media import MARKS
from common.data.render import breakdowns_as_bad_rows, encode
from common.distributed import World, gather_objects
from common.pictures import BadRow

MAX_WORDS = 500_000  # whose numbers of tokens are remembered
UNCOUNTED = 10**12  # tokens of a text that the tokenizer breaks down at


@dataclass
class Found:
    """What a look at every row has found: row index -> reason, of those that cannot be used."""

    # machines may word a reason differently
    bad: dict[int, str] = field(default_factory=dict, compare=False)
    too_long: dict[int, str] = field(default_factory=dict)
    # indices of the others, and of those that are too long
    kept: list[int] = field(default_factory=list)
    # about the tokens of each of them, to balance ranks by
    costs: dict[int, float] = field(default_factory=dict)
    # every data_source of a usable row that is to be scored
    sources: set[str] = field(default_factory=set)
    told: Counter[str] = field(default_factory=Counter)  # what is worth knowing of rows
    # of a function that is given as --environment: has no row arguments for it?
    all_answered: bool = False
    unheeded: Counter[str] = field(default_factory=Counter)  # what rows ask for in vain
    templated: int = 0  # prompts that the chat template renders
    fingerprint: str = ""  # of all rows

    def look_at(self, text: str, pictures: list, spelled: bool, tokenizer) -> None:
        """Whether a row is read in another way than it may have been meant. spelled: had it a
        control token?"""
        if not pictures and any(mark in text for mark in MARKS):
            self.told[
                "have <image> or <video>, and no column images, image or videos: read as text"
            ] += 1
        if spelled:
            end = tokenizer.eos_token or "<|end|>"
            self.told[
                f"spell control tokens in a message: read as text ({end} as {end[0]} {end[1:]})"
            ] += 1


class Fingerprint:
    """Of rows in their order, and of all that they hold: of the same number and size others have
    another one."""

    def __init__(self):
        self.sum = hashlib.blake2b(digest_size=8)

    def add(self, record: dict | str) -> None:
        text = json.dumps(record, default=_as_text, separators=(",", ":"))
        self.sum.update(text.encode() + b"\n")

    def __str__(self) -> str:
        return self.sum.hexdigest()


def _as_text(value: object) -> str:
    """What JSON does not know: a picture by its own fingerprint; dates, decimals, ... as they
    print."""
    return (
        hashlib.blake2b(value, digest_size=8).hexdigest()
        if isinstance(value, bytes)
        else str(value)
    )


class KnownTokens:
    """Which tokens of a tokenizer the model has no embedding of: some were added, and its
    embeddings not resized."""

    def __init__(self, tokenizer, num_embeddings: int | None):
        self.tokenizer = tokenizer
        self.num_embeddings = num_embeddings
        self.unknown: dict[int, str] = {}
        if num_embeddings is not None:
            for token, i in tokenizer.get_vocab().items():
                if i >= num_embeddings:
                    self.unknown[i] = token
        self.all_added = self.unknown.keys() <= set(tokenizer.get_added_vocab().values())

    def check(self, text: str) -> None:
        """BadRow for a text with such a token. Tokenises nothing where a search for those that were
        added will do."""
        if not self.unknown or (
            self.all_added and not any(token in text for token in self.unknown.values())
        ):
            return
        for i in encode(self.tokenizer, text):
            if i in self.unknown:
                size = (
                    f"the model has embeddings of {self.num_embeddings}, and its tokenizer "
                    "more tokens"
                )
                raise BadRow(f"has the token {self.unknown[i]!r} of number {i}: {size}")


class Lengths:
    """Numbers of tokens. A word is tokenised once: rows of a data set share most of theirs, or
    their template.

    Tokenizers cut at spaces before they merge, so that the sum over words is the number of tokens.
    Where that is not quite so it is near: a text near the limit is tokenised as a whole.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.words: dict[str, int] = {}

    def above(self, texts: dict[int, tuple[str, int]], limit: int) -> dict[int, str]:
        """Row index -> "123 tokens" of the texts with more than `limit`. texts: row index -> text,
        further tokens."""
        start, end = shared_ends([text for text, _ in texts.values()])
        words = {
            index: text[len(start) : len(text) - len(end)].split(" ")
            for index, (text, _) in texts.items()
        }
        ends = [*start.split(" "), *end.split(" ")]
        if len(self.words) > MAX_WORDS:
            self.words.clear()
        new = sorted(set(ends).union(*words.values()) - self.words.keys())
        self.words |= zip(new, self._count([" " + word for word in new]))
        shared = sum(map(self.words.get, ends))
        about = {
            index: shared + sum(map(self.words.get, words[index])) + more
            for index, (_, more) in texts.items()
        }
        near = [index for index, count in about.items() if count + count // 16 + 8 > limit]
        exact = zip(near, self._count([texts[index][0] for index in near]))
        lengths = {index: count + texts[index][1] for index, count in exact}
        too_long = {
            index: f"{count} tokens"
            for index, count in lengths.items()
            if limit < count < UNCOUNTED
        }
        broken = [index for index, count in lengths.items() if count >= UNCOUNTED]
        return too_long | dict.fromkeys(broken, "the tokenizer breaks down at its text")

    def _count(self, texts: list[str]) -> list[int]:
        if not texts:
            return []
        try:
            with breakdowns_as_bad_rows():
                return [
                    len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]
                ]
        except BadRow:
            if len(texts) == 1:
                return [UNCOUNTED]
            return [count for text in texts for count in self._count([text])]


def shared_ends(texts: list[str]) -> tuple[str, str]:
    """What all texts begin with, up to a space, and what all end with, from a space on."""
    start = common_start(texts)
    start = start[: start.rfind(" ") + 1]
    end = common_start([text[len(start) :][::-1] for text in texts])[::-1]
    return start, end[end.find(" ") :] if " " in end else ""


def common_start(texts: list[str]) -> str:
    first, last = min(texts, default=""), max(texts, default="")
    return first[
        : next(
            (i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last))
        )
    ]


def once_per_machine(
    world: World | None, compute: Callable[[], object], alike: bool = True
) -> object:
    """compute() of the first rank of a machine, on all of its ranks; of this one alone without a
    `world`. A ValueError of it is raised on all of them, and another one if machines that are to be
    `alike` differ in it."""
    if world is None:
        return compute()
    result = None
    if world.local_rank == 0:
        try:
            result = compute()
        except ValueError as error:
            result = error
    results = gather_objects(result)
    result = results[world.rank - world.local_rank]
    if isinstance(result, ValueError):
        raise result
    if alike and any(other not in (None, result) for other in results):
        raise ValueError(
            "the machines find different rows usable: are files and pictures the same on all "
            "of them?"
        )
    return result
