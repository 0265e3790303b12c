"""A server of OpenEnv that echoes, run by a Python that has openenv-core.

Usage: python openenv_server.py SESSIONS
Prints its port.
"""

import socket
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed_message: str


class EchoServer(Environment):
    """Each session counts its own steps; the third is the last."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.num_steps = 0

    def reset(self, seed=None, episode_id=None, **kwargs) -> EchoObservation:
        self.num_steps = 0
        return EchoObservation(echoed_message=" Say something.")

    def step(self, action: EchoAction, timeout_s=None, **kwargs) -> EchoObservation:
        self.num_steps += 1
        return EchoObservation(
            echoed_message=f"{self.num_steps}: {action.message}",
            reward=0.5,
            done=self.num_steps == 3,
        )

    @property
    def state(self) -> State:
        return State(step_count=self.num_steps)


def main(sessions: int) -> None:
    limit = {"max_concurrent_envs": sessions} if sessions > 1 else {}  # 1 is OpenEnv's default
    app = create_app(EchoServer, EchoAction, EchoObservation, env_name="echo", **limit)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main(int(sys.argv[1]))
