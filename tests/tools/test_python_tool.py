"""The tool `python`: its protocol, the state of a trajectory, what goes wrong in a program. Real
sandboxes."""

import contextlib
import io
import re
import time
from types import SimpleNamespace

import av
import numpy as np
import pytest
from helpers import deadline
from PIL import Image
from scripted import LIMITS, Trajectory, row, run
from vl import build_tokenizer, picture, reference_positions, write_tiny_vl

from common.data.protocols import Code
from common.flags import Rollout
from common.packing import TokenIndex, pack
from common.pictures import Media, decode
from common.rewards import make_built_in_scorer, score_episodes
from common.rollout.trajectories import Turns
from common.sandbox import sandbox
from common.sandbox.python import RESTING_BYTES, PythonWorkers
from common.sandbox.sandbox import Sandbox
from common.vision import load_vision


@pytest.fixture(scope="module")
def workers():
    pool = PythonWorkers(2, 20.0)
    yield pool
    pool.close()


def say(code: str) -> str:
    return f"I look.\n<code>\n```python\n{code}\n```\n</code>"


# --- the protocol ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, code",
    [
        (say("print(1)"), "print(1)"),
        (say("print(1)") + "\n \n", "print(1)"),
        (say("a") + "\n" + say("if b:\n    c"), "if b:\n    c"),
        (say("print('```')"), "print('```')"),
        ("so\n```python\nx = 1\n```", "x = 1"),
        ("```python\na\n```\nthen\n```python\nb\n```\n", "b"),
        ("<code>```python\nx\n```</code>", "x"),
        (say("print(1)") + " and then", None),
        ("<code>\nprint(1)\n</code>", None),
        ("```\nprint(1)\n```", None),
        ("```python\nprint(1)\n```\n```output\n1\n```", None),
        ("```python\nprint(1)\n```\nprints\n```\n1\n```", None),
        ("print(1)", None),
        ("", None),
        ("```python", None),
        ("```python```", ""),
        ("</code>", None),
        ("<answer>\n\\boxed{1}\n</answer>" + say("print(1)"), None),
        (say("print('<answer>1</answer>')"), None),
        ("<answer> </answer>" + say("print(1)"), "print(1)"),
        ("</answer>" + say("print(1)"), "print(1)"),
        ("<answer>" + say("print(1)"), "print(1)"),
    ],
)
def test_a_turn_that_ends_in_a_program_is_a_call(text, code):
    call = Code.find_call(text)
    assert (call.arguments["code"] if call else None) == code


def test_finding_a_program_takes_no_time():
    start = time.monotonic()
    for text in (
        "<answer>" * 50_000,
        "<code>" * 50_000 + "</code>",
        "```python" * 50_000 + "```",
        "</answer>" * 50_000,
    ):
        Code.find_call(text)
    assert time.monotonic() - start < 5


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return load_vision(str(write_tiny_vl(tmp_path_factory.mktemp("tiny-vl"))), LIMITS)


def test_three_turns_with_two_figures(vision, workers):
    """What the engine is asked is what is trained on, and each figure stands, and is named, where
    it belongs."""
    tokenizer = build_tokenizer()
    originals = [Media.open("image", [picture(*size)], LIMITS) for size in ((400, 300), (300, 200))]
    figures = "for side, part in ((1, image_clue_0.crop((0, 0, 100, 100))), (2, image_clue_1)):\n"
    figures += "    plt.figure(figsize=(2, side))\n    plt.imshow(part)\n    plt.show()\n"
    script = [
        say("print(image_clue_0.size, image_clue_1.size, '<image>', '<|im_' + 'end|>')"),
        say(figures + "print('<image>', '<|image_' + 'pad|>')"),
        say("print(image_clue_2.size, image_clue_3.size)"),
        "<answer>\n\\boxed{3}\n</answer>",
    ]
    (episode,), engine = run(
        [script], Turns(tokenizer, workers, vision), row(tokenizer, vision, originals, ["python"])
    )
    assert (episode.finish_reason, episode.turns, len(episode.media)) == ("stop", 4, 4)
    sizes = [decode(medium.frames[0]).size for medium in episode.media]
    assert sizes == [(400, 300), (300, 200), (200, 100), (200, 200)]

    def between(text: str, media: list) -> list[int]:
        rendered = (
            f"\n<|im_start|>user\n<tool_response>\n<interpreter>{text}</interpreter>\n"
            "\n</tool_response><|im_end|>"
        )
        return vision.expand(
            tokenizer.encode(f"{rendered}\n<|im_start|>assistant\n", add_special_tokens=False),
            media,
        )

    pads = [
        f"<image_clue_{k}><|vision_start|><|image_pad|><|vision_end|></image_clue_{k}>"
        for k in (2, 3)
    ]
    observations = [
        between("\nText Result:\n(400, 300) (300, 200) <image> < |im_end|>", []),
        between(
            "Text Result:\n<image> < |image_pad|>\nImage Result:\n" + "".join(pads),
            episode.media[2:],
        ),
        between("\nText Result:\n(200, 100) (200, 200)", []),
        [],
    ]
    expected, mask = [], []
    for said, observation in zip(script, observations):
        ids = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
        expected += ids + observation
        mask += [1] * len(ids) + [0] * len(observation)
    assert episode.response_ids == expected and episode.loss_mask == mask
    whole = [*episode.prompt_ids, *expected]
    image = vision.placeholders["image"]
    for _, asked, _, _, media in engine.asked:
        short = vision.collapse(asked, media)  # what vLLM gets: it expands by itself
        assert (
            short.count(image) == len(media)
            and vision.expand(short, media) == asked == whole[: len(asked)]
        )
    assert whole.count(image) == sum(
        rows * columns // 4 for _, rows, columns in (m.grid for m in episode.media)
    )

    (batch,) = pack([episode], [0], TokenIndex([episode]), budget=10_000, vision=vision)
    assert batch.targets.tolist() == [token for token, sampled in zip(expected, mask) if sampled]
    positions = batch.position_ids[:, 0].tolist()
    assert positions == [[*range(len(whole))], *reference_positions(whole, episode.media).tolist()]


@pytest.mark.parametrize(
    "most, ending, score",
    [(0, ("max_tool_errors", 1), 0.0), (1, ("stop", 3), 1.0), (4, ("stop", 3), 1.0)],
)
def test_errors_end_a_trajectory_or_are_told(workers, most, ending, score):
    """--max-tool-errors 0 is the release, 4 its first version. A trajectory that ends so is wrong,
    not left out."""
    tokenizer = build_tokenizer()
    script = [say("1 / 0"), say("print('again')"), "<answer>\n\\boxed{1}\n</answer>"]
    the_row = row(tokenizer, tools=["python"])
    the_row.data_source = "tiny-vl"
    (episode,), _ = run(
        [script], Turns(tokenizer, workers, flags=Rollout(max_tool_errors=most)), the_row
    )
    assert (episode.finish_reason, episode.turns) == ending and episode.calls[0]["error"]
    told = [token for token, sampled in zip(episode.response_ids, episode.loss_mask) if not sampled]
    assert (
        "Execution error: ZeroDivisionError: division by zero (line 1)" in tokenizer.decode(told)
    ) == (most > 0)
    assert bool(told) == (most > 0) and episode.loss_mask[-1] == 1
    score_episodes(
        [episode],
        {0: the_row},
        SimpleNamespace(is_trl=False, score=lambda jobs: map(make_built_in_scorer(""), jobs)),
        tokenizer,
    )
    assert episode.score == score


def test_all_errors_of_a_trajectory_count_not_those_in_a_row(workers):
    tokenizer = build_tokenizer()
    script = [say("1 / 0"), say("print(1)"), say("1 / 0"), "so"]
    (episode,), _ = run(
        [script],
        Turns(tokenizer, workers, flags=Rollout(max_tool_errors=1)),
        row(tokenizer, tools=["python"]),
    )
    assert (episode.finish_reason, episode.turns) == ("max_tool_errors", 3)


def test_a_text_model_gets_no_figures_and_its_names_do_not_count_them(workers):
    tokenizer = build_tokenizer()
    script = [
        say("plt.plot([1]); plt.show(); print('drawn')"),
        say("print('image_clue_0' in globals())"),
        "so",
    ]
    (episode,), _ = run([script], Turns(tokenizer, workers), row(tokenizer, tools=["python"]))
    assert [call["text"] for call in episode.calls] == ["drawn", "False"] and not episode.media


# --- the state ------------------------------------------------------------------------------------

WALK = [
    "import random\nx = [random.random()]\nopen('/tmp/kept', 'w').write('here')",
    "x.append(np.random.rand())\n1 / 0\nx.append('never')",
    "def f(): return x\nplt.plot(x); plt.show()\nprint(open('/tmp/kept').read())",
    """
import tempfile, uuid
class Thing: pass
def drawn():
    generators = random.Random(), np.random.RandomState(), np.random.default_rng()
    random.seed()
    np.random.seed()
    names = uuid.uuid4(), tempfile.mktemp(), tempfile.mkdtemp(), random.random(), np.random.rand()
    things = [Thing() for _ in range(20)]
    numbers = [generator.random() for generator in generators]
    return numbers, names, things, set(things), object(), bytearray(600)
told = str([*map(str, drawn()), id(bytearray(10**6)), hash(f)])
print(told)
""",
    "print(f(), image_clue_0.size, np.asarray(image_clue_0).sum())\nprint(told)\n"
    "print(drawn(), Thing())",
]


def walk(pool, blocks=WALK, between=lambda: None) -> list:
    trajectory, replies = Trajectory(pool), []
    for code in blocks:
        replies.append(trajectory(code))
        between()
    return [(reply.text, reply.images, reply.error, reply.info) for reply in replies]


def test_the_state_lives_on_and_is_made_again_from_the_transcript(workers):
    """Variables, files, random numbers, addresses; others take the sandboxes in between; or each
    call starts anew."""
    live = walk(workers)
    assert [error for _, _, error, _ in live] == [False, True, False, False, False]
    assert "never" not in live[4][0] and "(640, 480)" in live[4][0] and live[2][0] == "here"

    def others():
        for _ in range(len(workers.pool.workers)):
            look = "import os\nprint('x' in globals(), os.path.exists('/tmp/kept'))\n"
            look += f"for i in range({Trajectory.number}): open(f'/tmp/{{i}}', 'w')"
            assert Trajectory(workers)(look).text == "False False"

    assert walk(workers, between=others) == live
    pool = PythonWorkers(1, 20.0, anew=True)
    try:
        assert walk(pool) == live
    finally:
        pool.close()


DRAWS = {
    "the functions": "random.random()",
    "random.Random": "random.Random().random()",
    "numpy's functions": "np.random.rand()",
    "RandomState": "np.random.RandomState().rand()",
    "default_rng": "np.random.default_rng().random()",
    "uuid4": "__import__('uuid').uuid4()",
    "a temporary file": "__import__('tempfile').mktemp()",
}


def test_what_is_drawn_follows_from_trajectory_and_block(workers):
    code = "import random\n" + "\n".join(f"print({draw})" for draw in DRAWS.values())
    draws = []
    for seed in ("0/3/5/0", "0/3/5/0", "0/3/5/1", "1/3/5/0"):
        trajectory = Trajectory(workers, seeded_by=seed)
        draws.append([trajectory(code).text.splitlines() for _ in range(2)])
    assert draws[0] == draws[1]
    for what, *each in zip(DRAWS, *draws[0], *draws[2], *draws[3]):
        assert len(set(each)) == 6, what


def test_samples_of_a_step_draw_differently_and_a_step_that_is_repeated_the_same(workers):
    tokenizer = build_tokenizer()
    the_row = row(tokenizer, tools=["python"])
    script = [say("print(np.random.default_rng().random(), object())"), "so"]
    texts = []
    for _ in range(2):
        episodes, _ = run([script] * 2, Turns(tokenizer, workers), the_row)
        texts.append([episode.calls[0]["text"] for episode in episodes])
    assert texts[0] == texts[1] and len(set(texts[0])) == 2


def test_what_the_system_gave_stays_while_the_interpreter_lives(workers):
    trajectory = Trajectory(workers)
    first = trajectory("import os\nnamed = os.urandom(16).hex()\nprint(named)").text
    assert trajectory("print(named)").text == first


def test_a_trajectory_keeps_its_interpreter_while_others_work():
    """One works at a time, but there are soon as many interpreters as trajectories that take
    turns."""
    pool = PythonWorkers(3, 20.0)
    try:
        pool.pool.at_once = 1
        trajectories = [Trajectory(pool) for _ in range(3)]

        def all_ask(code: str) -> list[str]:
            texts = {}
            for trajectory in trajectories:
                trajectory.ask(code)
            assert sum(box.busy for box in pool.pool.workers) == 1
            with deadline(60):
                while len(texts) < 3:
                    for key, reply in pool.poll(1.0):
                        (trajectory,) = [t for t in trajectories if t.key == key]
                        texts[key] = trajectory.got(reply).text
            return [texts[trajectory.key] for trajectory in trajectories]

        all_ask("import os\nnamed = os.urandom(16).hex()\nprint(named)")
        # while others start
        asked = (all_ask("print(named)") == all_ask("print(named)") for _ in range(20))
        assert any(asked) and len(pool.pool.workers) == 3
    finally:
        pool.close()


def test_programs_run_at_the_same_time(workers):
    """Each tells when it began and ended, by the machine's clock."""
    both = [Trajectory(workers), Trajectory(workers)]
    code = "import time\nstart = time.monotonic()\ntime.sleep(1)\nprint(start, time.monotonic())"

    def overlap() -> bool:
        times = {}
        for trajectory in both:
            trajectory.ask(code)
        while len(times) < 2:
            for key, reply in workers.poll(1.0):
                (trajectory,) = [t for t in both if t.key == key]
                times[key] = [float(second) for second in trajectory.got(reply).text.split()]
        (first, first_end), (second, second_end) = times.values()
        return max(first, second) < min(first_end, second_end)

    with deadline(60):  # the second sandbox may still have to start
        while not overlap():
            pass


def test_pictures_are_sent_once_while_the_interpreter_lives(workers, monkeypatch):
    """And encoded only then. Whoever comes back to another interpreter gets them again."""
    sent, encoded = [], []
    send, encode = Sandbox.send, sandbox.b64encode
    monkeypatch.setattr(Sandbox, "send", lambda *given: sent.append(len(given[-1])) or send(*given))
    monkeypatch.setattr(
        sandbox, "b64encode", lambda data: encoded.append(len(data)) or encode(data)
    )
    pictures = [picture(90, 70), picture(30, 40)]
    trajectory = Trajectory(workers, pictures)
    for _ in range(3):
        assert trajectory("print(image_clue_0.size, image_clue_1.size)").text == "(90, 70) (30, 40)"
    assert sent == [2, 0, 0] and encoded == list(map(len, pictures))
    while any(box.trajectory == workers.numbers[trajectory.key] for box in workers.pool.workers):
        Trajectory(workers)("print(1)")
    del sent[:], encoded[:]
    assert trajectory("print(image_clue_1.size)").text == "(30, 40)"
    assert sent == [2] and encoded == list(map(len, pictures))


def test_the_first_call_of_a_trajectory_may_be_malformed(workers):
    """Also when a trajectory of an earlier step had the same key: its number is not used again."""
    first = Trajectory(workers)
    assert "expected a text as the argument code" in first(7).text
    assert [first("x = 6").text, first("print(7 * x)").text] == ["", "42"]
    number = workers.numbers[first.key]
    second = Trajectory(workers)
    second.key = first.key
    assert second(7).error and second("print('x' in globals())").text == "False"
    assert workers.numbers[second.key] > number


def test_trajectories_do_not_see_each_other(workers):
    for _ in range(4):
        trajectory = Trajectory(workers)
        assert (
            trajectory(
                "print('secret' in globals(), __import__('os').path.exists('/tmp/mine'))"
            ).text
            == "False False"
        )
        trajectory("secret = 1\nopen('/tmp/mine', 'w').write('x')")


@pytest.mark.parametrize(
    "code, limit, told",
    [
        ("import time\nx = 2\ntime.sleep(60)", 2.0, "took longer than 2 s"),
        ("x = 2\nwhile True: pass", 2.0, "took longer than 2 s"),
        ("x = 2\n10 ** 10 ** 10", 2.0, "took longer than 2 s"),
        ("import os\nx = 2\nos._exit(0)", 60.0, "the interpreter died"),
        (
            "import os, signal\nx = 2\nos.kill(os.getpid(), signal.SIGKILL)",
            60.0,
            "the interpreter died",
        ),
        ("import ctypes\nx = 2\nctypes.string_at(0)", 60.0, "the interpreter died"),
        (
            "x = 2\nfor i in range(20000): open(f'/tmp/{i}', 'w')\nwhile True: pass",
            60.0,
            "more than 10000 files",
        ),
    ],
)
def test_a_block_that_does_not_end_is_told_and_undone(code, limit, told):
    pool = PythonWorkers(1, limit)
    try:
        trajectory = Trajectory(pool)
        trajectory("x = 1")
        reply = trajectory(code)
        assert (
            reply.error
            and not reply.failed
            and told in reply.text
            and "as before this block" in reply.text
        )
        assert reply.info == {"ended": False, "acted": False}
        assert trajectory("print(x)").text == "1"
    finally:
        pool.close()


def test_sandboxes_that_start_at_once_have_time_for_all(monkeypatch):
    """One takes two seconds of a processor: forty on one of them, beside an engine, take more than
    a minute. How many there are is bounded by the memory of the container."""
    monkeypatch.setattr("common.sandbox.python.cpus_of_rank", lambda: 1)
    monkeypatch.setattr("common.sandbox.python.total_memory", lambda: 8 * 5 * RESTING_BYTES)
    pool = PythonWorkers(8, 20.0)
    try:
        box = pool.pool.new_worker()
        assert (
            box.deadline - time.monotonic() > sandbox.START_S + 4 * pool.pool.max_workers
            and pool.pool.max_workers == 5
        )
        assert box.stop() == ""
    finally:
        pool.close()


def test_a_sandbox_that_does_not_start_later_costs_its_block_and_not_the_run(monkeypatch):
    pool = PythonWorkers(1, 20.0)
    try:
        trajectory = Trajectory(pool)
        assert trajectory("x = 1\nprint(x)").text == "1"
        monkeypatch.setattr("common.sandbox.sandbox.bubblewrap", lambda *_: ["false"])
        pool.pool.workers[0].process.kill()
        with deadline(60):  # the kernel ends what is in it soon, not at once
            while not (reply := trajectory("print(x)")).failed:
                pass
        assert re.search("no worker starts|the sandbox does not start", reply.text)
        monkeypatch.undo()
        with deadline(60):
            while (reply := trajectory("print(x)")).failed:
                pass
        assert reply.text == "1", "from the transcript"
    finally:
        pool.close()


# --- what a block shows ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, text",
    [
        ("print('a')\nprint('b')", "a\nb"),
        ("1 + 1", ""),
        (
            "print('seen')\nint('x')",
            "seen\nExecution error: ValueError: invalid literal for int() with base 10: 'x' "
            "(line 2)",
        ),
        ("x = (", "Execution error: SyntaxError: '(' was never closed (line 1)"),
        (
            "import ast\nast.literal_eval('1 +')",
            "Execution error: SyntaxError: invalid syntax (line 2)",
        ),
        ("x = 1\nraise SyntaxError('no')", "Execution error: SyntaxError: no (line 2)"),
        ("import sys\nprint('a')\nsys.exit(3)", "a\nExecution error: SystemExit: 3 (line 3)"),
        ("def f():\n    raise KeyError('k')\n\nf()", "Execution error: KeyError: 'k' (line 2)"),
        ("input()", "Execution error: EOFError: EOF when reading a line (line 1)"),
        ("import sys\nprint('no', file=sys.stderr)", ""),
        ("import os\nos.write(1, b'no')", ""),
        ("print('\\ud800')", "?"),
        (
            "raise ValueError('x' * 10**7)",
            "Execution error: ValueError: " + "x" * 1000 + " (line 1)",
        ),
    ],
)
def test_what_a_block_says(workers, code, text):
    assert Trajectory(workers)(code).text == text


def test_long_output_keeps_its_ends(workers):
    text = Trajectory(workers)("for i in range(10**5): print(i)\nprint('end')").text
    assert (
        text.startswith("0\n1\n2\n")
        and text.endswith("99999\nend")
        and "characters are left out" in text
    )
    assert len(text) < 4096


AS_DRAWN = (640, 480)  # matplotlib's, where nothing else is asked for


@pytest.mark.parametrize(
    "code, sizes, told",
    [
        ("plt.plot([1]); plt.show()", [AS_DRAWN], ""),
        (
            "plt.figure(); plt.figure(figsize=(3, 2)); plt.show(block=True)",
            [AS_DRAWN, (300, 200)],
            "",
        ),
        ("f = plt.figure(dpi=50); f.show()", [(320, 240)], ""),
        ("plt.plot([1])", [], ""),
        ("for _ in range(9): plt.figure()\nplt.show()", [AS_DRAWN] * 8, "at most 8 figures"),
        ("plt.figure(figsize=(100, 100)); plt.show()", [], "10000 x 10000 pixels"),
        ("plt.figure(figsize=(100, 0.3)); plt.show()", [], "and sides of a ratio below 200"),
        ("plt.rcParams['savefig.dpi'] = 2000; plt.figure(); plt.show()", [AS_DRAWN], ""),
        (
            "plt.rcParams.update({'savefig.bbox': 'tight', 'savefig.pad_inches': 20})\n"
            "plt.plot(1); plt.show()",
            [],
            " x ",
        ),
    ],
)
def test_figures(workers, code, sizes, told):
    """They have the size that the program gives them, whatever the picture has that is drawn in
    them."""
    reply = Trajectory(workers)(code)
    figures = [Image.open(io.BytesIO(png)) for png in reply.images]
    assert [figure.size for figure in figures] == sizes and {
        figure.format for figure in figures
    } <= {"PNG"}
    assert told in reply.text and reply.error == bool(told)


def test_figures_beyond_those_of_a_block_are_in_no_later_one(workers):
    trajectory = Trajectory(workers)
    assert len(trajectory("for _ in range(20): plt.figure()\nplt.show()").images) == 8
    reply = trajectory("plt.figure(figsize=(3, 2)); plt.show()")
    assert [Image.open(io.BytesIO(png)).size for png in reply.images] == [(300, 200)]


def test_a_figure_that_cannot_be_shown_is_in_no_later_ones_way(workers):
    trajectory = Trajectory(workers)
    for fails in ("plt.figure(figsize=(100, 100))", "plt.title('$\\\\nothing$')"):
        assert trajectory(f"{fails}; plt.show()").error
        reply = trajectory("plt.figure(figsize=(3, 2)); plt.show()")
        assert not reply.error and [Image.open(io.BytesIO(png)).size for png in reply.images] == [
            (300, 200)
        ]


def test_a_figure_is_shown_again_by_itself(workers):
    """Its number has gone to another one since."""
    trajectory = Trajectory(workers)
    trajectory("f = plt.figure(figsize=(3, 2)); plt.show()")
    reply = trajectory("plt.figure(figsize=(5, 4)); f.show(); plt.show()")
    assert [Image.open(io.BytesIO(png)).size for png in reply.images] == [(300, 200), (500, 400)]


@pytest.mark.parametrize(
    "code, acted",
    [
        ("print(1)", True),
        ("x = 1", False),
        ("print()", False),
        ("plt.show()", False),
        ("1 / 0", False),
    ],
)
def test_a_block_that_shows_nothing_has_not_acted(workers, code, acted):
    assert Trajectory(workers)(code).info == {"ended": True, "acted": acted}


def test_a_picture_is_upright(workers):
    """As the policy sees it, and as the prompt tells its width and height."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # turned
    Image.new("RGB", (90, 40)).save(file, "JPEG", exif=exif)
    assert Trajectory(workers, [file.getvalue()])("print(image_clue_0.size)").text == "(40, 90)"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I;16", "L"])
def test_programs_see_what_the_policy_sees(workers, mode):
    """Transparency becomes white, 16 bits become 8."""
    file = io.BytesIO()
    shades = np.linspace(0, 255, 64 * 64).reshape(64, 64)
    if mode == "I;16":
        Image.fromarray((shades * 257).astype(np.uint16)).save(file, "PNG")
    else:
        image = Image.fromarray(shades.astype(np.uint8)).convert("LA" if mode == "LA" else "RGBA")
        image.putalpha(Image.fromarray(shades.T.astype(np.uint8)))
        image.convert(mode).save(file, "PNG", **({"transparency": 0} if mode == "P" else {}))
    seen = np.asarray(decode(file.getvalue()))
    look = Trajectory(workers, [file.getvalue()])(
        "a = np.asarray(image_clue_0)\nprint(a.shape, a.sum())"
    )
    assert look.text == f"{seen.shape} {seen.sum()}"


@pytest.mark.slow
def test_a_figure_that_came_while_the_trainer_was_away_is_read_to_its_end():
    """As under --engine hf: the deadline has passed, and what is larger than a socket waits in the
    child."""
    noise = "plt.figure(figsize=(16, 12)); plt.figimage(np.random.rand(1200, 1600, 3)); plt.show()"
    with contextlib.closing(PythonWorkers(2, 8.0)) as workers:
        trajectories = [Trajectory(workers) for _ in range(2)]
        for trajectory in trajectories:
            trajectory.ask(noise)
        replies, end = {}, time.monotonic() + 60
        while len(replies) < 2 and time.monotonic() < end:
            time.sleep(8.5)
            replies |= workers.poll(1.0)
    assert [len(replies[trajectory.key].images) for trajectory in trajectories] == [1, 1]
    assert all(len(replies[t.key].images[0]) > 2**21 for t in trajectories)


def test_bytes_that_trickle_hold_nobody_up(workers):
    """From two sandboxes, for a second each; the engine is to sample meanwhile."""
    code = "import os, time\nos.write(3, (2**25).to_bytes(8, 'big'))\n"
    code += "for _ in range(100):\n    os.write(3, b'x')\n    time.sleep(0.01)\nos._exit(0)"
    trajectories = [Trajectory(workers), Trajectory(workers)]
    for trajectory in trajectories:
        trajectory.ask(code)
    replies, longest = {}, 0.0
    with deadline(60):
        while len(replies) < 2:
            start = time.monotonic()
            replies |= workers.poll(0.0)
            longest = max(longest, time.monotonic() - start)
            time.sleep(0.01)
    assert all(
        "the interpreter died" in replies[trajectory.key].text for trajectory in trajectories
    )
    assert longest < 0.6


@pytest.mark.slow
def test_bytes_that_trickle_put_no_deadline_off():
    """While the engine takes a step some arrive, so that there is always something to read."""
    code = "import os, time\nos.write(3, (2**25).to_bytes(8, 'big'))\n"
    with contextlib.closing(PythonWorkers(1, 2.0)) as workers:
        trajectory = Trajectory(workers)
        trajectory.ask(code + "while True:\n    os.write(3, b'x')\n    time.sleep(0.01)")
        replies, end = {}, time.monotonic() + 60
        while not replies and time.monotonic() < end:
            time.sleep(0.5)
            replies |= workers.poll(0.0)
    assert "Execution timeout: the block took longer than 2 s" in replies[trajectory.key].text


def test_a_video_file_is_read_frame_by_frame(workers):
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height = 64, 48
        for shade in range(0, 240, 20):
            frame = av.VideoFrame.from_ndarray(
                np.full((48, 64, 3), shade, np.uint8), format="rgb24"
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    trajectory = Trajectory(workers, video_clue_0={"kind": "file", "frames": [file.getvalue()]})
    look = "v = video_clue_0\nprint(len(v), v.get_avg_fps(), v[3].asnumpy().shape)\n"
    look += "print([round(float(v[i].mean()) / 20) for i in (7, 0, 11)], v.get_batch([2, 5]).shape)"
    assert trajectory(look).text == "12 5.0 (48, 64, 3)\n[7, 0, 11] (2, 48, 64, 3)"


@pytest.mark.parametrize(
    "given",
    [{"seed": 3}, {"image_hint_0": {"kind": "image"}}, {"x": {"kind": "image", "frames": 3}}]
    + [
        {"x": {"kind": "image", "frames": ["a text"]}},
        {"x": {"kind": "video", "frames": [b""], "fps": 10**400}},
    ],
)
def test_what_a_row_gives_and_is_no_picture_costs_its_sample(workers, given):
    reply = Trajectory(workers, **given)("print(1)")
    assert reply.failed and "which is no {kind, frames}" in reply.text


@pytest.mark.parametrize(
    "kind, frames",
    [
        ("image", [b"<html>404"]),
        ("file", [b"no film"]),
        ("video", [picture(30, 40), picture(30, 40)[:200]]),
    ],
)
def test_what_cannot_be_read_costs_the_sample_and_is_not_blamed_on_the_policy(
    workers, kind, frames
):
    trajectory = Trajectory(workers, clue={"kind": kind, "frames": frames})
    for _ in range(2):
        reply = trajectory("print(1)")
        assert (
            reply.failed
            and not reply.error
            and "can the row's pictures and videos be read?" in reply.text
        )
    assert Trajectory(workers)("print(2)").text == "2", "the next one gets a sandbox"


def test_pictures_have_their_names(workers):
    """Those of the prompt at full resolution, what it does not show by other names, and figures as
    they come."""
    hint = {"kind": "image", "frames": [picture(70, 50)], "source": b"what no JSON can hold"}
    video = {"kind": "video", "frames": [picture(60, 40, seed) for seed in range(3)], "fps": 2.0}
    trajectory = Trajectory(
        workers, [picture(900, 700), picture(30, 40, 1)], image_hint_0=hint, video_clue_0=video
    )
    assert (
        trajectory("print(image_clue_0.size, image_clue_1.size, image_hint_0.size)").text
        == "(900, 700) (30, 40) (70, 50)"
    )
    said = trajectory(
        "v = video_clue_0\nprint(len(v), v[1].asnumpy().shape, v.get_batch([0, "
        "2]).asnumpy().shape, v.get_avg_fps())"
    )
    assert said.text == "3 (40, 60, 3) (2, 40, 60, 3) 2.0"
    trajectory("plt.figure(figsize=(2, 1)); plt.show()")
    assert trajectory("print(image_clue_2.size)").text == "(200, 100)"
    pixels = np.asarray(decode(picture(30, 40, 1))).sum()
    assert trajectory("print(np.asarray(image_clue_1).sum())").text == str(pixels)
