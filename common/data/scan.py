"""The scan of all rows of a data set before the first step, once per machine.

It finds rows that cannot be used, and prompts that are too long without tokenising everything.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.data.media import MARKS
from common.data.render import breakdowns_as_bad_rows, encode
from common.distributed import World, gather_objects
from common.pictures import BadRow

MAX_WORDS = 500_000  # words whose numbers of tokens are remembered
UNCOUNTED = 10**12  # "tokens" of a text that makes the tokenizer fail


@dataclass
class ScanReport:
    """What a scan of all rows found. Rows are named by their index. Conversations fill `costs`;
    prompts `kept`, `too_long`, `sources`, `ignored_requests` and `num_templated`."""

    # row -> why it cannot be used; machines may word a reason differently
    bad_rows: dict[int, str] = field(default_factory=dict, compare=False)
    too_long: dict[int, str] = field(default_factory=dict)  # row -> "123 tokens", or another reason
    kept: list[int] = field(default_factory=list)  # all but the bad rows: too long ones too
    # row -> about its number of tokens, to balance ranks
    costs: dict[int, float] = field(default_factory=dict)
    # the data_source of every kept row that has a truth
    sources: set[str] = field(default_factory=set)
    notes: Counter[str] = field(default_factory=Counter)  # note for the user -> number of rows
    # what rows ask for without effect -> number of rows
    ignored_requests: Counter[str] = field(default_factory=Counter)
    num_templated: int = 0  # prompts that the chat template renders
    fingerprint: str = ""  # of all rows

    def note_misreadings(
        self, text: str, pictures: list, has_control_tokens: bool, tokenizer
    ) -> None:
        """Note that a row is read differently from what its author may have meant.

        has_control_tokens: whether a message of the row spells one.
        """
        if not pictures and any(mark in text for mark in MARKS):
            note = "have <image> or <video>, and no column images, image or videos: read as text"
            self.notes[note] += 1
        if has_control_tokens:
            end = tokenizer.eos_token or "<|end|>"
            spaced_end = f"{end[0]} {end[1:]}"
            note = f"spell control tokens in a message: read as text ({end} as {spaced_end})"
            self.notes[note] += 1


@dataclass
class SplitRows:
    """Counts the rows that are trained turn by turn. Its text is a note for the user: what that
    costs."""

    num_rows: int = 0
    num_samples: int = 0
    num_tokens: int = 0  # of all samples
    num_last_tokens: int = 0  # of the last sample of each row: about those of the row as one text

    def add(self, lengths: list[int]) -> None:
        """lengths: of a row's samples, in tokens."""
        self.num_rows += 1
        self.num_samples += len(lengths)
        self.num_tokens += sum(lengths)
        self.num_last_tokens += lengths[-1]

    def __str__(self) -> str:
        return (
            f"are trained turn by turn, as {self.num_samples} samples: the chat template shows "
            f"their earlier turns differently later (docs/sft.md); {self.num_tokens:,} tokens "
            f"instead of {self.num_last_tokens:,}"
        )


class Fingerprint:
    """A hash of rows: of their order and of all that they hold."""

    def __init__(self):
        self.hash = hashlib.blake2b(digest_size=8)

    def add(self, record: dict | str) -> None:
        text = json.dumps(record, default=_as_text, separators=(",", ":"))
        self.hash.update(text.encode() + b"\n")

    def __str__(self) -> str:
        return self.hash.hexdigest()


def _as_text(value: object) -> str:
    """A value that JSON does not know: a picture as its hash; dates, decimals, ... as printed."""
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=8).hexdigest()
    return str(value)


class KnownTokens:
    """Finds tokens that the model has no embedding for.

    A tokenizer has such tokens if some were added and the model's embeddings were not resized.
    """

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
        """BadRow for a text that has an unknown token."""
        if not self.unknown:
            return
        # added tokens are found by a search, without tokenising
        if self.all_added and not any(token in text for token in self.unknown.values()):
            return
        for i in encode(self.tokenizer, text):
            if i in self.unknown:
                raise BadRow(
                    f"has the token {self.unknown[i]!r} of number {i}: the model has embeddings "
                    f"of {self.num_embeddings}, and its tokenizer more tokens"
                )


def max_num_tokens(text: str) -> int:
    """An upper bound for the number of a text's tokens, not counting the token of a space that a
    tokenizer may put in front.

    A token has at least one byte, and NFC can triple the bytes of text that is not ASCII.
    UnicodeEncodeError for half a surrogate pair.
    """
    return len(text) if text.isascii() else 3 * len(text.encode())


class Lengths:
    """Numbers of tokens. Each word is tokenised once: the rows of a data set share most of theirs.

    Tokenizers cut at spaces before they merge, so the sum over words is the number of tokens, or
    close to it. Only a text near the limit, or above it, is tokenised as a whole.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.words: dict[str, int] = {}  # word -> its number of tokens

    def above(self, texts: dict[int, tuple[str, int]], limit: int) -> dict[int, str]:
        """Row -> "123 tokens" for each text that has more than `limit`, or why they cannot be
        counted.

        texts: row -> (text, number of tokens to add to those of the text).
        """
        estimates = self._estimate(texts)
        # a margin for estimates that are too low
        near_limit = [i for i, length in estimates.items() if length + length // 16 + 8 > limit]
        num_tokens = self._count([texts[i][0] for i in near_limit])
        too_long: dict[int, str] = {}
        for i, length in zip(near_limit, num_tokens):
            length += texts[i][1]
            if length >= UNCOUNTED:
                too_long[i] = "the tokenizer breaks down at its text"
            elif length > limit:
                too_long[i] = f"{length} tokens"
        return too_long

    def _estimate(self, texts: dict[int, tuple[str, int]]) -> dict[int, int]:
        """Row -> about its number of tokens. What all texts share is counted once."""
        start, end = shared_ends([text for text, _ in texts.values()])
        shared_words = start.split(" ") + end.split(" ")
        words: dict[int, list[str]] = {}
        for i, (text, _) in texts.items():
            middle = text[len(start) : len(text) - len(end)]
            words[i] = middle.split(" ")
        self._learn(set(shared_words).union(*words.values()))
        num_shared = self._sum(shared_words)
        estimates: dict[int, int] = {}
        for i, (_, extra_tokens) in texts.items():
            estimates[i] = num_shared + self._sum(words[i]) + extra_tokens
        return estimates

    def _learn(self, words: set[str]) -> None:
        """Count the tokens of words that are new."""
        if len(self.words) > MAX_WORDS:
            self.words.clear()
        new_words = sorted(words - self.words.keys())
        num_tokens = self._count([" " + word for word in new_words])
        self.words.update(zip(new_words, num_tokens))

    def _sum(self, words: list[str]) -> int:
        return sum(map(self.words.__getitem__, words))

    def _count(self, texts: list[str]) -> list[int]:
        """Tokens of each text; UNCOUNTED for one that makes the tokenizer fail."""
        if not texts:
            return []
        try:
            with breakdowns_as_bad_rows():
                ids_of_texts = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        except BadRow:
            if len(texts) == 1:
                return [UNCOUNTED]
            return [self._count([text])[0] for text in texts]
        return [len(ids) for ids in ids_of_texts]


def shared_ends(texts: list[str]) -> tuple[str, str]:
    """The start that all texts share, up to a space, and their shared end, from a space on."""
    start = common_start(texts)
    start = start[: start.rfind(" ") + 1]
    end = common_start([text[len(start) :][::-1] for text in texts])[::-1]
    if " " not in end:
        return start, ""
    return start, end[end.find(" ") :]


def common_start(texts: list[str]) -> str:
    if not texts:
        return ""
    first = min(texts)
    last = max(texts)  # in alphabetical order, all others begin with what these two share
    return first[: num_shared(first, last)]


def num_shared(first: Sequence, second: Sequence) -> int:
    """The number of items that both sequences begin with."""
    for i, (a, b) in enumerate(zip(first, second)):
        if a != b:
            return i
    return min(len(first), len(second))


def once_per_machine(
    world: World | None, compute: Callable[[], object], alike: bool = True
) -> object:
    """compute() on the first rank of each machine; its result is returned on all ranks there.

    Without a `world` every process computes for itself. A ValueError is raised on all ranks of the
    machine. With `alike` a ValueError is raised if machines have different results.
    """
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
