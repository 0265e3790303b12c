"""A program that tries what no program of the policy may do, and prints what it could do.

Its text runs in a sandbox, with a call of `main` behind it (python.py), so it imports nothing of
this project. An attempt that fails raises an OSError, or returns False.
"""

import os
import socket
import sys


def open_socket() -> bool:
    socket.socket()
    return True


def read_file(path: str) -> bool:
    with open(path):
        return True


def write_outside() -> bool:
    return any(os.access(folder, os.W_OK) for folder in ("/", "/usr", sys.prefix))


def start_process() -> bool:
    if os.fork() == 0:
        os._exit(0)
    return True


def see_environment(own_names: set[str]) -> bool:
    return bool(os.environ.keys() - own_names)


def see_processes() -> bool:
    processes = {name for name in os.listdir("/proc") if name.isdigit()}
    return bool(processes - {"1", str(os.getpid())})


def main(project_file: str, own_names: set[str]) -> None:
    """project_file: the path of a file of this project. own_names: names of the environment
    variables that the sandbox sets itself."""
    attempts = {
        "open a socket": (open_socket,),
        "read this project's files": (read_file, project_file),
        "write outside of its folder": (write_outside,),
        "start a process": (start_process,),
        "see the trainer's environment": (see_environment, own_names),
        "see other processes": (see_processes,),
    }
    successes = []
    for title, (attempt, *arguments) in attempts.items():
        try:
            if attempt(*arguments):
                successes.append(title)
        except OSError:
            pass
    print(", ".join(successes) or "nothing")
