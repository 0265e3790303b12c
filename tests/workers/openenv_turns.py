"""Plays the example of docs/environments.md against a server of OpenEnv, run by a Python that has
openenv-core and our packages.

Usage: PYTHONPATH=.:tests python tests/workers/openenv_turns.py ENVIRONMENT
Prints a JSON list: of each trajectory its finish reason, reward and replies.
"""

import json
import sys
from dataclasses import replace

from scripted import row, run
from vl import build_tokenizer

from common.rollout.trajectories import Turns
from common.tools.pools import ToolWorkers


def call(message: str) -> str:
    call = {"name": "echo", "arguments": {"message": message}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def main(environment: str) -> None:
    tokenizer = build_tokenizer()
    workers = ToolWorkers("", 2, 60.0, environment=environment)
    try:
        turns = Turns(tokenizer, workers)
        the_row = replace(row(tokenizer, tools=list(workers.tools)), environment={})
        the_row.messages = the_row.prompt
        assert turns.try_out([the_row]), "it has a reward"
        scripts = [[call("a"), call("b"), call("c"), "never asked"], [call("x"), "enough"]]
        episodes, _ = run(scripts, turns, the_row)
        found = []
        for episode in episodes:
            replies = [reply["text"] for reply in episode.calls]
            found.append([episode.finish_reason, episode.environment_reward, replies])
        print(json.dumps(found))
    finally:
        workers.close()


if __name__ == "__main__":
    main(sys.argv[1])
