"""A small server that speaks the OpenAI streaming protocol, and forgets or keeps prompts as it is told."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType


@dataclass
class Behaviour:
    """What is wrong with it, or just different; may be changed while it serves."""

    tells_usage: bool = True
    has_metrics: bool = False
    takes_extensions: bool = True
    streams: bool = True
    dies_after: int | None = None
    """Events of a stream until the connection is cut."""
    says: bytes | None = None
    """An event in place of the first."""
    status: int = 200
    other_tokens: bool = False
    keeps: bool = True
    """Whether what was computed survives POST /clear."""
    afterwards: Behaviour | None = None
    """How it behaves after POST /clear."""


@dataclass
class Server:
    """A context manager. `seen` has the requests' bodies; `known` the prompts that it has computed."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    model: str = "tiny"
    port: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    hits: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        server = self

        class Handler(_Handler):
            owner = server

        self._http = _Http(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    owner: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, json.dumps({"data": [{"id": self.owner.model}]}))
        elif self.path == "/metrics" and self.owner.behaviour.has_metrics:
            self._answer(
                200, f'# TYPE x counter\nvllm:prefix_cache_hits_total{{a="b"}} {self.owner.hits}.0\n'
            )
        else:
            self._answer(404, "not here")

    def do_POST(self) -> None:
        if self.path == "/clear":
            if not self.owner.behaviour.keeps:
                self.owner.known.clear()
            self.owner.behaviour = self.owner.behaviour.afterwards or self.owner.behaviour
            self._answer(200, "")
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        behaviour = self.owner.behaviour
        self.owner.seen.append(body)
        if behaviour.status != 200:
            self._answer(behaviour.status, "out of order")
        elif "return_token_ids" in body and not behaviour.takes_extensions:
            self._answer(400, "unknown field return_token_ids")
        elif not behaviour.streams:
            self._answer(200, "{}", "application/json")
        else:
            self._stream(body, behaviour)

    def _stream(self, body: dict[str, Any], behaviour: Behaviour) -> None:
        prompt = body.get("prompt") or body["messages"][0]["content"]
        length = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        name = json.dumps(prompt)
        cached = length - 1 if name in self.owner.known else 0
        self.owner.known.add(name)
        self.owner.hits += cached
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        for i in range(body["max_tokens"]):
            if i == behaviour.dies_after:
                self.close_connection = True
                return
            if behaviour.says is not None:
                self._write(behaviour.says)
            token = length + i + (7 if behaviour.other_tokens else 0)
            text = {"text": f"t{token}"} if "prompt" in body else {"delta": {"content": f"t{token}"}}
            ids = {"token_ids": [token]} if body.get("return_token_ids") else {}
            self._write(json.dumps({"choices": [{**text, **ids}]}).encode())
        if behaviour.tells_usage:
            usage = {"prompt_tokens": length, "completion_tokens": body["max_tokens"]}
            details = {"prompt_tokens_details": {"cached_tokens": cached}}
            self._write(json.dumps({"choices": [], "usage": {**usage, **details}}).encode())
        self._write(b"[DONE]")

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"data: " + data + b"\n\n")

    def _answer(self, status: int, body: str, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
