"""Environments as users run them: real torchrun ranks, real vLLM, real workers."""

import json
import os
import re
import shlex
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import (
    LITTLE_CACHE,
    ROOT,
    kill_all,
    kill_once,
    metrics_of,
    run_script,
    script_environment,
    steps_of,
    torchrun,
    wait_until,
)

from common.assets.build.embedded import embedded_data
from common.data.protocols import Hermes
from common.data.render import DEFAULT_SYSTEM
from common.tools import CROP

pytestmark = pytest.mark.slow

# The embedded policy that sees calls a tool of this name, of which it reads as it was taught: an
# environment has it.
LOOKS = """
    import os
    import random

    class Looks:
        def reset(self, **row):  # says nothing: the policy has learned its prompts as they are
            self.looks, self.log = 0, os.environ.get("LOG")
            self.write("reset")

        def crop_image_normalized(self, bbox_2d: list[float], target_image: int) -> str:
            '''Look closer.

            Args:
                bbox_2d: where
                target_image: at what
            '''
            self.looks += 1
            return f"a {random.randint(1, 6)}"

        @property
        def done(self):
            return self.looks == 2

        def reward(self):
            return self.looks / 2

        def close(self):
            self.write("close")

        def write(self, word):
            if self.log:
                with open(self.log, "a") as file:
                    file.write(word + "\\n")
"""
TALK = """
    def talk(messages, ground_truth, **kwargs):
        said = any(m["content"] == "Look again." for m in messages)
        return (None, 1.0) if said else ("Look again.", 0.25)
"""
SIZES = [
    "--prompts-per-step",
    4,
    "--samples-per-prompt",
    4,
    "--eval-rows",
    4,
    "--tool-workers",
    2,
    *LITTLE_CACHE,
]
SIZES += ["--max-pixels", 12_544, "--max-frame-pixels", 12_544]
STEPS = [
    "--total-steps",
    3,
    "--deterministic",
    "--dump-rollouts-every",
    1,
    "--save-every",
    1,
    "--keep-checkpoints",
    9,
]
GRPO = [
    "grpo.py",
    "--model",
    "tiny-vl",
    "--dtype",
    "fp32",
    "--learning-rate",
    1e-4,
    "--max-turns",
    4,
    *SIZES,
    *STEPS,
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, text in {"looks.py": LOOKS, "talk.py": TALK}.items():
        (folder / name).write_text(textwrap.dedent(text))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory, world):
    """Flags of the demo's rows, whose system message tells of the tool."""
    folder = tmp_path_factory.mktemp("data")
    system = {"role": "system", "content": DEFAULT_SYSTEM + Hermes.system_block([CROP.schema])}
    for file in embedded_data("tiny-vl", folder, world):
        table = pq.read_table(file)
        prompts = [[system, *prompt] for prompt in table["prompt"].to_pylist()]
        place = table.column_names.index("prompt")
        pq.write_table(table.set_column(place, "prompt", [prompts]), file)
    return [f"--{part}-data={folder / part}.parquet" for part in ("train", "eval")]


@pytest.fixture(scope="module")
def whole(files, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_script(
        *GRPO, *data, "--environment", files / "looks.py:Looks", "--output-dir", folder, ranks=2
    )
    return folder


def calls_of(row: dict) -> list[dict]:
    return [call for call in json.loads(row["calls"]) if not call["error"]]


def rows_of(folder, step: int) -> list[dict]:
    return pq.read_table(folder / f"rollouts/step_{step:06d}.parquet").to_pylist()


def test_an_environment_is_played_and_scores(whole):
    steps = steps_of(whole)
    assert sorted(steps) == [0, 1, 2, 3] and any(
        steps[step].get("rollout/done") for step in (1, 2, 3)
    )
    for step in (1, 2, 3):
        assert (
            0 < steps[step]["policy/rollout_logprob_gap"] < 1e-4
            and steps[step]["optim/grad_norm"] > 0
        )
        for row in rows_of(whole, step):
            calls = calls_of(row)
            assert (
                json.loads(row["rewards"])["score"] == row["environment_reward"] == len(calls) / 2
            )
            assert (row["finish_reason"] == "done") == (len(calls) == 2)
        first = {
            (row["prompt_index"], call["text"])
            for row in rows_of(whole, step)
            for call in calls_of(row)[:1]
        }
        assert len(first) == len({group for group, _ in first}), (
            "samples of a group meet the same chances"
        )


def test_kill_resume_and_replay(whole, files, data, tmp_path):
    arguments = [*GRPO, "--environment", files / "looks.py:Looks", *data]
    kill_once(*arguments, "--output-dir", tmp_path / "killed", ranks=2, after_step=2)
    run_script(*arguments, "--output-dir", tmp_path / "killed", ranks=2)
    assert any(record.get("event") == "resumed" for record in metrics_of(tmp_path / "killed"))
    assert steps_of(tmp_path / "killed") == steps_of(whole)
    weights = [
        (folder / "model" / "model.safetensors").read_bytes()
        for folder in (whole, tmp_path / "killed")
    ]
    assert weights[0] == weights[1]
    dump, before = whole / "rollouts/step_000003.parquet", whole / "checkpoints/step_000002"
    run_script(
        *arguments,
        "--replay",
        dump,
        "--resume",
        before,
        "--output-dir",
        tmp_path / "replay",
        ranks=2,
    )
    names = ("policy/loss", "optim/grad_norm", "policy/rollout_logprob_gap", "reward/mean")
    assert [steps_of(tmp_path / "replay")[3][n] for n in names] == [
        steps_of(whole)[3][n] for n in names
    ]


def test_ctrl_c_closes_what_is_open(files, data, tmp_path):
    log = tmp_path / "log"
    arguments = [
        *GRPO,
        "--total-steps",
        99,
        "--environment",
        files / "looks.py:Looks",
        "--output-dir",
        tmp_path / "run",
    ]
    environment = script_environment() | {"LOG": str(log)}
    with open(tmp_path / "said", "w") as said:
        command = torchrun(*arguments, ranks=2)
        run = subprocess.Popen(
            command, cwd=ROOT, stdout=said, stderr=said, env=environment, start_new_session=True
        )
    try:
        wait_until(lambda: log.is_file() and log.read_text().count("reset") > 20, 300)
        for _ in range(2):
            os.killpg(run.pid, signal.SIGINT)
            time.sleep(1)
        run.wait(120)
    finally:
        kill_all(run) if run.poll() is None else None
    words = log.read_text().split()
    assert words.count("close") == words.count("reset"), (tmp_path / "said").read_text()[-2000:]


@pytest.mark.parametrize("script", ["grpo.py", "ppo.py", "curiosity_rl.py"])
def test_a_function_in_every_script(script, files, data, tmp_path):
    """Each answers once; its numbers reach the reward of grpo.py and curiosity_rl.py, and in ppo.py
    their turns."""
    arguments = [
        script,
        "--model",
        "tiny-vl",
        "--dtype",
        "fp32",
        *SIZES,
        "--tools",
        "visual",
        "--max-turns",
        9,
    ]
    arguments += ["--environment", files / "talk.py:talk", *data]
    arguments += [
        "--total-steps",
        2,
        "--deterministic",
        "--dump-rollouts-every",
        1,
        "--learning-rate",
        1e-4,
    ]
    run_script(*arguments, "--output-dir", tmp_path / "run", ranks=2)
    for step in (1, 2):
        record = steps_of(tmp_path / "run")[step]
        assert record["reward/first_turn_accuracy"] == 0.0 and record["reward/turns"] > 0
        for row in rows_of(tmp_path / "run", step):
            mask, given = row["loss_mask"], json.loads(row["turn_rewards"])
            places = [
                sum(mask[: i + 1]) for i in range(len(mask)) if mask[i] and not [*mask, 0][i + 1]
            ]
            assert [reward for _, reward in given] == [0.25, 1.0][: len(given)]
            assert {count for count, _ in given} <= {*places}, "at the end of a turn"
    assert steps_of(tmp_path / "run")[2]["eval/last_turn_accuracy"] > 0


FEWER = {
    "--total-steps": "2",
    "--warmup-steps": "1",
    "--prompts-per-step": "2",
    "--samples-per-prompt": "2",
}
FEWER |= {"--eval-rows": "2", "--batch-size": "2", "--max-turns": "2", "--max-turn-tokens": "24"}


def test_the_commands_of_the_docs(tmp_path):
    """docs/environments.md, as pasted, but for sizes; the user of GSM8K answers the embedded model
    here."""
    question = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
    }
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    for part in ("train", "test"):
        rows = [question | {"reward_model": {"style": "rule", "ground_truth": "5"}}] * 4
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data/gsm8k" / f"{part}.parquet")
    page, commands = (ROOT / "docs" / "environments.md").read_text(), []
    page, _ = page.split("## Tasks of verifiers")  # needs its environment: test_verifiers_tasks.py
    for block in re.findall(r"^```bash\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL):
        commands += [
            shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line.strip()
        ]
    assert len(commands) >= 4
    for words in commands:
        ranks = int(words[2]) if words[0] == "torchrun" else 0
        script, *arguments = words[3 if ranks else 1 :]
        arguments = [re.sub(r"^(data|runs)/", rf"{tmp_path}/\1/", word) for word in arguments]
        arguments = [FEWER.get(before, word) for before, word in zip(["", *arguments], arguments)]
        arguments = ["tiny" if word == "smollm2" else word for word in arguments]
        run_script(script, *arguments, ranks=ranks)
    last = Path(arguments[arguments.index("--output-dir") + 1])
    assert sorted(step for step in steps_of(last) if step) == [1, 2]
