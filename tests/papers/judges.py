"""Judges for tests: an HTTP server on this machine that speaks as much of OpenAI's protocol as is
needed."""

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from papers.pyvision.judge_prompt import PROBES

RIGHT = re.compile(r"\[Reference answer\] (.*)\n\[Model's answer\] (.*)\nJudgement:$")
SYNONYMS = {(case.truth, case.answer) for case, verdict in PROBES.items() if verdict}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class LocalJudge:
    """Says 1 where both answers are the same; `behave(number, answer)` may return another reply: a
    text, one that was cut (in a tuple), a status code, whose message repeats the key, seconds to
    hang, what answers by itself (a function of the handler), or None. `models` is what it lists."""

    models = b'{"object": "list", "data": [{"id": "judge-of-tests", "object": "model"}]}'

    def __init__(self, behave=lambda number, answer: None, port: int = 0):
        self.behave = behave
        self.asked = []
        self.requests = []
        self.lock = threading.Lock()
        self.port = port
        self.open()
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def open(self) -> None:
        """Listen, again after `close`."""
        self.server = Server(("127.0.0.1", self.port), self.handler())
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def handler(judge):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def send(self, body: object, status: int = 200) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.send(judge.models)

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                truth, answer = RIGHT.search(request["messages"][-1]["content"]).groups()
                with judge.lock:
                    judge.asked.append(answer)
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    judge.requests.append((request, headers))
                    number = len(judge.asked)
                said = judge.behave(number, answer)
                if callable(said):
                    said(self)
                    return
                if isinstance(said, float):
                    time.sleep(said)
                    return
                if isinstance(said, int):
                    self.send(
                        {
                            "error": {
                                "message": f"as the test wants it for {headers['authorization']}"
                            }
                        },
                        said,
                    )
                    return
                same = truth == answer or (truth, answer) in SYNONYMS
                reply = f"Judgement: {same:d}" if said is None else said
                if isinstance(reply, bytes):
                    self.send(reply)
                    return
                reason, reply = ("length", *reply) if isinstance(reply, tuple) else ("stop", reply)
                choice = {
                    "index": 0,
                    "finish_reason": reason,
                    "message": {"role": "assistant", "content": reply},
                }
                self.send(
                    {
                        "id": "x",
                        "object": "chat.completion",
                        "created": 0,
                        "model": "m",
                        "choices": [choice],
                    }
                )

        return Handler
