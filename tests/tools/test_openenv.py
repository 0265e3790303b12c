"""The client of a server that docs/environments.md shows, against a server of the released
openenv-core.

pytest tests/tools/test_openenv.py -m slow
TEST_VENVS=FOLDER keeps the package, which takes minutes to install, for the next time.
"""

import json
import os
import re
import subprocess

import pytest
from helpers import ROOT
from venvs import python_with

WORKERS = ROOT / "tests" / "workers"
ADDRESS = "http://127.0.0.1:8001"  # in the docs


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return python_with("openenv-core==0.3.0", tmp_path_factory.mktemp("venvs"), beside_ours=True)


@pytest.fixture
def play(python, tmp_path):
    """What becomes of two trajectories at a server of so many sessions."""
    servers = []

    def play(sessions: int) -> list:
        command = [python, WORKERS / "openenv_server.py", str(sessions)]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        port = servers[-1].stdout.readline().strip()
        page = (ROOT / "docs" / "environments.md").read_text()
        (shown,) = re.findall(r"```python\n# echo.py\n(.*?)```", page, re.DOTALL)
        assert ADDRESS in shown
        (tmp_path / "echo.py").write_text(shown.replace(ADDRESS, f"http://127.0.0.1:{port}"))
        done = subprocess.run(
            [python, WORKERS / "openenv_turns.py", f"{tmp_path / 'echo.py'}:Echo"],
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    yield play
    for server in servers:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_each_trajectory_has_a_session_of_its_own(play):
    assert play(sessions=2) == [
        ["done", 1.5, ["1: a", "2: b", "3: c"]],
        ["stop", 0.5, ["1: x"]],
    ]


@pytest.mark.slow
def test_a_server_of_one_session_costs_the_other_trajectories(play):
    """One session is the default of a server."""
    reasons = sorted(reason for reason, _, _ in play(sessions=1))
    assert reasons in (["done", "tool_failed"], ["stop", "tool_failed"])
