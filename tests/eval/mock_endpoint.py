"""An OpenAI-compatible endpoint on a free local port that misbehaves by a seed."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], str]
FAULTS = ("rate limit", "error", "garbage", "no choices", "slow", "drop")


class MockEndpoint:
    """answer: content for a request body. fault_share: of first, second, ... attempts alike, drawn by the seed.

    attempts and answered count requests by the hash of their body; headers keeps the last one's.
    """

    def __init__(self, answer: Answer, fault_share: float = 0.0, seed: int = 0, slow: float = 0.0) -> None:
        self.answer, self.fault_share, self.seed, self.slow = answer, fault_share, seed, slow
        self.attempts: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.times: list[float] = []
        self.headers: dict[str, str] = {}
        self.script: list[str] = []
        """Faults for the next requests, before any is drawn."""
        self.retry_after = "0"
        self.current = False
        """Refuse what OpenAI's current models refuse."""
        self.thoughts = 0
        """Tokens thought before an answer of 7; half of them at low effort. They count against the limit."""
        self.hard: Callable[[dict[str, Any]], bool] = lambda body: True
        """Which requests are thought about."""
        self.thinks_aloud = False
        """Write the thoughts into the content, as a server without a parser of thoughts does."""
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint.handle(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        key = hashlib.sha256(body).hexdigest()
        with self._lock:
            self.times.append(time.monotonic())
            self.headers = dict(request.headers)
            self.attempts[key] += 1
            fault = self._fault(key)
            self.faults[fault] += 1
        try:
            self._reply(request, json.loads(body), fault)
        except (BrokenPipeError, ConnectionResetError):  # the client was killed or gave up
            return
        if fault == "none":
            with self._lock:
                self.answered[key] += 1

    def _fault(self, key: str) -> str:
        if self.script:
            return self.script.pop(0)
        draw = random.Random(f"{self.seed}/{key}/{self.attempts[key]}")
        return draw.choice(FAULTS) if draw.random() < self.fault_share else "none"

    def _reply(self, request: BaseHTTPRequestHandler, body: dict[str, Any], fault: str) -> None:
        if fault == "drop":
            request.close_connection = True
            return
        if fault == "slow":
            time.sleep(self.slow)
        refused = refusal(body) if self.current else None
        status = {"rate limit": 429, "error": 500, "refusal": 401}.get(fault, 400 if refused else 200)
        content = {"garbage": b"<html>Bad gateway", "no choices": b'{"choices": []}'}.get(fault)
        content = content or refused or self._completion(body)
        request.send_response(status)
        if fault == "rate limit":
            request.send_header("Retry-After", self.retry_after)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _completion(self, body: dict[str, Any]) -> bytes:
        thought = self.thoughts * self.hard(body) // (2 if body.get("reasoning_effort") == "low" else 1)
        limit = body.get("max_completion_tokens") or body["max_tokens"]
        written, cut = min(limit, thought + 7), limit < thought + 7
        aloud = f"<think>{'hm ' * min(limit, thought)}" if self.thinks_aloud and thought else ""
        said = aloud if cut else aloud + "</think>\n\n" * bool(aloud) + self.answer(body)
        message = {"role": "assistant", "content": said, "reasoning_content": "hm " * min(limit, thought)}
        usage = {"prompt_tokens": 100, "completion_tokens": written, "total_tokens": 100 + written}
        choice = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop"}
        return json.dumps({"choices": [choice], "usage": usage}).encode()


def refusal(body: dict[str, Any]) -> bytes | None:
    """How OpenAI's models that think refuse parameters of older ones; None: they do not."""
    if "max_tokens" in body:
        use = "Use 'max_completion_tokens' instead."
        said = f"Unsupported parameter: 'max_tokens' is not supported with this model. {use}"
        return error(said, "max_tokens", "unsupported_parameter")
    if body.get("temperature", 1) != 1:
        only = "Only the default (1) value is supported."
        said = f"Unsupported value: 'temperature' does not support {body['temperature']} with this model. {only}"
        return error(said, "temperature", "unsupported_value")
    return None


def error(said: str, parameter: str, code: str) -> bytes:
    body = {"message": said, "type": "invalid_request_error", "param": parameter, "code": code}
    return json.dumps({"error": body}).encode()
