"""A judge that is a model: SmolLM2, served by vLLM on the CPU as its page says. Slow: minutes to
start.

It judges badly. What is tested is that it is asked, that its replies are read and counted, and that
the probe refuses it.
"""

import asyncio
import os
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress

import pytest
from helpers import ROOT, kill_all, run_script, steps_of, wait_until

from common.assets.build.smollm2 import smollm2_path
from papers.pyvision.judge import Judge
from papers.pyvision.judge_prompt import Case

pytestmark = pytest.mark.slow
RUN = [
    "--engine",
    "hf",
    "--dtype",
    "fp32",
    "--prompts-per-step",
    2,
    "--samples-per-prompt",
    4,
    "--total-steps",
    1,
]
RUN += [
    "--max-response-tokens",
    12,
    "--max-rows",
    16,
    "--eval-every",
    0,
    "--no-eval-before",
    "--eval-rows",
    1,
]
ASKS = """
from papers.pyvision.judge import open_judge
from papers.pyvision.judge_prompt import Case


async def fn(data_source, solution_str, ground_truth, extra_info=None):
    judge = open_judge()
    await judge.probe()
    if sum(map(ord, solution_str)) % 2:
        return {"score": 0.0, "asked": 0.0}
    case = Case("visual_search", "Which animal is in the picture?", "a dog", "a puppy")
    return {"score": await judge.verdict(case), "asked": 1.0}


fn.timeout_s = 600
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        smollm2_path(),
    ]
    command += [
        "--served-model-name",
        "judge",
        "--port",
        port,
        "--max-model-len",
        2048,
        "--enforce-eager",
    ]
    environment = os.environ | {
        "PYTHONPATH": "tests/workers/serving",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    log = tmp_path_factory.mktemp("judge") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*map(str, command)], cwd=ROOT, stdout=file, stderr=file, env=environment
        )
    address = f"http://127.0.0.1:{port}/v1"

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        with suppress(OSError):
            return urllib.request.urlopen(f"{address}/models", timeout=5).status == 200
        return False

    try:
        wait_until(is_up, seconds=900)
        yield address
    finally:
        kill_all(process)


def test_a_small_model_is_asked_and_its_replies_are_read(url):
    judge = Judge([url])
    answers = ("a dog", "a cat", "two birds")
    cases = [Case("visual_search", "Which animal is it?", "a dog", answer) for answer in answers]

    async def ask() -> list:
        return await asyncio.gather(*map(judge.verdict, cases), return_exceptions=True)

    verdicts = asyncio.run(ask())
    (server,) = judge.servers
    assert server.listed == "judge" and len(verdicts) == 3
    for case, verdict in zip(cases, verdicts):
        assert verdict in (0.0, 1.0) or "no verdict by the judge" in str(verdict)
        assert judge.verdicts.get(case, str(verdict)) in (verdict, str(verdict))


def test_the_probe_refuses_it_by_name_and_a_run_may_take_it_as_it_is(url, tmp_path):
    (tmp_path / "reward.py").write_text(ASKS)
    command = [
        *RUN,
        "--reward-function",
        f"{tmp_path}/reward.py:fn",
        "--output-dir",
        tmp_path / "run",
    ]
    environment = {"JUDGE_URLS": url}
    refused = run_script("grpo.py", *command, env=environment, check=False)
    host = url.removeprefix("http://").removesuffix("/v1")
    assert refused.returncode == 1 and f"the judge at {host} cannot judge" in refused.stderr
    assert "JUDGE_PROBE=0" in refused.stderr and not (tmp_path / "run" / "metrics.jsonl").exists()

    done = run_script("grpo.py", *command, env=environment | {"JUDGE_PROBE": "0"}, timeout=1500)
    step = steps_of(tmp_path / "run")[1]
    assert step["reward/failed"] > 0 or 0 < step["reward/asked"] < 1, done.stdout[-2000:]
