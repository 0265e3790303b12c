"""./with: which requirements it chooses, when it makes .venv, what it leaves after a failure, how
it runs a command.

Python and nvidia-smi are fakes here: a virtual environment is a folder, and pip writes down what it
is asked for. .ci/run goes through the real ones, and so does the last test.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT

CPU, V100, CUDA = "requirements-cpu.txt", "requirements-v100.txt", "requirements.txt"
# One that stands in PATH, and in each .venv that it makes. What is asked of pip, and goes wrong
# with it, is in files.
PYTHON = f"""#!/bin/sh
here=$FAKES
case "$*" in
    *"-m venv"*)
        for folder; do :; done
        rm -rf "$folder"
        mkdir -p "$folder/bin"
        touch "$folder/pyvenv.cfg"
        cp "$here/python3" "$folder/bin/python"
        ;;
    *"-m pip config list"*) cat "$here/pip.conf" ;;
    *"-m pip install"*)
        echo "$*" >>"$here/installs"
        . "$here/pip"
        ;;
    *"-m compileall"*) ;;
    *"version_info[:2]"*) cat "$here/version" ;;
    *"import ensurepip"*) test ! -e "$here/no_ensurepip" ;;
    *) exec {shlex.quote(sys.executable)} "$@" ;;
esac
"""


class Machine:
    """A fresh clone in a folder whose name has a space, on a machine with these programs first in
    PATH."""

    def __init__(self, folder: Path, programs: Path):
        self.clone, self.fakes = folder / "a clone", folder / "fakes"
        self.venv = self.clone / ".venv"
        self.clone.mkdir()
        self.fakes.mkdir()
        for name in ("with", CPU, V100, CUDA):
            shutil.copy(ROOT / name, self.clone)
        self.program("python3", PYTHON)
        for name, text in {"installs": "", "pip": "", "pip.conf": "", "version": "3.11\n"}.items():
            (self.fakes / name).write_text(text)
        self.environment = {
            **os.environ,
            "FAKES": str(self.fakes),
            "PATH": f"{self.fakes}:{programs}",
        }

    def program(self, name: str, text: str) -> None:
        path = self.fakes / name
        path.write_text(text)
        path.chmod(0o755)

    def cards(self, answer: str, code: int = 0) -> None:
        self.program("nvidia-smi", f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\nexit {code}\n")

    def start(self, *command: str, **options) -> subprocess.Popen:
        pipes = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
        }
        words = [self.clone / "with", *command]
        return subprocess.Popen(words, env=self.environment, **{"cwd": "/", **pipes, **options})

    def run(self, *command: str, **options) -> tuple[int, str, str]:
        """(exit code, output, what it said) of ./with."""
        process = self.start(*(command or ["true"]), **options)
        output, said = process.communicate(timeout=60)
        return process.returncode, output, said

    def installs(self) -> list[list[str]]:
        """The words of each `pip install` since the last time."""
        lines = (self.fakes / "installs").read_text().splitlines()
        (self.fakes / "installs").write_text("")
        return [line.replace(str(self.clone), ".").split("install ")[1].split() for line in lines]


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """Those of this machine, as if it had no card."""
    folder = tmp_path_factory.mktemp("programs")
    for path in Path("/usr/bin").iterdir():
        if path.name != "nvidia-smi":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def machine(tmp_path, programs) -> Machine:
    return Machine(tmp_path, programs)


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- which requirements ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, file, index",
    [
        ("", CPU, "cpu"),
        ("8.0, 580.65.06", CUDA, None),
        ("9.0, 590.1", CUDA, None),
        ("7.0, 560.35.03", V100, "cu126"),
        ("7.5, 580.65.06", V100, "cu126"),
        ("10.0, 580.65.06\n12.0, 580.65.06", CUDA, None),
        ("12.0, 580.65.06\n7.5, 580.65.06\n9.0, 580.65.06", V100, "cu126"),
        ("6.1, 580.65.06\n8.6, 580.65.06", CUDA, None),  # torch does not use the first
    ],
)
def test_the_requirements_are_those_of_the_lowest_card(answer, file, index, machine):
    if answer:
        machine.cards(answer)
    code, _, said = machine.run()
    (line,) = said.splitlines()
    assert code == 0 and f" {file} " in line and " GB" in line and " minutes" in line
    *first, last = machine.installs()
    assert last[-2:] == ["-r", f"./{file}"]
    pinned = [
        package for package in (ROOT / file).read_text().splitlines() if package.startswith("torch")
    ]
    url = f"https://download.pytorch.org/whl/{index}"
    assert first == ([["-q", "--no-compile", "--index-url", url, *pinned]] if index else [])


@pytest.mark.parametrize(
    "answer, code, told",
    [
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            9,
            "couldn't communicate",
        ),
        ("No devices were found", 6, "No devices were found"),
        ("[N/A], [N/A]", 0, "[N/A]"),
        ("6.1, 560.35.03", 0, "6.1"),
    ],
)
def test_a_query_that_names_no_card_is_said(answer, code, told, machine):
    machine.cards(answer, code)
    code, _, said = machine.run()
    assert code == 0 and told in said.splitlines()[0] and machine.installs()[-1][-1] == f"./{CPU}"


def test_a_query_that_fails_for_once_keeps_the_environment(machine):
    machine.cards("8.0, 580.65.06")
    machine.run()
    assert machine.installs()[-1][-1] == f"./{CUDA}"
    machine.cards("Unable to determine the device handle for GPU: GPU is lost.", 15)
    code, _, said = machine.run()
    assert code == 0 and "GPU is lost" in said and machine.installs() == []
    (machine.fakes / "nvidia-smi").unlink()  # another machine
    machine.run()
    assert machine.installs()[-1][-1] == f"./{CPU}"


@pytest.mark.parametrize(
    "config, has_index",
    [
        ("global.index-url='https://index.example/simple'", True),
        ("global.extra-index-url='https://index.example/simple'", True),
        (":env:.find-links='/wheels'", True),
        ("install.index-url='https://index.example/simple'", True),
        ("global.cert='/etc/ssl/certs.pem'\nglobal.constraint='/etc/constraints.txt'", False),
        (":env:.index-url=''", False),
    ],
)
def test_torch_is_of_the_index_that_pip_is_configured_with(config, has_index, machine):
    (machine.fakes / "pip.conf").write_text(config + "\n")
    for answer, file in (("", CPU), ("7.0, 580.65.06", V100)):
        if answer:
            machine.cards(answer)
        machine.run()
        *first, last = machine.installs()
        assert (first == []) == has_index and last[-1] == f"./{file}"


# --- what a machine lacks -------------------------------------------------------------------------


def old_python(machine):
    (machine.fakes / "version").write_text("3.10\n")


def no_python(machine):
    machine.environment["PYTHON"] = "python3.99"


def no_ensurepip(machine):
    (machine.fakes / "no_ensurepip").touch()


def an_arm(machine):
    machine.program("uname", "#!/bin/sh\necho Linux aarch64")


def a_mac(machine):
    machine.program("uname", "#!/bin/sh\necho Darwin arm64")


def old_driver(machine):
    machine.cards("9.0, 550.54.15")


def old_driver_of_a_v100(machine):
    machine.cards("7.0, 470.57.02")


def ancient_driver(machine):
    machine.cards('Field "compute_cap" is not a valid field to query.', 2)


def an_environment_of_the_users(machine):
    machine.venv.mkdir()
    (machine.venv / "pyvenv.cfg").touch()


@pytest.mark.parametrize(
    "lack, told",
    [
        (old_python, ["3.11", "python3 is: 3.10"]),
        (no_python, ["3.11", "python3.99: not found"]),
        (no_ensurepip, ["ensurepip", "apt install python3.11-venv"]),
        (an_arm, ["x86-64", "Linux aarch64"]),
        (a_mac, ["Linux", "Darwin arm64"]),
        (old_driver, ["driver 550", "580"]),
        (old_driver_of_a_v100, ["driver 470", "525"]),
        (ancient_driver, ["driver", "compute_cap"]),
        (an_environment_of_the_users, ["not of its making", "drop ./with"]),
    ],
)
def test_what_a_machine_lacks_is_one_line(lack, told, machine):
    lack(machine)
    code, output, said = machine.run("echo", "ran")
    (line,) = said.splitlines()
    assert (
        code == 1
        and output == ""
        and all(part in line for part in told)
        and machine.installs() == []
    )


def test_without_a_command_it_says_how_it_is_used(machine):
    for words in ([], ["--help"]):
        process = machine.start(*words)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1 and "./with CMD" in said and machine.installs() == []


# --- when .venv is made ---------------------------------------------------------------------------


def test_it_is_made_once_and_again_when_its_requirements_its_python_or_its_place_change(machine):
    assert machine.run()[0] == 0 and machine.installs()
    code, _, said = machine.run()
    assert code == 0 and said == "" and machine.installs() == []

    with (machine.clone / CUDA).open("a") as file:  # not those of this machine
        file.write("other\n")
    machine.run()
    assert machine.installs() == []
    with (machine.clone / CPU).open("a") as file:
        file.write("other\n")
    machine.run()
    assert machine.installs()

    # the system's Python, that of .venv too, has become another
    (machine.fakes / "version").write_text("3.12\n")
    machine.run()
    assert machine.installs()

    # its programs name their interpreter by its path
    moved = machine.clone.rename(machine.clone.with_name("moved"))
    machine.clone, machine.venv = moved, moved / ".venv"
    machine.run()
    assert machine.installs() and machine.run()[2] == ""


def test_another_python_in_path_does_not_replace_a_finished_one(machine):
    machine.run()
    machine.installs()
    machine.program("python3", "#!/bin/sh\necho 3.9\n")  # of another environment
    assert machine.run("echo", "ran") == (0, "ran\n", "") and machine.installs() == []


@pytest.mark.parametrize("when", ["first", "last"])
def test_a_failure_is_one_line_and_the_next_call_mends_it(when, machine):
    condition = "--index-url" if when == "first" else "requirements-cpu"
    (machine.fakes / "pip").write_text(
        f"case \"$*\" in *{condition}*) touch half; echo 'ERROR: No space left' >&2; exit 1 "
        ";; esac\n"
    )
    code, output, said = machine.run("echo", "ran", cwd=machine.fakes)
    assert code == 1 and output == ""
    *_, reason, line = said.splitlines()
    assert reason == "ERROR: No space left" and "pip install" in line
    assert "room for .venv: " in line and "next call" in line
    assert (f"-r {CPU}" in line) == (when == "last")

    machine.installs()
    (machine.fakes / "pip").write_text("")
    assert machine.run("echo", "ran")[:2] == (0, "ran\n") and len(machine.installs()) == 2
    assert machine.run()[2] == ""


def test_ctrl_c_is_said_and_the_next_call_begins_anew(machine):
    (machine.fakes / "pip").write_text(
        "touch $VIRTUAL_ENV/half; exec sleep 60\n".replace("$VIRTUAL_ENV", "$here")
    )
    process = machine.start("echo", "ran")
    wait_for((machine.fakes / "half").exists)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, said = process.communicate(timeout=30)
    assert process.returncode == 130 and output == "" and "interrupted" in said.splitlines()[-1]
    (machine.fakes / "pip").write_text("")
    assert machine.run("echo", "ran")[:2] == (0, "ran\n")


# --- the lock -------------------------------------------------------------------------------------


def test_a_second_call_waits_and_installs_nothing(machine):
    (machine.fakes / "pip").write_text("while [ ! -e $here/go ]; do sleep 0.05; done\n")
    first = machine.start("echo", "first")
    wait_for(lambda: (machine.fakes / "installs").read_text())
    second = machine.start("echo", "second")
    assert "waits" in second.stderr.readline()
    (machine.fakes / "go").touch()
    for process, word in ((first, "first\n"), (second, "second\n")):
        assert process.communicate(timeout=30)[0] == word and process.returncode == 0
    assert len(machine.installs()) == 2  # torch, and the rest


def test_a_call_that_was_killed_leaves_no_lock(machine):
    (machine.fakes / "pip").write_text("exec sleep 60\n")
    killed = machine.start("true")
    wait_for(lambda: (machine.fakes / "installs").read_text())
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=30)
    (machine.fakes / "pip").write_text("")
    machine.installs()
    code, output, said = machine.run("echo", "ran")
    assert (code, output) == (0, "ran\n") and "waits" not in said and len(machine.installs()) == 2


def test_what_a_killed_call_has_started_comes_to_its_end_first(machine):
    (machine.fakes / "pip").write_text("while [ ! -e $here/go ]; do sleep 0.05; done\n")
    killed = machine.start("true")
    wait_for(lambda: (machine.fakes / "installs").read_text())
    killed.kill()  # pip lives on, and writes into .venv
    other = machine.start("echo", "ran")
    assert "waits" in other.stderr.readline() and len(machine.installs()) == 1
    (machine.fakes / "go").touch()
    assert other.communicate(timeout=30)[0] == "ran\n" and machine.installs()[-1][-1] == f"./{CPU}"
    killed.communicate(timeout=30)


def test_nothing_is_taken_from_under_a_command_that_runs(machine):
    """A machine without a card, or new requirements, while a training runs in the same folder."""
    machine.cards("8.0, 580.65.06")
    training = machine.start("sh", "-c", "echo up; exec sleep 60")
    assert training.stdout.readline() == "up\n"
    machine.installs()
    assert machine.run("echo", "beside it")[:2] == (0, "beside it\n")
    (machine.fakes / "nvidia-smi").unlink()
    other = machine.start("echo", "ran")
    assert (
        "waits" in other.stderr.readline()
        and machine.installs() == []
        and (machine.venv / "stamp").exists()
    )
    training.kill()
    training.communicate(timeout=30)
    assert other.communicate(timeout=30)[0] == "ran\n" and machine.installs()[-1][-1] == f"./{CPU}"


# --- how it runs a command ------------------------------------------------------------------------


def test_a_command_is_itself(machine, tmp_path):
    """Its own folder, words, input, output, exit code and signals."""
    machine.run()
    folder = tmp_path / "another folder"
    folder.mkdir()
    assert machine.run("pwd", cwd=folder) == (0, f"{folder}\n", "")
    assert machine.run("printf", "<%s>", "a b", "", "*") == (0, "<a b><><*>", "")
    assert machine.run("sh", "-c", "exit 75")[0] == 75
    assert machine.run("no-such-program")[0] == 127
    process = machine.start("sh", "-c", "echo $$; exec sleep 60")
    assert int(process.stdout.readline()) == process.pid
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM


def test_what_makes_the_environment_neither_reads_the_input_nor_writes_the_output(machine):
    (machine.fakes / "pip").write_text("cat; echo noise\n")
    with (machine.fakes / "version").open() as file:
        code, output, said = machine.run("cat", stdin=file)
    assert (code, output) == (0, "3.11\n") and "noise" in said


def test_the_environment_is_first_even_inside_another(machine, tmp_path):
    other = tmp_path / "other"
    (other / "bin").mkdir(parents=True)
    machine.environment |= {
        "VIRTUAL_ENV": str(other),
        "PYTHONHOME": str(other),
        "PYTHONPATH": "mine",
        "PIP_USER": "1",
    }
    machine.environment["PATH"] = f"{other}/bin:{machine.environment['PATH']}"
    (machine.fakes / "pip").write_text('echo "${PYTHONPATH-unset} $PIP_USER"\n')
    code, output, said = machine.run(
        "sh", "-c", 'command -v python; echo "$VIRTUAL_ENV $PYTHONPATH ${PYTHONHOME-no}"'
    )
    assert code == 0 and output.splitlines() == [
        f"{machine.venv}/bin/python",
        f"{machine.venv} mine no",
    ]
    assert said.splitlines()[1:] == ["unset 0", "unset 0"]


def test_it_is_found_through_a_link_and_from_its_own_folder(machine, tmp_path):
    machine.run()
    machine.installs()
    link = tmp_path / "link"
    link.symlink_to(machine.clone / "with")
    for words, folder in (
        ([link], "/"),
        (["./with"], machine.clone),
        (["sh", "with"], machine.clone),
    ):
        done = subprocess.run(
            [*words, "printenv", "VIRTUAL_ENV"],
            cwd=folder,
            env=machine.environment,
            capture_output=True,
            text=True,
        )
        assert done.stdout == f"{machine.venv}\n" and machine.installs() == []


@pytest.mark.slow
def test_a_real_environment(machine):
    """By Python, venv and pip themselves, with a package that comes with them; inside another
    environment."""
    (machine.clone / CPU).write_text("pip\n")
    machine.environment |= {"PIP_FIND_LINKS": str(machine.clone), "PYTHONPATH": str(machine.fakes)}
    (machine.fakes / "python3").unlink()
    machine.environment["PATH"] = f"{Path(sys.executable).parent}:{machine.environment['PATH']}"
    elsewhere = machine.clone.parent / "where there is room"
    elsewhere.mkdir()
    machine.venv.symlink_to(elsewhere)
    code, output, said = machine.run("python", "-c", "import sys; print(sys.prefix)")
    assert (code, output) == (0, f"{elsewhere}\n") and len(said.splitlines()) == 1
    assert machine.run("pip", "--version")[1].startswith("pip ") and machine.run()[2] == ""
    (machine.clone / CPU).write_text("no-such-package-of-anybody\n")
    machine.environment["PIP_NO_INDEX"] = "1"
    code, _, said = machine.run()
    last = said.splitlines()[-1]
    assert (
        code == 1
        and "No matching distribution" in said
        and f"-r {CPU} from the index that pip is" in last
    )
