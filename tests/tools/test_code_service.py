"""The example of a tool that runs programs in a code service over HTTP, against a small service on
this machine.

pytest tests/tools/test_code_service.py
"""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from helpers import ROOT, deadline

from common.data.protocols import Call
from common.tools.pools import ToolWorkers
from common.types import MAX_TEXT, ToolReply
from common.workers.pool import load_function

FILE = f"{ROOT}/docs/examples/code_service.py"
HANG = "while True: pass"
COMPILE_ERROR = {
    "status": "Failed",
    "message": "",
    "compile_result": {
        "status": "Finished",
        "return_code": 1,
        "stdout": "",
        "stderr": "error: expected ';'",
    },
    "run_result": None,
}
SANDBOX_ERROR = {"status": "SandboxError", "message": "no pid is left", "run_result": None}


def run(program: dict) -> dict:
    """What SandboxFusion answers. It really runs the program, but knows which one hangs."""
    result = {"status": "Finished", "execution_time": 0.1}
    if program["code"] == HANG:
        result |= {"status": "TimeLimitExceeded", "return_code": None, "stdout": "1\n"}
        result["stderr"] = None
    else:
        command = [sys.executable, "-ISc", program["code"]]
        ended = subprocess.run(command, capture_output=True, text=True)
        result["return_code"] = ended.returncode
        result |= {"stdout": ended.stdout, "stderr": ended.stderr}
    status = "Failed" if result["return_code"] != 0 else "Success"
    return {
        "status": status,
        "message": "",
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": None,
        "files": {},
    }


class Service(ThreadingHTTPServer):
    """`faults` are its first answers: a status, a body, or None to hang up; then it works."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.faults = []
        self.programs = []
        threading.Thread(target=self.serve_forever, args=[0.02], daemon=True).start()


class Cut(bytes):
    """A body that ends too soon."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        program = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.programs.append((self.path, program))
        fault = self.server.faults.pop(0) if self.server.faults else run(program)
        if fault is None:
            return
        status = fault if isinstance(fault, int) else 200
        body = fault if isinstance(fault, bytes) else json.dumps(fault).encode()
        self.send_response(status)
        length = len(body) + 100 * isinstance(fault, Cut)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def service():
    service = Service()
    yield service
    service.shutdown()
    service.server_close()


@pytest.fixture
def run_code(service, monkeypatch):
    """The tool, for this service; it does not pause before retries."""
    function = load_function(f"{FILE}:run_code", "--tools")
    monkeypatch.setitem(function.__globals__, "ADDRESS", service.address)
    monkeypatch.setitem(function.__globals__, "PAUSES_S", (0.0, 0.0, 0.0))
    return function


def test_a_program_that_prints(service, run_code):
    code = "import sys; print('\u00e9' * 2); print('a warning', file=sys.stderr)"
    assert run_code(code) == ("éé\na warning\n", [], {"acted": True})
    assert run_code("x = 1") == ("", [], {"acted": False})
    assert service.programs[0] == (
        "/run_code",
        {
            "code": code,
            "language": "python",
            "compile_timeout": 10.0,
            "run_timeout": 10.0,
            "memory_limit_MB": 4096,
        },
    )


def test_a_result_without_texts(service, run_code):
    result = {"status": "Finished", "return_code": 0, "stdout": None, "stderr": None}
    service.faults = [{"status": "Success", "message": "", "run_result": result}]
    assert run_code("x = 1") == ("", [], {"acted": False})


def test_a_program_that_fails(run_code):
    with pytest.raises(ValueError) as failure:
        run_code("print('so far')\nimport sys\nsys.stderr.write('noise\\n' * 30)\n{}['x']")
    lines = str(failure.value).splitlines()
    assert lines[:3] == ["so far", "", "exit code 1"] and lines[-1] == "KeyError: 'x'"
    assert len(lines) == 3 + 10


def test_a_program_that_does_not_compile(service, run_code):
    service.faults = [COMPILE_ERROR]
    with pytest.raises(ValueError, match=r"^exit code 1\nerror: expected ';'$"):
        run_code("int main() { return 0 }")


def test_a_program_that_runs_out_of_time(run_code):
    with pytest.raises(ValueError, match=r"^1\n\ntimeout after 10 s$"):
        run_code(HANG)


@pytest.mark.parametrize("faults", [[503, 429], [None, 500], [SANDBOX_ERROR]])
def test_a_service_that_fails_at_first(service, run_code, faults):
    service.faults = list(faults)
    assert run_code("print(1)")[0] == "1\n"
    assert len(service.programs) == len(faults) + 1


@pytest.mark.parametrize(
    "fault, reason, requests",
    [
        (503, "fails: HTTP 503", 4),
        (SANDBOX_ERROR, "fails: SandboxError: 'no pid is left'", 4),
        (422, "refuses a program: HTTP 422", 1),
        (b"<html>", "is no code service", 1),
        ([1], "is no code service", 1),
        ({"status": "Success", "run_result": {"status": "Finished"}}, "is no code service", 1),
    ],
)
def test_a_service_of_no_use(service, run_code, fault, reason, requests):
    service.faults = [fault] * 9
    with pytest.raises(SystemExit, match=reason):
        run_code("print(1)")
    assert len(service.programs) == requests


def test_a_service_that_is_down(service, run_code):
    service.shutdown()
    service.server_close()
    with pytest.raises(SystemExit, match=f"the code service at {service.address} fails: .*refused"):
        run_code("print(1)")


def test_an_answer_that_is_cut_off_is_asked_for_again(service, run_code):
    whole = b'{"status": "Success"'
    service.faults = [Cut(whole)]
    assert run_code("print(1)")[0] == "1\n" and len(service.programs) == 2


def test_an_address_that_is_none_is_not_the_policys_fault(run_code, monkeypatch):
    monkeypatch.setitem(run_code.__globals__, "ADDRESS", "node7")
    with pytest.raises(SystemExit, match="CODE_SERVICE_URL node7: unknown url type"):
        run_code("print(1)")


def test_it_waits_longer_before_each_retry(service, run_code, monkeypatch):
    pauses = []
    monkeypatch.undo()
    monkeypatch.setitem(run_code.__globals__, "ADDRESS", service.address)
    # its own `time` alone: a thread that another test has left behind may sleep, too
    monkeypatch.setitem(run_code.__globals__, "time", SimpleNamespace(sleep=pauses.append))
    service.faults = [503] * 5
    assert run_code("print(1)")[0] == "1\n"
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]


def test_the_workers_of_a_run(service, monkeypatch):
    monkeypatch.setenv("CODE_SERVICE_URL", f"{service.address}/")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which is not asked
    tools = ToolWorkers(f"{FILE}:run_code", workers=1, timeout_s=20.0)

    def answer(code: str) -> ToolReply:
        tools.submit("key", Call("run_code", {"code": code}), {}, {})
        with deadline(20):
            ((_, reply),) = tools.poll(20.0)
        return reply

    try:
        assert tools.tools["run_code"].schema["function"] == {
            "name": "run_code",
            "description": "Run a Python program. What it prints comes back. Nothing is kept for "
            "the next program.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "the whole program"}},
                "required": ["code"],
            },
        }
        assert answer("print(6 * 7)") == ToolReply("42\n", info={"acted": True})
        assert answer("'\ud800'") == ToolReply("", info={"acted": False})  # a lone surrogate
        long = answer("print('a' * 50_000)").text
        assert len(long) == MAX_TEXT and "[... cut: the whole has 50001 characters ...]" in long
        failed = answer("1 / 0")
        assert failed.error and not failed.failed
        assert failed.text.startswith("Error: exit code 1\nTraceback")
        assert failed.text.endswith("ZeroDivisionError: division by zero")
        service.faults = [b"garbage"]
        lost = answer("print(1)")
        assert lost.failed and not lost.error
        assert lost.text.startswith(f"SystemExit: what answers at {service.address} is no code")
        assert answer("print(1)").text == "1\n"  # the worker lives on
    finally:
        tools.close()
