"""Run by torchrun: trajectories with tools on ranks that share an engine, for which a script
stands.

python tests/workers/shared_tools.py TOOLS TURN ...

Prints a JSON object for each rank: its trajectories, the exchanges of replies that there were, how
many of them while the engine sampled, and how many processes its tools have.
"""

import json
import sys

import psutil
from scripted import ScriptedEngine, row
from torch.distributed import new_subgroups
from vl import build_tokenizer

from common.distributed import broadcast_object, gather_objects, init_world
from common.flags import Rollout
from common.progress import say
from common.rollout.opening import open_tools
from common.rollout.sampling import sample_episodes
from common.rollout.trajectories import Turns
from common.script import run
from common.tools import pools
from common.types import Sampling


def main(tools: str, *script: str) -> None:
    world, tokenizer, exchanges = init_world(), build_tokenizer(), []
    counts = [0]  # of processes: in the end the tool may have ended all of them
    flags = Rollout(tools=tools, tool_workers=2, engine_parallel=world.size, max_turns=len(script))
    workers = open_tools(flags, new_subgroups(world.size, backend="gloo")[0])
    turns = Turns(tokenizer, workers, flags=flags)
    scripts = [script[start:] for start in range(len(script))]  # the last one calls nothing
    engine = ScriptedEngine(tokenizer, scripts)

    def exchange(*arguments):
        exchanges.append(engine.busy)
        counts.append(len(psutil.Process().children(recursive=True)))
        return broadcast_object(*arguments)

    pools.broadcast_object = exchange
    rows = {0: row(tokenizer, tools=workers.tools)}
    options = {"seed": 1, "step": 2, "weights_step": 2, "turns": turns}
    episodes = sample_episodes(engine, rows, Sampling(len(scripts), 4000), **options)
    mine = {
        "trajectories": [
            (e.response_ids, e.finish_reason, [call["text"] for call in e.calls]) for e in episodes
        ],
        "exchanges": len(exchanges),
        "while sampling": sum(exchanges),
        "processes": max(counts),
    }
    for part in gather_objects(mine):
        say(json.dumps(part))
    workers.close()


if __name__ == "__main__":
    run(main, *sys.argv[1:])
