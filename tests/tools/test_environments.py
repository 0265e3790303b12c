"""Environments: what the policy is told, what is scored, what becomes of it when a process dies."""

import json
import os
import re
import textwrap
import time

import pytest
from helpers import ROOT, deadline
from scripted import ScriptedEngine, row, run
from vl import build_tokenizer

from common.flags import Rollout
from common.rollout.trajectories import CLOSING, FUNCTION_REPLY, OPENING, Turns
from common.tools import load_tools
from common.tools.environments import first_attribute
from common.tools.pools import ToolWorkers

GUESS = f"{ROOT}/docs/examples/guess.py:Guess"


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def open_turns(tokenizer, tmp_path):
    """Turns with an environment, which is closed after the test; a text is written to a file of its
    own."""
    opened = []

    def start(environment=None, tools="", timeout_s=20.0, workers=1, **limits):
        def file(text, name):
            path = tmp_path / f"{name.lower()}_{len(opened)}.py"
            path.write_text(textwrap.dedent(text))
            return f"{path}:{name}"

        if environment and "\n" in environment:
            environment = file(environment, "Game" if "class Game" in environment else "talk")
        opened.append(ToolWorkers(tools, workers, timeout_s, environment=environment))
        return Turns(tokenizer, opened[-1], flags=Rollout(environment=environment, **limits))

    yield start
    for workers in opened:
        workers.close()


def game_row(turns, **columns):
    the_row = row(turns.tokenizer, tools=list(turns.tool_pool.tools))
    the_row.environment, the_row.messages = columns, the_row.prompt
    return the_row


def test_a_game_from_its_reset_to_its_reward(open_turns):
    turns = open_turns(GUESS)
    the_row = game_row(turns, extra_info={"secret": 3})
    script = [call("guess", n=2), call("guess", n=3), "never asked"]
    (episode, other), engine = run([script, ["no game"]], turns, the_row)
    assert [c["text"] for c in episode.calls] == ["higher: 3 to 7", "right"]
    assert (episode.finish_reason, episode.turns, episode.environment_reward) == ("done", 2, 1.0)
    assert (other.finish_reason, other.turns, other.environment_reward) == ("stop", 1, 0.0)
    prompt = turns.tokenizer.decode(episode.prompt_ids)
    assert "look It is 1 to 7.<|im_end|>" in prompt and other.prompt_ids == episode.prompt_ids
    assert engine.asked[0][1] == episode.prompt_ids
    assert "It is 1" not in turns.tokenizer.decode(the_row.prompt_ids)
    assert sum(episode.loss_mask) + len(the_row.prompt_ids) < len(episode.response_ids) + len(
        episode.prompt_ids
    )


RANDOM = """
    import os, random, signal, time
    import numpy as np

    class Game:
        def reset(self, log=None, **row):
            self.log, self.seen = log, [random.random(), float(np.random.rand())]
            self.write("reset")

        def roll(self, die: str = "") -> str:
            \"\"\"Roll a die.

            Args:
                die: what is to happen.
            \"\"\"
            self.write("roll")
            if die == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if die == "hang":
                time.sleep(60)
            if die == "raise":
                raise KeyError("no such die")
            if die == "clock":
                return str(time.monotonic())
            self.seen.append(random.randrange(10**9))
            return str(self.seen)

        def get_reward(self):
            return len(self.seen)

        def close(self):
            self.write("close")

        def write(self, word):
            if self.log:
                with open(self.log, "a") as file:
                    file.write(f"{word}\\n")
"""


def test_what_a_dead_process_held_is_made_again_from_the_transcript(open_turns):
    """Random numbers and all; what killed it, or hung, is told to the policy, and is not
    repeated."""
    turns = open_turns(RANDOM, timeout_s=1.0, max_turns=9)
    roll, ill = call("roll"), [call("roll", die=die) for die in ("raise", "kill", "hang")]
    whole, broken = [roll, ill[0], roll, roll, "end"], [roll, *ill, roll, roll, "end"]
    episodes, _ = run([whole, broken, [roll, "end"]], turns, game_row(turns))
    texts = [[c["text"] for c in e.calls if not c["error"]] for e in episodes]
    assert texts[0] == texts[1] and texts[2] == texts[0][:1], (
        "samples of a group meet the same chances"
    )
    errors = [c["text"] for c in episodes[1].calls if c["error"]]
    assert [e.environment_reward for e in episodes] == [5.0, 5.0, 3.0]
    for told, error in zip(
        ("KeyError: 'no such die'", "the worker died", "timeout after 1 s"), errors, strict=True
    ):
        assert told in error


HASHED = """
    class Game:
        def reset(self, **row):
            import numpy, random
            self.left = {"red", "green", "blue", "white", "black", "brown", "pink", "grey"}

        def draw(self, die: bool = False) -> str:
            \"\"\"Draw.

            Args:
                die: or not.
            \"\"\"
            if die:
                import os, signal
                os.kill(os.getpid(), signal.SIGKILL)
            import numpy, random
            return f"{list(self.left)} {random.random()} {numpy.random.random()}"
"""


def test_chances_are_the_same_in_every_process(open_turns):
    """Also those that lie in the order of a set, and of a library that is first imported by the
    environment."""
    turns = open_turns(HASHED, workers=2, max_turns=9)
    draw = call("draw")
    episodes, _ = run(
        [[draw, draw, "end"]] * 8 + [[draw, call("draw", die=True), "end"]],
        turns,
        game_row(turns),
        n=9,
    )
    assert (
        len({e.calls[0]["text"] for e in episodes}) == 1 and len(turns.tool_pool.pool.workers) > 1
    )
    (second,) = {e.calls[1]["text"] for e in episodes[:8]}
    assert second != episodes[0].calls[0]["text"], "each call has chances of its own"
    assert episodes[8].finish_reason == "stop", "made again, it is the same"


def test_a_lack_of_memory_is_told_to_the_policy(open_turns):
    fill = RANDOM.replace(
        'if die == "raise":',
        'if die == "fill":\n                bytearray(10**15)\n            if die == "raise":',
    )
    assert fill != RANDOM
    turns = open_turns(fill, max_turns=9)
    (episode,), _ = run(
        [[call("roll", die="fill"), call("roll"), "end"]], turns, game_row(turns), n=1
    )
    assert "MemoryError" in episode.calls[0]["text"] and not episode.calls[1]["error"]
    assert episode.finish_reason == "stop"


def test_one_that_repeats_itself_differently_costs_the_sample(open_turns, tmp_path):
    turns = open_turns(RANDOM, max_turns=9)
    script = [
        call("roll", die="clock"),
        call("roll"),
        call("roll", die="kill"),
        call("roll"),
        "never",
    ]
    (episode,), _ = run([script], turns, game_row(turns, log=str(tmp_path / "log")), n=1)
    assert (
        episode.finish_reason == "tool_failed"
        and "answers the same calls differently" in episode.calls[-1]["text"]
    )
    words = (tmp_path / "log").read_text().split()
    assert words.count("close") == words.count("reset") - 1, (
        "all are closed but the one that was killed"
    )


def test_a_property_that_fails_is_not_missing():
    class Game:
        @property
        def reward(self) -> float:
            return self.score

        def get_reward(self) -> float:
            return 1.0

    class Client:
        def __getattr__(self, name: str) -> float:
            return (
                {"get_reward": 2.0}[name]
                if name == "get_reward"
                else object.__getattribute__(self, name)
            )

    with pytest.raises(AttributeError, match="score"):
        first_attribute(Game(), "reward", "get_reward")
    assert (
        first_attribute(Client(), "reward", "get_reward") == 2.0
        and first_attribute(object(), "reward", "get_reward") is None
    )


@pytest.mark.parametrize(
    "reward, truth, is_warned",
    [("score", None, True), ("score", "", True), ("score", "7", False), ("get_reward", "", False)],
)
@pytest.mark.parametrize("first", ["len(self.seen)", "None"])
def test_a_game_that_nothing_scores_is_warned_of(
    open_turns, reward, truth, is_warned, first, capsys
):
    """Before its first turn a game may have no reward so far."""
    game = RANDOM.replace("def get_reward(", f"def {reward}(")
    turns = open_turns(game.replace("return len(self.seen)", f"return {first}"))
    the_row = game_row(turns)
    the_row.ground_truth = truth
    assert turns.try_out([the_row]) == (reward == "get_reward")
    warning = "has no reward, and the first row no ground truth"
    assert (warning in capsys.readouterr().out) == is_warned


def test_one_that_is_not_replayable_is_never_led_through_its_transcript(open_turns, tmp_path):
    turns = open_turns(RANDOM.replace("class Game:", "class Game:\n        replayable = False"))
    log = tmp_path / "log"
    (episode,), _ = run(
        [[call("roll", die="kill"), "never"]], turns, game_row(turns, log=str(log)), n=1
    )
    assert episode.finish_reason == "tool_failed" and "the worker died" in episode.calls[0]["text"]
    assert log.read_text().split() == ["reset", "roll"]


@pytest.mark.parametrize("ending", ["done by itself", "an error", "a timeout", "the trainer's end"])
def test_close_is_called_once_however_it_ends(open_turns, tmp_path, ending):
    log, die = tmp_path / "log", {"an error": "raise", "a timeout": "hang"}.get(ending, "")
    turns = open_turns(RANDOM, timeout_s=2.0, max_tool_errors=0)
    if ending == "the trainer's end":
        the_row = game_row(turns, log=str(log))
        turns.try_out([the_row])
        log.unlink()

        class Interrupted(ScriptedEngine):
            def step(self):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), deadline(60):
            run([["a"]], turns, the_row, n=1, engine=Interrupted(turns.tokenizer, [["a"]]))
        turns.tool_pool.close()
        assert log.read_text().split() == ["reset", "close"]
        return
    (episode,), _ = run([[call("roll", die=die), "end"]], turns, game_row(turns, log=str(log)), n=1)
    words = log.read_text().split()
    died = int(ending == "a timeout")  # with the process that was killed
    assert (
        words.count("close") == words.count("reset") - died
        and words[0] == "reset"
        and words[-1] == "close"
    )
    assert episode.finish_reason == ("max_tool_errors" if die else "stop")


def test_a_hanging_close_does_not_hold_up_the_end(open_turns):
    slow = RANDOM.replace('self.write("close")', "time.sleep(600)")
    turns = open_turns(slow, workers=2, timeout_s=2.0)

    class Interrupted(ScriptedEngine):
        def step(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), deadline(60):
        run(
            [["a"]] * 5,
            turns,
            game_row(turns),
            n=5,
            engine=Interrupted(turns.tokenizer, [["a"]] * 5),
        )
    pids = [worker.process.pid for worker in turns.tool_pool.pool.workers]
    start = time.monotonic()
    turns.tool_pool.close()
    assert time.monotonic() - start < 5 * 2.5 and len(pids) > 1
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    "change, why",
    [
        ('self.write("reset")', "raise OSError('no server')"),
        ('self.write("reset")', "return 3"),
        ("return len(self.seen)", "return float('nan')"),
        ("return len(self.seen)", "return 'much'"),
        ("return len(self.seen)", "raise OSError('no reward')"),
    ],
)
def test_an_environment_that_fails_costs_its_sample_and_is_refused_at_the_start(
    open_turns, tmp_path, change, why
):
    turns = open_turns(RANDOM.replace(change, why))
    the_row = game_row(turns)
    what = "its reward" if "len" in change else r"reset\(\)"
    told = r"(OSError: no|returned 3|reward is nan|could not convert)"
    with pytest.raises(
        ValueError, match=rf"--environment: {what} fails on the first row: .*{told}"
    ):
        turns.try_out([the_row])
    the_row.environment = {"log": str(tmp_path / "log")}
    (episode,), _ = run([["a"]], turns, the_row, n=1)
    assert episode.finish_reason == "tool_failed" and episode.calls[-1]["error"]
    if "len" in change:
        assert (tmp_path / "log").read_text().split() == ["reset", "close"], (
            "closed although its reward failed"
        )


@pytest.mark.parametrize("replayable", [True, False])
def test_what_a_failed_reset_has_opened_is_closed(open_turns, tmp_path, replayable):
    fails = RANDOM.replace("class Game:", f"class Game:\n        replayable = {replayable}")
    turns = open_turns(
        fails.replace('self.write("reset")', 'self.write("reset"); raise OSError("no server")')
    )
    (episode,), _ = run([["a"]], turns, game_row(turns, log=str(tmp_path / "log")), n=1)
    assert episode.finish_reason == "tool_failed"
    words = (tmp_path / "log").read_text().split()
    assert words == ["reset", "close"] * words.count("reset")


KEYWORD = """
    class Game:
        def reset(self, **row):
            self.heard = []

        def answer(self, *, word: str, loud: bool = False) -> str:
            \"\"\"Say a word.

            Args:
                word (str): it.
                loud: is it loud?
            \"\"\"
            self.heard.append(word)
            return word.upper() if loud else word
"""


def test_a_method_may_have_keyword_arguments_and_any_name(open_turns):
    """Even that of what else is called."""
    turns = open_turns(KEYWORD, max_turns=9)
    schema = turns.tool_pool.tools["answer"].schema["function"]["parameters"]
    assert schema["properties"]["word"] == {"type": "string", "description": "it."}
    the_row = game_row(turns)
    (episode,), _ = run([[call("answer", word="a", loud=True), "end"]], turns, the_row, n=1)
    assert [m["role"] for m in episode.messages] == ["assistant", "tool", "assistant"]
    assert [c["text"] for c in episode.calls] == ["A"] and episode.finish_reason == "stop"


NAMES = """
    def _walk(self, context: str = "all", steps: int = 1) -> str:
        \"\"\"Walk.

        Args:
            context: where.
            steps: how far.
        \"\"\"
        return f"{context} {steps}"


    class Game:
        walk = _walk

        def reset(self, **row):
            pass
"""


def test_names_in_an_environment_are_its_own(open_turns):
    """That of a method, whatever its function is called, and `context`, which tools of --tools
    get."""
    turns = open_turns(NAMES, max_turns=9)
    script = [call("walk"), call("walk", context="here", steps=2), "end"]
    (episode,), _ = run([script], turns, game_row(turns), n=1)
    assert [c["text"] for c in episode.calls] == [
        "all 1",
        "here 2",
    ] and episode.finish_reason == "stop"


def test_the_policy_cannot_call_what_is_not_its(open_turns):
    turns = open_turns(GUESS, max_tool_errors=9)
    script = [call(name) for name in ("reset", "close", "get_reward", "__init__", "answer")] + [
        "end"
    ]
    (episode,), _ = run(
        [script],
        Turns(turns.tokenizer, turns.tool_pool, flags=Rollout(max_turns=9, max_tool_errors=9)),
        game_row(turns, extra_info={"secret": 1}),
        n=1,
    )
    assert episode.finish_reason == "stop" and episode.environment_reward == 0.0
    assert all("there is no tool" in c["text"] for c in episode.calls) and len(episode.calls) == 5


def test_a_call_that_is_written_like_one_of_ours_is_the_policys(open_turns, tmp_path):
    """What opens, closes and answers are calls of our own, told by identity: the policy may write
    an equal one."""
    turns = open_turns(RANDOM, max_turns=9, max_tool_errors=9)
    ours = [OPENING, CLOSING, FUNCTION_REPLY]
    script = [call(one.name, **one.arguments) for one in ours]
    assert [turns.protocol.find_call(text) for text in script] == ours
    the_row = game_row(turns, log=str(tmp_path / "log"))
    (episode,), _ = run([[*script, call("roll"), "end"]], turns, the_row, n=1)
    *strange, rolled = episode.calls
    assert [(c["name"], c["error"]) for c in strange] == [(one.name, True) for one in ours]
    assert (
        all(f"there is no tool '{c['name']}'" in c["text"] for c in strange) and not rolled["error"]
    )
    assert (tmp_path / "log").read_text().split() == ["reset", "roll", "close"]
    assert [m["role"] for m in episode.messages[1::2]] == ["tool"] * 4
    assert (episode.finish_reason, episode.environment_reward) == ("stop", 3.0)


def test_many_trajectories_share_few_processes(open_turns):
    turns = open_turns(RANDOM, workers=2, max_turns=20)
    rolls = list(range(9, -1, -1))
    episodes, _ = run([[call("roll")] * n + ["end"] for n in rolls], turns, game_row(turns), n=10)
    assert [e.turns for e in episodes] == [n + 1 for n in rolls] and len(
        turns.tool_pool.pool.workers
    ) == 2
    assert [e.environment_reward for e in episodes] == [n + 2 for n in rolls], (
        "each has a state of its own"
    )


def test_what_fails_while_it_is_made_again_is_not_the_policys_error(open_turns, tmp_path):
    """A neighbour's call has killed the process, and the server is gone by then."""
    once = RANDOM.replace('self.write("reset")', f"open({str(tmp_path / 'there')!r}, 'x').close()")
    turns = open_turns(once, max_turns=9)
    script = [call("roll"), call("roll", die="kill"), call("roll"), "never"]
    (episode,), _ = run([script], turns, game_row(turns), n=1)
    assert episode.finish_reason == "tool_failed" and "FileExistsError" in episode.calls[-1]["text"]


def test_what_reset_says_must_fit_the_prompt(open_turns):
    turns = open_turns(GUESS, max_prompt_tokens=10)
    (episode,), _ = run([["a"]], turns, game_row(turns, extra_info={"secret": 1}), n=1)
    assert (
        episode.finish_reason == "tool_failed"
        and "raise --max-prompt-tokens" in episode.calls[0]["text"]
    )


UNTYPED = """class Game:
    def reset(self): pass
    def go(self, x):
        '''Go.

        Args:
            x: where
        '''
"""


@pytest.mark.parametrize(
    "text, told",
    [
        ("class Game: pass", "expected a class with a method reset"),
        ("class Game:\n    def reset(self): pass", "no public method with a docstring"),
        (
            UNTYPED,
            "go: Argument x is missing a type hint",
        ),
        (
            "class Game:\n    def reset(self): pass\n    def go(self, x: int):\n        '''Go.'''",
            "go: Cannot generate JSON schema",
        ),
        (
            'class Game:\n    def reset(self): pass\n    async def go(self):\n        "Go."',
            "go: must be a plain method",
        ),
        (
            'class Game:\n    def reset(self): pass\n    def go(self):\n        "Go."\n       '
            " yield 1",
            "go: must be a plain method",
        ),
    ],
)
def test_a_class_that_is_no_environment_is_refused_by_name(tmp_path, text, told):
    (tmp_path / "game.py").write_text(text)
    with pytest.raises(ValueError, match=f"--environment .*game.py:Game: .*{told}"):
        load_tools("", f"{tmp_path / 'game.py'}:Game")


# --- functions that answer ------------------------------------------------------------------------

TALK = """
    def talk(messages, ground_truth, strict=False, **others):
        said = messages[-1]["content"]
        if said == "raise":
            raise OSError("no")
        if said == "words":
            return "only words"
        if said == "wrong type":
            return 3
        if said == "much":
            return None, 1e300
        if said == "roles":
            roles = ",".join(m["role"] for m in messages)
            return f"{roles} {ground_truth} {strict} {others}", 0.25
        return (None, 1.0) if said == str(ground_truth) else ("try again", 0.0)
"""


def talk_row(turns, **kwargs):
    the_row = row(turns.tokenizer, tools=list(turns.tool_pool.tools))
    the_row.answer_kwargs = kwargs
    return the_row


def test_a_function_answers_until_it_has_nothing_to_say(open_turns):
    turns = open_turns(TALK)
    the_row = talk_row(turns, name="x", strict=True)
    scripts = [["2", "roles", "1", "never"], ["words", "1", "never"], ["1"]]
    episodes, _ = run(scripts, turns, the_row)
    assert [[reward for _, reward in e.turn_rewards] for e in episodes] == [
        [0.0, 0.25, 1.0],
        [1.0],
        [1.0],
    ]  # words alone are no number
    assert [e.finish_reason for e in episodes] == ["stop"] * 3 and [e.turns for e in episodes] == [
        3,
        2,
        1,
    ]
    said = [m["content"] for m in episodes[0].messages]
    assert said == [
        "2",
        "try again",
        "roles",
        "system,user,assistant,user,assistant 1 True {'name': 'x'}",
        "1",
    ]
    text = turns.tokenizer.decode(episodes[1].response_ids)
    assert "<|im_start|>user\nonly words<|im_end|>\n<|im_start|>assistant\n1" in text


def test_on_the_last_turn_it_is_asked_for_its_number_only(open_turns):
    turns = open_turns(TALK, max_turns=2)
    episodes, _ = run([["2", "roles", "never"], ["2", "1"]], turns, talk_row(turns))
    assert [
        (e.finish_reason, e.turns, [reward for _, reward in e.turn_rewards]) for e in episodes
    ] == [
        ("unanswered", 2, [0.0, 0.25]),
        ("stop", 2, [0.0, 1.0]),
    ]


FAILS = [
    ("raise", "OSError: no"),
    ("wrong type", "it returned 3"),
    ("much", "a number up to 1e+06"),
]


@pytest.mark.parametrize("said, told", FAILS)
def test_a_function_that_fails_costs_the_sample(open_turns, said, told):
    turns = open_turns(TALK)
    (episode,), _ = run([[said, "never"]], turns, talk_row(turns), n=1)
    assert episode.finish_reason == "tool_failed" and told in episode.calls[-1]["text"]


@pytest.mark.parametrize(
    "function, why",
    [
        ("def talk(messages):\n    return None", "takes 1 positional argument but 2 were given"),
        (
            "def talk(messages, truth, *, colour):\n    return None",
            "required keyword-only argument: 'colour'",
        ),
        ("async def talk(messages, truth):\n    return None", "it returned <coroutine"),
        ("def talk(messages, truth):\n    return 'a', 1.0, True", "it returned ('a', 1.0, True)"),
        (
            "def talk(messages, truth):\n    return None, 1.0 * (messages[-1]['content'] == truth)",
            "",
        ),
    ],
)
def test_a_function_is_tried_with_a_truth_at_the_start(open_turns, function, why):
    turns = open_turns(f"\n{function}\n")
    others = talk_row(turns)
    others.answer_kwargs = None
    rows = [others, talk_row(turns, mood="bad")]
    if why:
        with pytest.raises(
            ValueError, match=rf"--environment cannot answer the truth of a row: .*{re.escape(why)}"
        ):
            turns.try_out(rows)
    else:
        assert turns.try_out(rows) is False, "it has no reward of an environment"
    assert turns.try_out([others]) is False, "no row to try it with"


def test_a_row_without_kwargs_is_not_answered(open_turns):
    turns = open_turns(TALK)
    the_row = talk_row(turns)
    the_row.answer_kwargs = None
    (episode,), _ = run([["2", "never"]], turns, the_row, n=1)
    assert (episode.finish_reason, episode.turns, episode.turn_rewards) == ("stop", 1, [])


def test_tools_come_before_a_function(open_turns, tmp_path):
    (tmp_path / "adds.py").write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    turns = open_turns(TALK, tools=f"{tmp_path / 'adds.py'}:add")
    (episode,), _ = run(
        [[call("add", a=1, b=2), "3", "1", "never"]], turns, talk_row(turns, ground_truth="1"), n=1
    )
    assert [c["text"] for c in episode.calls] == ["3"] and [r for _, r in episode.turn_rewards] == [
        0.0,
        1.0,
    ]


# --- classes written for others -------------------------------------------------------------------

STAND_IN = """
    from types import SimpleNamespace

    class TextArenaAction:
        def __init__(self, message):
            self.message = message

    class TextArenaEnv:
        def __init__(self, base_url):
            self.secret, self.base_url = "crane", base_url

        def reset(self):
            return self._result("Guess the word of five letters.", 0.0, False)

        def step(self, action):
            right = action.message == f"[{self.secret}]"
            pairs = zip(action.message[1:-1], self.secret)
            marks = "".join("G" if a == b else "X" for a, b in pairs)
            return self._result(marks, float(right), right)

        def _result(self, said, reward, done):
            message = SimpleNamespace(content=said)
            observation = SimpleNamespace(messages=[message])
            return SimpleNamespace(observation=observation, reward=reward, done=done)
"""
WORDLE = """
    from textarena_env import TextArenaAction, TextArenaEnv

    class WordleEnv:
        def __init__(self):
            self.client = TextArenaEnv(base_url="http://127.0.0.1:8001")

        def reset(self, **kwargs) -> None | str:
            result = self.client.reset()
            self.reward = 0.0
            self.done = False
            return result.observation.messages[0].content

        def guess(self, guess: str) -> str:
            \"\"\"
            Make a guess in the game of words.

            Args:
                guess: The word, in brackets: "[abcde]".

            Returns:
                What the game says to it.
            \"\"\"
            if self.done:
                raise ValueError("Game over.")
            result = self.client.step(TextArenaAction(message=guess))
            self.reward = result.reward
            self.done = result.done
            return result.observation.messages[0].content
"""


def test_a_class_in_trls_shape_runs_as_it_is(tmp_path, tokenizer):
    """Its client is a neighbour of the file here, and a package elsewhere."""
    for name, text in {"textarena_env": STAND_IN, "wordle": WORDLE}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    workers = ToolWorkers("", 1, 20.0, environment=f"{tmp_path / 'wordle.py'}:WordleEnv")
    try:
        turns = Turns(tokenizer, workers)
        assert turns.try_out([game_row(turns)]), "it has a reward"
        scripts = [
            [call("guess", guess="[crate]"), call("guess", guess="[crane]"), "never"],
            ["no game"],
        ]
        episodes, _ = run(scripts, turns, game_row(turns))
        assert [(e.finish_reason, e.environment_reward) for e in episodes] == [
            ("done", 1.0),
            ("stop", 0.0),
        ]
        assert [c["text"] for c in episodes[0].calls] == ["GGGXG", "GGGGG"]
        assert "Guess the word of five letters." in tokenizer.decode(episodes[1].prompt_ids)
    finally:
        workers.close()


def test_the_client_of_a_server_that_the_docs_show(tmp_path, tokenizer):
    """docs/environments.md: a client of OpenEnv in a dozen lines; test_openenv.py has a server."""
    (shown,) = re.findall(
        r"```python\n# echo.py\n(.*?)```",
        (ROOT / "docs" / "environments.md").read_text(),
        re.DOTALL,
    )
    client = """
        from types import SimpleNamespace

        class GenericEnvClient:
            def __init__(self, base_url):
                pass

            def sync(self):
                return Session()

        class Session:
            num_steps = 0

            def reset(self):
                observation = {"echoed_message": " Hello."}
                return SimpleNamespace(observation=observation, reward=None, done=False)

            def step(self, action):
                self.num_steps += 1
                observation = {"echoed_message": action["message"]}
                done = self.num_steps == 2
                return SimpleNamespace(observation=observation, reward=0.5, done=done)

            def close(self):
                pass
    """
    (tmp_path / "openenv").mkdir()
    for name, text in {"openenv/core": client, "echo": shown}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    workers = ToolWorkers("", 1, 20.0, environment=f"{tmp_path / 'echo.py'}:Echo")
    try:
        turns = Turns(tokenizer, workers)
        script = [call("echo", message="one"), call("echo", message="two"), "never asked"]
        (episode,), _ = run([script], turns, game_row(turns), n=1)
        assert [reply["text"] for reply in episode.calls] == ["one", "two"]
        assert (episode.finish_reason, episode.environment_reward) == ("done", 1.0)
        assert len(shown.strip().splitlines()) <= 24
    finally:
        workers.close()
