"""What `python -m common.doctor` tells, and what it must not tell; nothing that fails or hangs ends
it."""

import getpass
import os
import platform
import re
import sys
import time
from pathlib import Path

import pytest
from helpers import deadline, run_script
from pages import blocks

from common import doctor
from common.doctor import Check


def pasted() -> list[str]:
    (command,) = [block for _, block in blocks("docs/trouble.md") if "common.doctor" in block]
    return command.split()


@pytest.mark.slow
def test_the_doctor_as_pasted():
    launcher, *arguments = pasted()
    assert launcher == "python"
    secrets = {"WANDB_API_KEY": "sesame"}
    done = run_script(*arguments, env=secrets, fresh=True)
    answers = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(answers) == list(doctor.CHECKS)
    assert (
        re.fullmatch(r"[0-9a-f]{40}(-dirty)?|None", answers["commit"])
        and "torch 2" in answers["packages"]
    )
    assert answers["--tools python"] and answers["--engine vllm"]
    assert (
        "torch.bfloat16" in done.stdout
        or "torch.float32" in done.stdout
        or "no answer" in done.stdout
    )
    for name in (str(Path.home()), f"/{getpass.getuser()}/", platform.node(), "sesame"):
        assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", done.stdout), name


@pytest.mark.parametrize("asked, code", [("--help", 0), ("--paste", 2)])
def test_the_command_teaches_before_it_runs(monkeypatch, capsys, asked, code):
    monkeypatch.setattr(doctor, "CHECKS", {"anything": Check("print('asked')")})
    monkeypatch.setattr(sys, "argv", ["doctor.py", asked])
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    said = capsys.readouterr()
    assert ended.value.code == code and "usage: python -m common.doctor" in said.out + said.err
    assert "asked" not in said.out, "it has not run"
    monkeypatch.setattr(sys, "argv", ["doctor.py"])
    doctor.main()
    assert capsys.readouterr().out == "anything: asked\n"


def test_without_torch_it_says_first_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"anything": Check("print('asked')")})
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "torch" else name)
    monkeypatch.setattr(sys, "argv", ["doctor.py"])
    doctor.main()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("there is no torch: pip install -r requirements.txt")
    assert second == "anything: asked"


def test_every_check_is_run():
    names = [name for name in vars(doctor) if name.startswith(("report_", "try_"))]
    programs = [check.program for check in doctor.CHECKS.values()]
    assert programs == [f"from common.doctor import {name}; {name}()" for name in names]


def test_the_doctor_tells_what_the_container_leaves(monkeypatch, capsys):
    """Not what the machine has."""
    monkeypatch.setattr("common.limits.free_memory", lambda: 3 * 2**28)
    monkeypatch.setattr("common.limits.total_memory", lambda: 2**29 * 7)
    monkeypatch.setattr("common.limits.usable_cpus", lambda: 7)
    doctor.report_cpus()
    doctor.report_memory()
    cpus, memory = capsys.readouterr().out.splitlines()
    assert cpus.startswith(f"7 of {os.cpu_count()} ") and memory.startswith(
        "0.8 GiB free of 3.5; the machine has "
    )


def test_what_fails_dies_or_hangs_costs_a_line(monkeypatch, capsys):
    foreign = f"raise OSError('/home/me/x.so of {platform.node()}: cannot open')"
    checks = {
        "fails": Check("import no_such_package", "install it"),
        "dies": Check("import os; print(1); os.abort()", "tell us"),
        "hangs": Check("import time; time.sleep(60)", "wait"),
        "silent": Check("pass"),
        "names": Check(foreign),
        "works": Check("print('yes')"),
    }
    monkeypatch.setattr(doctor, "CHECKS", checks)
    monkeypatch.setattr(doctor, "SECONDS", 2)
    monkeypatch.setattr(sys, "argv", ["doctor.py"])
    start = time.monotonic()
    with deadline(60):
        doctor.main()
    assert time.monotonic() - start < 30
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert (
        lines["fails"]
        == "ModuleNotFoundError: No module named 'no_such_package' (exit code 1) install it"
    )
    assert lines["dies"].endswith("(exit code -6) tell us")
    # nothing to install: whatever was asked may work
    assert lines["hangs"] == "no answer within 2 s: ask again when the machine is less busy"
    assert lines["silent"] == "no word" and lines["works"] == "yes"
    assert lines["names"] == "OSError: .../x.so of HOST: cannot open (exit code 1) "


def test_a_sandbox_that_does_not_start_is_told_in_our_words(monkeypatch):
    def refuse(*_):
        raise ValueError("--tools python: the sandbox does not start. docs/sandbox.md")

    monkeypatch.setattr("common.sandbox.python.PythonWorkers", refuse)
    with pytest.raises(SystemExit, match=r"^--tools python: the sandbox does not start"):
        doctor.try_sandbox()


def test_what_is_pasted_names_nobody(monkeypatch):
    monkeypatch.setattr(doctor.os.path, "expanduser", lambda _: "/home/ann")
    monkeypatch.setattr(doctor.platform, "node", lambda: "gpu7")
    text = "/home/ann/x on gpu7.corp.example.org at 10.1.2.3:29500, torch 2.11.0"
    assert doctor.anonymous(text) == "~/x on HOST at ADDRESS:29500, torch 2.11.0"
