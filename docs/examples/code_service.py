"""A code service over HTTP as a tool, for machines on which `--tools python` cannot run programs:
--tools docs/examples/code_service.py:run_code

The protocol is that of SandboxFusion (github.com/bytedance/SandboxFusion): CODE_SERVICE_URL is its
address. Proxies are ignored: a service stands in the cluster. The policy reads how its program
failed; if the service fails, the sample is lost (`rollout/tool_failed`).
"""

import json
import os
import time
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

ADDRESS = os.environ.get("CODE_SERVICE_URL", "http://127.0.0.1:8080").rstrip("/")
LANGUAGE = "python"  # the docstring of `run_code` tells the policy
PROGRAM_S = 10.0  # to compile a program, and to run it
SERVICE_S = 10.0  # for the service besides, without a byte of its answer
MEMORY_MB = 4096
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # before each retry; --tool-timeout ends them, too
MAX_BODY = 2**24  # bytes of an answer: SandboxFusion cuts what a program prints at 2**20
ERROR_LINES = 10  # of stderr: the last ones say what went wrong

opener = build_opener(ProxyHandler({}))


def run_code(code: str) -> tuple[str, list, dict]:
    """Run a Python program. What it prints comes back. Nothing is kept for the next program.

    code: the whole program
    """
    result = ask(code)
    printed = result["stdout"] or ""
    errors = result["stderr"] or ""
    if result["status"] == "TimeLimitExceeded":
        raise ValueError(f"{printed}\ntimeout after {PROGRAM_S:g} s".lstrip())
    if result["return_code"] != 0:
        reason = "\n".join(errors.splitlines()[-ERROR_LINES:])
        raise ValueError(f"{printed}\nexit code {result['return_code']}\n{reason}".strip())
    output = printed + errors  # warnings
    return output, [], {"acted": bool(output)}


run_code.trusted = True  # a SystemExit, or a timeout of the call, is not the policy's fault


def ask(code: str) -> dict:
    """What the service says of a program: status, return_code, stdout and stderr. SystemExit if it
    says nothing of use."""
    program = {
        "code": code.encode(errors="replace").decode(),  # without lone surrogates
        "language": LANGUAGE,
        "compile_timeout": PROGRAM_S,
        "run_timeout": PROGRAM_S,
        "memory_limit_MB": MEMORY_MB,
    }
    for pause_s in (0.0, *PAUSES_S):
        time.sleep(pause_s)
        try:
            return parse(post(json.dumps(program).encode()))
        except ConnectionError as error:
            failure = error
    raise SystemExit(f"the code service at {ADDRESS} fails: {failure}")


def post(program: bytes) -> bytes:
    """The answer to one request. ConnectionError if another one may be answered."""
    try:
        request = Request(f"{ADDRESS}/run_code", program, {"Content-Type": "application/json"})
        with opener.open(request, timeout=2 * PROGRAM_S + SERVICE_S) as response:
            body = response.read(MAX_BODY)
            if response.length and len(body) < MAX_BODY:
                raise ConnectionError("its answer was cut off")
            return body
    except HTTPError as error:
        if error.code != 429 and error.code < 500:
            raise SystemExit(f"{ADDRESS} refuses a program: HTTP {error.code}") from None
        raise ConnectionError(f"HTTP {error.code}") from None
    except (OSError, HTTPException) as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from None
    except ValueError as error:  # the address
        raise SystemExit(f"CODE_SERVICE_URL {ADDRESS}: {error}") from None


def parse(body: bytes) -> dict:
    """As `ask`. ConnectionError if the service could not run the program."""
    try:
        answer = json.loads(body)
        if answer["status"] == "SandboxError":
            raise ConnectionError(f"SandboxError: {answer['message']!r:.200}")
        result = answer["run_result"] or answer["compile_result"]  # if that failed, nothing ran
        return {name: result[name] for name in ("status", "return_code", "stdout", "stderr")}
    except (ValueError, TypeError, KeyError):
        raise SystemExit(f"what answers at {ADDRESS} is no code service") from None
