"""Tasks of verifiers 0.4 that one answer solves, as rows and reward (docs/environments.md).

VENV/bin/python docs/examples/verifiers_tasks.py reverse-text data/reverse --rows 2000
VERIFIERS_PYTHON=VENV/bin/python python grpo.py --train-data data/reverse/train.jsonl \\
    --reward-function docs/examples/verifiers_tasks.py:score

VENV is a virtual environment with verifiers and the package of the tasks. Rows are written there.
`score` runs in the trainer's reward workers; each starts a process there and asks it in lines of
JSON.
"""

import argparse
import asyncio
import functools
import inspect
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PREFIX = "verifiers/"  # of data_source; the taskset's id follows


# --- in the trainer's environment -----------------------------------------------------------------


def score(data_source, solution_str, ground_truth, extra_info=None):
    """The weighted sum of the task's rewards, and each reward and metric by its name."""
    process = scorer()
    question = {
        "taskset": data_source.removeprefix(PREFIX),
        "data": json.loads(ground_truth),
        "answer": solution_str,
    }
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        line = ""
    if not line:
        scorer.cache_clear()
        raise RuntimeError("the process that scores has died")
    reply = json.loads(line)
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply["scores"]


score.timeout_s = 60  # the first question to a process waits for its imports


@functools.cache
def scorer() -> subprocess.Popen:
    python = os.environ.get("VERIFIERS_PYTHON")
    if not python:
        raise RuntimeError("VERIFIERS_PYTHON must name the Python of an environment with verifiers")
    command = [python, __file__, "--score"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# --- in an environment with verifiers -------------------------------------------------------------


def answer_questions() -> None:
    """A line with scores for each line with an answer."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tasks print, and the programs that they start, goes to stderr
    for line in sys.stdin:
        try:
            reply = json.dumps({"scores": scores(**json.loads(line))})
        except Exception as error:  # it costs this sample
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(reply, file=replies, flush=True)


def scores(taskset: str, data: dict, answer: str) -> dict[str, float]:
    import verifiers.v1 as vf
    from verifiers.v1.graph import MessageNode

    task = task_of(taskset, data)
    # rewards look at the answer; of the prompt they know the task's data
    prompt = MessageNode(message=vf.UserMessage(content=task.data.prompt_text))
    message = vf.AssistantMessage(content=answer)
    trace = vf.Trace(
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        nodes=[prompt, MessageNode(parent=0, message=message, sampled=True)],
    )
    asyncio.run(task.score(trace))
    parts = {name: reward.score for name, reward in trace.rewards.items()}
    return trace.metrics | parts | {"score": trace.reward}


def task_of(taskset: str, data: dict):
    """The task that a row was made of; its taskset is not loaded for it."""
    from verifiers.v1.utils.loaders import task_type

    task_class = task_type(taskset)
    return task_class(task_class.data_type().model_validate(data), config_of(taskset).task)


@functools.cache
def config_of(taskset: str):
    from verifiers.v1.utils.loaders import taskset_config_type

    return taskset_config_type(taskset)(id=taskset)


def rows_of(taskset: str) -> Iterator[dict]:
    """SystemExit for tasks that need more than their answer."""
    from verifiers.v1.utils.loaders import load_taskset

    config = config_of(taskset)
    for task in load_taskset(config):
        needs = what_it_needs(taskset, task)
        if needs:
            raise SystemExit(
                f"{taskset}: its tasks have {needs}; docs/environments.md says why not"
            )
        # with defaults: the role of a message is one, by which it is read again
        data = task.data.model_dump(mode="json", exclude_none=True)
        yield {
            "data_source": PREFIX + taskset,
            "prompt": messages_of(task.data),
            "reward_model": {"style": "rule", "ground_truth": json.dumps(data)},
            "extra_info": {"index": task.data.idx},
        }


def what_it_needs(taskset: str, task) -> str:
    """What only a rollout of verifiers has, or ""."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import environment_class, taskset_class

    config = config_of(taskset)
    if environment_class(taskset) is not vf.SingleAgentEnv:
        return f"an environment of their own, {environment_class(taskset).__name__}"
    if task.data.prompt is None:
        return "no prompt: a user opens the conversation"
    if taskset_class(taskset).toolsets(config) or task.toolsets(config.task):
        return "tools"
    if config.task.judges:
        return "a judge"
    if task.NEEDS_CONTAINER:
        return "a container"
    for reward in task.hooks("reward"):
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"the reward {reward.__name__}, which needs a runtime"
    return ""


def messages_of(data) -> list[dict]:
    """SystemExit for pictures in a prompt."""
    messages = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    for message in data.prompt:
        if not isinstance(message.content, str):
            raise SystemExit(f"task {data.idx}: a message that is not plain text")
        messages.append({"role": message.role, "content": message.content})
    return messages


def write_rows(taskset: str, folder: Path, num_rows: int, num_test_rows: int) -> None:
    """test.jsonl has the first ones, train.jsonl those that follow."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows_of(taskset)
    for name, count in (("test", num_test_rows), ("train", num_rows)):
        lines = [json.dumps(row) + "\n" for row in itertools.islice(rows, count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        print(f"{folder / name}.jsonl: {len(lines)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("taskset", nargs="?", help="id of an installed taskset")
    parser.add_argument("folder", nargs="?", type=Path, help="where to write the rows")
    parser.add_argument("--rows", type=int, default=1000, help="of training, at most")
    parser.add_argument("--test-rows", type=int, default=128, help="the first ones")
    parser.add_argument("--score", action="store_true", help="answer lines on standard input")
    args = parser.parse_args()
    if args.score:
        answer_questions()
    elif args.folder:
        write_rows(args.taskset, args.folder, args.rows, args.test_rows)
    else:
        parser.error("give a taskset and a folder")


if __name__ == "__main__":
    main()
