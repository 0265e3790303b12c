"""The page of rollouts: complete in itself, hostile texts and broken pictures, boxes and chosen
frames in their place, tokens in shades of their divergence from a teacher.

pytest tests/runs/test_page.py
"""

import base64
import io
import math
import random
import re
from html.parser import HTMLParser

import pytest
from browser import CHROMIUM, SCREENS, Browser, check_screen
from PIL import Image
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from common.files import shorten
from common.hub import FOLDERS, load_tokenizer
from common.look.html import MAX_TEXT
from common.look.page import rollout_page
from common.look.shades import SHADES, Span, mean_divergence, shaded_spans

EVIL = "\"><script>alert('1')</script><img src=x onerror=alert(2)>&lt;&amp; ' </pre></div>"
EVIL += "\0\x1b[31m\x85\u202e\ud800\udfff"
TAG_NAMES = """
html head meta title style body h1 h2 h3 div details summary article aside b pre i p nav a table tr
th td figure figcaption svg defs image use rect text u
"""
TAGS = set(TAG_NAMES.split())


class Node:
    def __init__(self, tag: str, attributes: dict[str, str | None]):
        self.tag = tag
        self.attributes = attributes
        self.children = []

    def __getitem__(self, name: str) -> str:
        return self.attributes[name]

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    def all(self, *tags: str) -> list["Node"]:
        """Descendants in document order."""
        nodes = [c for c in self.children if isinstance(c, Node)]
        return [n for node in nodes for n in [node] * (node.tag in tags) + node.all(*tags)]

    def find(self, tag: str, kind: str) -> list["Node"]:
        return [node for node in self.all(tag) if kind in node.classes]


class Tree(HTMLParser):
    """A strict reader: what is opened must be closed, in order."""

    def __init__(self, page: str):
        super().__init__()
        self.root = Node("", {})
        self.open = [self.root]
        self.feed(page)
        self.close()
        assert self.open == [self.root], [node.tag for node in self.open]

    def handle_starttag(self, tag, attributes):
        node = Node(tag, dict(attributes))
        self.open[-1].children.append(node)
        if tag != "meta":
            self.open.append(node)

    def handle_startendtag(self, tag, attributes):
        self.open[-1].children.append(Node(tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].children.append(data)


def read(episodes: list[dict], title: str = "step 12") -> Node:
    """The page's tree, after the checks that hold for every page."""
    page = rollout_page(title, episodes)
    page.encode("utf-8")  # no lone surrogates
    assert page.startswith("<!doctype html>")
    assert all(c.isprintable() or c == "\n" for c in page)
    root = Tree(page).root
    tags = {node.tag for node in root.all(*re.findall(r"<(\w+)", page))}
    assert tags <= TAGS
    for node in root.all(*tags):
        assert not [name for name in node.attributes if name.startswith("on")]
        for name in ("href", "src", "action"):
            assert node.attributes.get(name, "#").startswith(("#", "data:image/"))
    assert "url(" not in page and "@import" not in page
    return root


def encoded(color="red", size=(60, 40), format="PNG", mode="RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, color).save(file, format)
    return file.getvalue()


def noise(size: tuple[int, int], seed: int = 0) -> bytes:
    """As hard to compress as a picture can be."""
    picture = Image.frombytes("RGB", size, random.Random(seed).randbytes(3 * size[0] * size[1]))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def image(*frames: bytes, kind: str = "image") -> dict:
    return {"kind": kind, "frames": list(frames) or [encoded()], "shown": [56, 28]}


def segment(role: str, text: str, *media: int) -> dict:
    return {"role": role, "text": text, "media": list(media)}


def call(turn: int = 0, **others) -> dict:
    return {
        "turn": turn,
        "name": "crop",
        "arguments": {},
        "text": "",
        "error": False,
        "info": {},
    } | others


def episode(prompt_index: int = 0, sample_index: int = 0, **others) -> dict:
    segments = [
        segment("prompt", f"question {prompt_index}"),
        segment("policy", f"answer {sample_index}"),
    ]
    plain = {
        "finish_reason": "stop",
        "score": 1.0,
        "advantage": 0.5,
        "rewards": {},
        "media": [],
        "calls": [],
    }
    return (
        {"prompt_index": prompt_index, "sample_index": sample_index, "segments": segments}
        | plain
        | others
    )


def pixels(root: Node) -> dict[str, Image.Image]:
    """The embedded pictures by their name."""
    uris = {node["id"]: node["href"] for node in root.all("image")}
    return {
        name: Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
        for name, uri in uris.items()
    }


# --- texts ---


def test_prompts_once_samples_in_order():
    root = read([episode(7, 1), episode(2, 0), episode(7, 0), episode(2, 10), episode(2, 9)])
    assert [node.text for node in root.all("h2")] == ["Prompt 2", "Prompt 7"]
    prompts = [node.all("pre")[0].text for node in root.find("div", "prompt")]
    assert prompts == ["question 2", "question 7"]
    details = root.all("details")
    assert [re.match(r"sample (\d+)", node.text)[1] for node in details] == [
        "0",
        "9",
        "10",
        "0",
        "1",
    ]
    assert ["open" in node.attributes for node in details] == [True, False, False, True, False]
    assert all("question" not in node.text for node in details)
    assert [node.find("div", "policy")[0].all("pre")[0].text for node in details[:2]] == [
        "answer 0",
        "answer 9",
    ]


def test_turns_calls_and_observations_in_order():
    segments = [segment("prompt", "q"), segment("policy", "p0"), segment("observation", "o0")]
    segments += [segment("policy", "p1"), segment("observation", "o1"), segment("policy", "p2")]
    calls = [
        call(0, name="zoom", arguments={"box": [1, 2], "why": "a\n  b"}),
        call(0, name="again"),
    ]
    calls += [
        call(1, name="failing", error=True, text="no such tool"),
        call(1, name="fine", text="is in o1"),
    ]
    (sample,) = read([episode(segments=segments, calls=calls)]).all("details")
    turns = [node for node in sample.all("div") if "turn" in node.classes]
    assert [node.classes[1] for node in turns] == (
        [
            "policy",
            "call",
            "call",
            "observation",
            "policy",
            "error",
            "call",
            "observation",
            "policy",
        ]
    )
    names = [node.all("h3")[0].text for node in turns if node.classes[1] in ("call", "error")]
    assert names == ["1zoom", "2again", "3failing", "4fine"]
    assert [node.all("h3")[0].text for node in sample.find("div", "policy")] == [
        "policy 1",
        "policy 2",
        "policy 3",
    ]
    cells = [(row.all("th")[0].text, row.all("td")[0].text) for row in turns[1].all("tr")]
    assert cells == [("box", "[1, 2]"), ("why", "a\n  b")]
    assert turns[5].all("pre")[0].text == "no such tool"
    assert "is in o1" not in turns[6].text


def test_hostile_texts_everywhere():
    arguments = {EVIL: EVIL, "list": [EVIL, {EVIL: math.nan}], "code": "a < b\n\tc"}
    hostile = episode(
        segments=[segment(role, EVIL) for role in ("prompt", "policy", "observation")],
        calls=[call(name=EVIL, arguments=arguments, text=EVIL, error=True)],
        rewards={EVIL: EVIL, "pred": "<b>"},
        finish_reason=EVIL,
    )
    root = read([hostile], title=EVIL)
    clean = re.sub(r"[\0\x1b\x85\u202e\ud800\udfff]", "�", EVIL)
    assert root.all("h1")[0].text == root.all("title")[0].text == clean
    assert [node.text for node in root.all("pre")] == [clean] * 4
    assert [node.text for node in root.all("th")] == [clean, "list", "code", clean, "pred"]
    assert root.all("td")[0].text == clean
    assert root.all("td")[2].text == "a < b\n    c"
    assert clean in [node.text for node in root.all("b")]


def circle() -> list:
    items = []
    items.append(items)
    return items


def deep() -> dict:
    value = {}
    for _ in range(5000):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    "arguments", [None, "text", {1: {2: (3,)}}, {"a": circle()}, {"a": object()}, deep()]
)
def test_arguments_of_any_kind(arguments):
    assert read([episode(calls=[call(arguments=arguments)])]).find("div", "call")


@pytest.mark.parametrize("segments", [[], [segment("prompt", "")], [segment("policy", "")]])
def test_empty_episodes(segments):
    assert len(read([episode(segments=segments, calls=[call(), call(turn=9)])]).all("details")) == 1
    assert not read([]).all("details")


def test_long_texts_are_cut_in_the_middle():
    text = "start " + "x" * 1_000_000 + " end"
    root = read(
        [
            episode(
                segments=[segment("prompt", text), segment("policy", text)], rewards={"pred": text}
            )
        ]
    )
    for shown in (root.all("pre")[0].text, root.all("pre")[1].text, root.all("td")[0].text):
        assert shown.startswith("start ") and shown.endswith(" end") and len(shown) < MAX_TEXT + 40
        assert f"[{len(text) - MAX_TEXT} characters]" in shown
    assert root.all("i")[0].text.endswith(" end")
    assert len(root.all("i")[0].text) <= 200


def test_repeated_placeholders_are_counted():
    root = read(
        [
            episode(
                segments=[segment("policy", "a<|image_pad|>" + "<|video_pad|>" * 5000 + "b<x><x>")]
            )
        ]
    )
    assert root.all("pre")[0].text == "a<|image_pad|><|video_pad|> × 5000b<x><x>"


@pytest.mark.parametrize(
    "score, advantage, finish, expected",
    [
        (1.0, 0.5, "stop", [("score 1", 120), ("advantage +0.5", 120), ("stop", None)]),
        (0.5, -0.25, "length", [("score 0.5", 60), ("advantage -0.25", 0), ("length", 35)]),
        (-1.0, 0.0, "stop", [("score -1", 0), ("advantage +0", None), ("stop", None)]),
        (math.inf, None, "stop", [("score inf", None), ("not trained on", None), ("stop", None)]),
        (
            123456.7,
            1e-9,
            "stop",
            [("score 1.23e+05", 120), ("advantage +1e-09", 120), ("stop", None)],
        ),
    ],
)
def test_badges(score, advantage, finish, expected):
    rewards = {"score": 0.1 + 0.2, "note": "why", "count": 3}
    (sample,) = read(
        [episode(score=score, advantage=advantage, finish_reason=finish, rewards=rewards)]
    ).all("details")
    hues = [
        re.search(r"hsl\((\d+)", node.attributes.get("style", ""))
        for node in sample.all("summary")[0].all("b")
    ]
    texts = [node.text for node in sample.all("summary")[0].all("b")]
    assert list(zip(texts, [hue and int(hue[1]) for hue in hues])) == expected
    components = [node.text for node in sample.all("aside")[0].all("th", "td")]
    assert components == ["score", "0.3", "note", "why", "count", "3"]


def test_truth_row_and_the_end_in_words():
    root = read(
        [
            episode(4, row=17, truth=EVIL, finish="the --limit <b>", finish_reason="length"),
            episode(5),
        ]
    )
    assert [node.text for node in root.all("h2")] == ["Prompt 4, row 17", "Prompt 5"]
    (truth,) = root.find("div", "truth")
    assert truth.all("h3")[0].text == "truth"
    assert truth.all("pre")[0].text == re.sub(r"[\0\x1b\x85\u202e\ud800\udfff]", "�", EVIL)
    first, second = root.all("aside")
    assert [node.text for node in first.all("p")] == ["length: the --limit <b>"]
    assert not second.all("p")


def test_the_schema_of_tools_stands_once():
    begin = "within <tools></tools> XML tags:\n<tools>\n"
    prompts = [begin + '{"name": "crop"}\n{"name": "<b>"}\n</tools>\n\nquestion ' + x for x in "ab"]
    prompts += [begin + '{"name": "other"}\n</tools>', "no tools"]
    policy = segment("policy", '<tools>{"name": "crop"}</tools>')
    root = read(
        [episode(i, segments=[segment("prompt", text), policy]) for i, text in enumerate(prompts)]
    )
    tools = [node for node in root.all("details") if node.all("summary")[0].text == "tools"]
    assert [node.all("pre")[0].text for node in tools] == [
        '{"name": "crop"}\n{"name": "<b>"}',
        '{"name": "other"}',
    ]
    shown = [node.all("pre")[0].text for node in root.find("div", "prompt")]
    assert (
        shown[1] == "within <tools></tools> XML tags:\n<tools> at the top of this page </tools>\n\n"
        "question b"
    )
    assert "other" not in shown[2] and shown[3] == "no tools"
    assert root.find("div", "policy")[0].all("pre")[0].text == '<tools>{"name": "crop"}</tools>', (
        "what was sampled"
    )


# --- pictures ---


def test_images_are_numbered_as_tools_count():
    """From 1 over the whole trajectory, each frame of a video with a number of its own:
    common/tools/visual.py."""
    media = [image(), image(*[encoded()] * 3, kind="video"), image(), image(kind="video")]
    segments = [
        segment("prompt", "q", 0, 1),
        segment("policy", "p"),
        segment("observation", "o", 2, 3),
    ]
    calls = [
        call(info={"target": 1, "frames": [2]}),
        call(info={"target": 1, "frame": 3, "box": [0, 0, 1, 1]}),
    ]
    root = read([episode(segments=segments, media=media, calls=calls)])
    captions = [node.text.partition(",")[0] for node in root.all("figcaption")]
    assert captions == ["image 1", "video", "image 5", "video", "video"]
    numbers = [
        node.text.split(",")[1] for node in root.all("figcaption") if node.text.startswith("video")
    ]
    assert numbers == [" images 2 to 4", " images 6 to 6", " images 2 to 4"]
    strip = [node for node in root.all("aside")[0].all("figure")[0].children if node.tag == "svg"]
    assert [node.all("text")[-1].text for node in strip] == ["2", "3 (call 1)", "4"]
    assert [len(node.all("rect")) for node in strip] == [0, 0, 1], (
        "info counts the frames of its video"
    )


def test_boxes_stand_where_the_call_put_them():
    media = [image(encoded(size=(200, 100))), image(encoded("blue"))]
    boxes = [[0.1, 0.2, 0.5, 0.6], [0.0, 0.0, 1.0, 1.0]]
    calls = [call(info={"target": 0, "box": box}) for box in boxes]
    calls.append(call(info={"target": 1, "box": [0.25, 0, 0.5, 1]}))
    segments = [segment("prompt", "q", 0), segment("policy", "p"), segment("observation", "o", 1)]
    root = read([episode(segments=segments, media=media, calls=calls)])
    first, second = root.all("aside")[0].all("figure")
    drawn = [
        {name: float(rect[name]) for name in ("x", "y", "width", "height")}
        for rect in first.all("rect")
    ]
    assert drawn == [
        pytest.approx({"x": 0.1, "y": 0.2, "width": 0.4, "height": 0.4}),
        {"x": 0.0, "y": 0.0, "width": 1.0, "height": 1.0},
    ]
    outer, *overlays = first.all("svg")
    assert (outer["viewbox"], outer["width"]) == ("0 0 200 100", "600")
    assert [(node["viewbox"], node["preserveaspectratio"]) for node in overlays] == [
        ("0 0 1 1", "none")
    ] * 2
    numbers = [
        (node.text, float(node["x"]), float(node["y"])) for node in first.all("text") if node.text
    ]
    assert numbers == [
        ("1", pytest.approx(20, abs=5), pytest.approx(20, abs=15)),
        ("2", *[pytest.approx(5, abs=10)] * 2),
    ]
    assert second.all("rect")[0]["x"] == "0.25"
    assert second.all("text")[0].text == "3"
    pictures = pixels(root)
    colors = [pictures[f.all("use")[0]["href"][1:]].getpixel((5, 5)) for f in (first, second)]
    assert colors == [(255, 0, 0), (0, 0, 255)]
    number = root.find("div", "call")[0].all("b")[0]
    hue = re.search(r"hsl\(\d+", number["style"])[0]
    assert first.all("rect")[0]["stroke"].startswith(hue), (
        "the number of a call has its box's colour"
    )


@pytest.mark.parametrize(
    "box, expected",
    [
        ([-1, -0.5, 2, 1e400], (0, 0, 1, 1)),
        ([math.nan, 0.5, 0.5, 0.75], (0, 0.5, 0.5, 0.25)),
        ([0.5, 0.5, 0.5, 0.5], (0.5, 0.5, 0, 0)),
    ],
)
def test_boxes_outside_of_the_picture(box, expected):
    root = read([episode(media=[image()], calls=[call(info={"target": 0, "box": box})])])
    (rect,) = root.all("rect")
    assert tuple(float(rect[name]) for name in ("x", "y", "width", "height")) == expected


@pytest.mark.parametrize("info", [{"box": "0123"}, {"box": [1, 2]}, {"frames": 5}])
def test_info_of_a_users_tool(info):
    root = read([episode(media=[image()], calls=[call(info={"target": 0} | info)])])
    assert len(root.all("figure")) == 1 and not root.all("rect")


def test_targets_that_do_not_exist():
    calls = [
        call(info={"target": target, "box": [0, 0, 1, 1]}) for target in (1, -1, None, "0", [0])
    ] + [call()]
    assert not read([episode(media=[image()], calls=calls)]).all("figure")


def test_chosen_frames():
    frames = [encoded((10 * i, 0, 0)) for i in range(6)]
    calls = [
        call(info={"target": 0, "frames": [2, 5, 99]}),
        call(info={"target": 0, "frames": [5]}),
    ]
    segments = [segment("prompt", "q", 0), segment("policy", "p")]
    root = read([episode(segments=segments, media=[image(*frames, kind="video")], calls=calls)])
    prompt, looked = root.all("figure")
    strip = looked.all("svg")
    assert [i for i, node in enumerate(strip, 1) if "chosen" in node.classes] == [2, 5]
    assert [node.text for node in strip] == [
        "1",
        "2 (call 1)",
        "3",
        "4",
        "5 (call 1) (call 2)",
        "6",
    ]
    assert not [node for node in prompt.all("svg") if "chosen" in node.classes]
    red = [pixels(root)[node.all("use")[0]["href"][1:]].getpixel((0, 0))[0] for node in strip]
    assert red == [0, 10, 20, 30, 40, 50]


def test_box_in_a_frame():
    calls = [
        call(info={"target": 0, "frame": 2, "box": [0, 0, 0.5, 0.5]}),
        call(info={"target": 0, "box": [0, 0, 1, 1]}),
    ]
    root = read([episode(media=[image(*[encoded()] * 3, kind="video")], calls=calls)])
    strip = [node for node in root.all("figure")[0].children if node.tag == "svg"]
    assert [[rect["width"] for rect in node.all("rect")] for node in strip] == [
        ["1"],
        ["0.5", "1"],
        ["1"],
    ]


def test_a_picture_is_embedded_once():
    data = encoded()
    segments = [segment("prompt", "q", 0), segment("policy", "p"), segment("observation", "o", 0)]
    one = [episode(sample_index=i, segments=segments, media=[image(data)]) for i in range(8)]
    root = read(one)
    assert len(root.all("image")) == 1
    assert [node["href"] for node in root.all("use")] == ["#picture0"] * 9


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"<svg onload='alert(1)'><script>", "unreadable image"),
        (noise((50, 50))[:3000], "unreadable image: image file is truncated"),
        (None, ""),
    ],
)
def test_broken_pictures_become_a_box_with_the_reason(data, reason):
    media = [image(data), image()]
    segments = [segment("prompt", "q", 0, 1), segment("policy", "p")]
    root = read(
        [
            episode(
                segments=segments,
                media=media,
                calls=[call(info={"target": 0, "box": [0, 0, 0.5, 1]})],
            )
        ]
    )
    (broken,) = root.all("defs")[0].all("text")
    assert reason in broken.text
    assert len(root.all("image")) == 1
    assert root.all("use")[0]["href"] == f"#{broken['id']}"
    assert len(root.all("aside")[0].all("rect")) == 1


def test_a_picture_that_is_too_large_to_open(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    root = read([episode(segments=[segment("policy", "p", 0)], media=[image()])])
    assert "exceeds limit" in root.all("defs")[0].text


@pytest.mark.parametrize("mode", ["P", "LA", "CMYK", "I;16"])
def test_modes(mode):
    data = encoded(0, (300, 200), "TIFF" if mode == "CMYK" else "PNG", mode)
    root = read([episode(segments=[segment("policy", "p", 0)], media=[image(data)])])
    assert [picture.size for picture in pixels(root).values()] == [(300, 200)]


def test_pictures_and_page_stay_small():
    """Three prompts with a photograph and a video each, four samples that crop: below 2 MB."""
    episodes = []
    for prompt in range(3):
        photo = noise((1600, 1200), prompt)
        video = image(*[noise((320, 240), 100 + i) for i in range(8)], kind="video")
        for i in range(4):
            segments = [
                segment("prompt", "q", 0, 2),
                segment("policy", "p" * 4000),
                segment("observation", "o", 1),
            ]
            crop = image(noise((300, 200), 1000 + 10 * prompt + i))
            calls = [
                call(info={"target": 0, "box": [0, 0, 0.5, 0.5]}),
                call(info={"target": 2, "frames": [1]}),
            ]
            episodes.append(
                episode(
                    prompt, i, segments=segments, media=[image(photo), crop, video], calls=calls
                )
            )
    page = rollout_page("large", episodes)
    assert len(page) < 2e6
    sizes = [picture.size for picture in pixels(Tree(page).root).values()]
    assert (640, 480) in sizes and max(max(size) for size in sizes) == 640


def test_few_colours_stay_exact_photographs_become_jpeg():
    segments = [segment("policy", "p", 0, 1)]
    root = read(
        [episode(segments=segments, media=[image(encoded((1, 2, 3))), image(noise((64, 64)))])]
    )
    kinds = [(picture.format, picture.size) for picture in pixels(root).values()]
    assert kinds == [("PNG", (60, 40)), ("JPEG", (64, 64))]
    assert pixels(root)["picture0"].getpixel((0, 0)) == (1, 2, 3)


# --- divergences ---


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(FOLDERS["tiny"]))


def words_tokenizer(words: list[str], decoder) -> PreTrainedTokenizerFast:
    """Token i is words[i]."""
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def shades(spans: list[Span]) -> list[tuple[str, int]]:
    return [(span.text, span.shade) for span in spans]


def test_spans_of_about_equal_divergence(tokenizer):
    ids = tokenizer.encode("1+2=3\n\n.")
    divergences = [0.01, -0.02, 0.2, 0.15, 0.9, 5.0, -4.0, 0.0]
    spans = shaded_spans(ids, divergences, tokenizer, MAX_TEXT)
    expected = [("1+", 0), ("2=", 2), ("3", 3), ("\n", 5), ("\n", -5), (".", 0)]
    assert shades(spans) == expected
    titles = [span.title for span in spans if span.shade]
    assert titles == ["0.15 to 0.2 nats", "0.9 nats", "5 nats", "-4 nats"]
    assert [span.is_newline for span in spans] == [False, False, False, True, True, False]
    at_starts = shaded_spans(ids[: len(SHADES)], list(SHADES), tokenizer, MAX_TEXT)
    assert [span.shade for span in at_starts] == [1, 2, 3, 4, 5]


def test_a_character_of_several_tokens_takes_the_largest(tokenizer):
    ids = tokenizer.encode("a中é😀.")
    assert len(ids) == 1 + 3 + 2 + 4 + 1
    divergences = [0.0, 0.0, 2.0, 0.5, 0.2, 0.0, -0.04, 0.0, 0.0, 0.03, 0.0]
    spans = shaded_spans(ids, divergences, tokenizer, MAX_TEXT)
    assert shades(spans) == [("a", 0), ("中", 4), ("é", 2), ("😀", -1), (".", 0)]
    spans = shaded_spans(ids[:9], divergences[:9], tokenizer, MAX_TEXT)
    assert shades(spans)[:3] == [("a", 0), ("中", 4), ("é", 2)]
    assert shades(spans)[3:] == [("�", -1)], "a limit cuts anywhere"


def test_no_text_is_lost(tokenizer):
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(0, 40))]
        divergences = [rng.choice([0.0, 0.05, -2.0]) for _ in ids]
        spans = shaded_spans(ids, divergences, tokenizer, MAX_TEXT)
        assert "".join(span.text for span in spans) == tokenizer.decode(ids)
        assert len(spans) > 1 or len(set(divergences)) < 2 or len(ids) < 20


def test_spaces_and_bytes_of_sentencepiece():
    decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    words = ["▁the", "▁sum", "<0xE4>", "<0xB8>", "<0xAD>", "▁is", "s"]
    tokenizer = words_tokenizer(words, decoder)
    divergences = [0.5, 0.0, 0.0, 0.1, 0.0, 0.5, 0.0]
    spans = shaded_spans(list(range(7)), divergences, tokenizer, MAX_TEXT)
    assert shades(spans) == [("the", 3), (" sum", 0), ("中", 2), (" is", 3), ("s", 0)]


def test_a_tokenizer_that_tidies_up_keeps_its_text():
    decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(" ' ", "'")])
    tokenizer = words_tokenizer(["it", " '", " s"], decoder)
    assert tokenizer.decode([0, 1, 2]) == "it's"
    spans = shaded_spans([0, 1, 2], [0.0, 0.5, 2.0], tokenizer, MAX_TEXT)
    assert shades(spans) == [("it's", 0)]


def shaded(tokenizer, text: str, divergences: list[float], **others) -> dict:
    """An episode of one turn."""
    ids = tokenizer.encode(text)
    divergences = (divergences * len(ids))[: len(ids)]
    turn = segment("policy", text)
    turn["spans"] = shaded_spans(ids, divergences, tokenizer, MAX_TEXT)
    mean = mean_divergence(divergences, [1] * len(ids))
    segments = [segment("prompt", "q"), turn]
    return episode(segments=segments, advantage=0.0, divergence=mean, **others)


def test_shades_on_a_page(tokenizer):
    text = "1 < 2\n\n中<|end|>"
    sample = shaded(tokenizer, text, [0.0, 0.2, 0.5, 0.5, 0.0, 2.0, 0.0, 0.0, 0.01, 0.05, 4.0])
    root = read([sample, episode(0, 1, advantage=None), episode(0, 2, advantage=0.0)])
    turn = root.find("div", "policy")[0].all("pre")[0]
    assert turn.text == text
    marks = [(node.text, node["class"], node["title"]) for node in turn.all("u")]
    assert marks == [
        (" ", "d2", "0.2 nats"),
        ("< ", "d3", "0.5 nats"),
        ("\n", "d4 newline", "2 nats"),
        ("中", "d1", "0.05 nats"),
        ("<|end|>", "d5", "4 nats"),
    ]
    legend = root.all("p")[0]
    scale = [(node.text, node["class"]) for node in legend.all("u")]
    assert scale == [("0.03", "d1"), ("0.1", "d2"), ("0.3", "d3"), ("1", "d4"), ("3", "d5")]
    assert "negative" not in legend.text
    badges = [[b.text for b in summary.all("b")][1:-1] for summary in root.all("summary")]
    mean = (0.2 + 0.5 + 0.5 + 2.0 + 0.01 + 0.05 + 4.0) / 11
    assert badges == [[f"divergence {mean:.2g}"], ["not trained on"], []], "no advantages"


def test_hostile_tokens_in_shades(tokenizer):
    text = "<script>alert('1')</script><img src=x onerror=alert(2)>\"><think>"
    turn = read([shaded(tokenizer, text, [2.0])]).find("div", "policy")[0]
    assert [node.text for node in turn.all("u")] == [text]
    assert "<think>" in [node.text for node in turn.all("i")]


def test_negative_divergences_are_dotted_and_explained(tokenizer):
    root = read([shaded(tokenizer, "12", [-0.2, 0.2])])
    legend, turn = root.all("p")[0], root.find("div", "policy")[0]
    assert [node["class"] for node in turn.all("u")] == ["d2 negative", "d2"]
    assert "negative, a token that the teacher finds more likely than the policy" in legend.text
    page = rollout_page("signs", [shaded(tokenizer, "12", [-0.2])])
    styles = re.search(r"<style>.*</style>", page, re.DOTALL)[0]
    assert "dotted" in styles and "underline calc(var(--shade) * 1px)" in styles, "without colour"


def test_the_prompt_of_the_teacher_is_folded():
    samples = [episode(0, i, teacher_prompt="the solution is <b> " + EVIL) for i in range(2)]
    root = read([*samples, episode(1, 0, teacher_prompt="")])
    folded = [node for node in root.all("details") if "teacher" in node.all("summary")[0].text]
    assert len(folded) == 1, "once for a group"
    assert "open" not in folded[0].attributes
    assert folded[0].all("pre")[0].text.startswith('the solution is <b> "><script>')


def test_without_a_teacher_nothing_is_said_of_one():
    page = rollout_page("as ever", [episode()])
    for word in ("<u", "divergence", "teacher", "--shade", "flex-wrap: wrap }\n."):
        assert word not in page


def test_long_turns_stay_bounded(tokenizer):
    """Each token of another shade, in a response that the page cuts in the middle."""
    text = "start " + "1+2=3 " * 2200 + " end"
    sample = shaded(tokenizer, text, [0.0, 0.05, 0.5, -5.0])
    turn = read([sample]).find("div", "policy")[0].all("pre")[0]
    assert turn.text == shorten(text, MAX_TEXT)
    assert len(rollout_page("long", [sample])) < 60 * MAX_TEXT
    plain = shaded(tokenizer, text, [0.01])
    turn = read([plain]).find("div", "policy")[0].all("pre")[0]
    assert turn.text == shorten(text, MAX_TEXT) and not turn.all("u")


# --- screens ---


def crowded(tokenizer) -> list[dict]:
    """Episodes with long prompts, words, names, badges and pictures, and shades."""
    long_word = "https://example.org/" + "a" * 300
    media = [
        image(noise((1280, 120))),
        image(*[noise((320, 240), seed) for seed in range(8)], kind="video"),
        image(noise((300, 900))),
    ]
    segments = [
        segment("prompt", "Look at the pictures. " * 300 + "This is the end.", 0, 1),
        segment("policy", "First I zoom in. " * 30 + long_word),
        segment("observation", "Here is the crop.", 2),
        segment("policy", "The answer is 4."),
    ]
    arguments = {"a_long_name_of_an_argument" * 3: long_word, "box": [0.123456789] * 4}
    calls = [
        call(arguments=arguments, info={"target": 0, "box": [0.1, 0.1, 0.4, 0.9]}),
        call(error=True, text=long_word, info={"target": 1, "frames": [2, 3]}),
    ]
    sample = {
        "score": -123456.7,
        "finish_reason": "max_tool_errors",
        "finish": "as many calls failed as --max-tool-errors allows",
        "rewards": {"a_component_of_the_reward" * 2: 0.123456789, "note": long_word},
        "truth": long_word,
        "media": media,
        "segments": segments,
        "calls": calls,
    }
    text = "3 + 1 = 4, so it is 4. " * 20
    return [
        episode(0, 0, advantage=-0.00123, **sample),
        episode(0, 1, advantage=None, **sample),
        shaded(tokenizer, text, [0.0, 0.05, 0.5, -5.0], prompt_index=1, finish_reason="length"),
    ]


@pytest.mark.slow  # what stands on a page is tested above
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("with_teacher", [False, True])
def test_rollouts_fit_the_screen(tmp_path, tokenizer, with_teacher):
    episodes = crowded(tokenizer)
    page = tmp_path / "page.html"
    page.write_text(rollout_page("a run, step 12", episodes if with_teacher else episodes[:2]))
    with Browser(tmp_path) as browser:
        for width, is_dark in SCREENS:
            browser.open(page, width, is_dark)
            browser.run(
                "document.querySelectorAll('details').forEach(sample => sample.open = true)"
            )
            check_screen(browser, tmp_path / f"page_{width}.png", is_dark)
