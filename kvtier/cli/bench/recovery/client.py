"""An OpenAI-compatible endpoint: one streamed request, with the instants at which its tokens came."""

from __future__ import annotations

import http.client
import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from kvtier.errors import InvalidRequest, KVTierError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Api: TypeAlias = Literal["completions", "chat"]
Prompt: TypeAlias = "list[int] | str"
"""Token ids, or text; the chat API takes text alone."""

EXTENSIONS = {"ignore_eos": True, "return_token_ids": True}
"""Fields beyond the standard: all outputs as long as asked for, and told as token ids."""
_POLL_S = 0.5
_HITS = ("prefix_cache_hits", "external_prefix_cache_hits", "cached_tokens")


class EndpointError(KVTierError):
    """The server cannot be measured, or failed while it was; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. Times in seconds."""

    ttft_s: float
    """From the request to its first token."""
    last_s: float
    """From the request to its last token."""
    text: str
    token_ids: tuple[int, ...] | None
    """None from a server that does not tell them."""
    output_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    """Tokens of the prompt that were not computed; None from a server that does not tell."""

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None of a single one."""
        return (self.last_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Endpoint:
    """A served model. `url` is the server's, with or without `/v1`; OPENAI_API_KEY is sent if it is set.

    `timeout` is how long, in seconds, a server may say nothing. Raises InvalidRequest for a wrong URL.
    """

    def __init__(self, url: str, model: str, *, api: Api = "completions", timeout: float = 1800.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"--url is {url!r}, needs to be such as http://localhost:8000")
        self.url, self.model, self.api, self.timeout = url, model, api, timeout
        self.extensions: dict[str, Any] = dict(EXTENSIONS)
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = {
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {key}"} if key else {}),
        }

    def connect(self) -> http.client.HTTPConnection:
        """A connection that is open. Raises EndpointError."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout)
        try:
            connection.connect()
        except OSError as error:
            raise EndpointError(
                f"no server answers at {self.url}: {error}; start it, or mend --url"
            ) from None
        return connection

    def call(self, method: str, path: str) -> tuple[int, str]:
        """Status and body of a plain request below the server's root. Raises EndpointError."""
        connection = self.connect()
        try:
            connection.request(method, self._root + path, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise EndpointError(f"{method} {self.url}{path} failed: {_said(error)}") from None
        finally:
            connection.close()

    def check_model(self) -> None:
        """Raise EndpointError unless the server answers and says that it serves the model."""
        status, body = self.call("GET", "/v1/models")
        try:
            names = [entry["id"] for entry in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            raise EndpointError(
                f"{self.url}/v1/models answered {status} and no list of models, but {body[:120]!r}: is --url "
                "an OpenAI-compatible server?"
            ) from None
        if self.model not in names:
            raise EndpointError(
                f"{self.url} does not serve {self.model!r}; it serves {', '.join(map(repr, names)) or 'none'}"
            )

    def wait(self, seconds: float) -> None:
        """Wait until the model is served. Raises EndpointError after `seconds`."""
        end = time.monotonic() + seconds
        while True:
            try:
                return self.check_model()
            except EndpointError as error:
                if time.monotonic() >= end:
                    raise EndpointError(f"not ready again after {seconds:g} s: {error}") from None
            time.sleep(_POLL_S)

    def probe(self, prompt: Prompt) -> Answer:
        """Ask for two tokens, to warm up and to learn which extensions the server takes.

        Raises EndpointError.
        """
        connection = self.connect()
        try:
            return self.ask(connection, prompt, 2)
        except _Refused:
            if not self.extensions:
                raise
            self.extensions = {}
            return self.probe(prompt)
        finally:
            connection.close()

    def ask(self, connection: http.client.HTTPConnection, prompt: Prompt, tokens: int) -> Answer:
        """The answer to a prompt, greedily, of at most `tokens` tokens. Raises EndpointError."""
        where, what = (
            ("/v1/completions", {"prompt": prompt})
            if self.api == "completions"
            else ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]})
        )
        options = {"max_tokens": tokens, "temperature": 0, "stream": True, **self.extensions}
        body = {"model": self.model, **what, **options, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        start = time.perf_counter()
        try:
            connection.request("POST", self._root + where, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                said = response.read().decode(errors="replace")[:300]
                kind = _Refused if response.status in (400, 404, 422) else EndpointError
                raise kind(f"{self.url}{where} answered {response.status}: {said}")
            if not (response.getheader("Content-Type") or "").startswith("text/event-stream"):
                raise EndpointError(
                    f"{self.url}{where} does not stream: without it there is no TTFT to measure"
                )
            return _read(_events(response), start)
        except (OSError, http.client.HTTPException) as error:
            raise EndpointError(f"{self.url}{where} broke off: {_said(error)}") from None

    def hits(self) -> float | None:
        """Tokens found in any cache so far, by the server's own metrics; None if it has none."""
        try:
            status, body = self.call("GET", "/metrics")
        except EndpointError:
            return None
        return hit_tokens(body.splitlines()) if status == 200 else None


class _Refused(EndpointError):
    """The request was not to the server's liking."""


def hit_tokens(lines: Sequence[str]) -> float | None:
    """The sum of what the metrics of vLLM and SGLang count as cached tokens; None if they are not there."""
    found = []
    for line in lines:
        name = line.partition("{")[0].partition(" ")[0].partition(":")[2].removesuffix("_total")
        if name in _HITS:
            found.append(float(line.rpartition(" ")[2]))
    return sum(found) if found else None


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[float, dict[str, Any]]]:
    """Each event of a stream and the instant it came at, up to the one that ends it."""
    while line := response.readline():
        now = time.perf_counter()
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise EndpointError(f"the stream holds what is no event: {data[:120]!r}")
        if error := event.get("error"):
            raise EndpointError(f"the server reports an error in mid-stream: {str(error)[:300]}")
        yield now, event
    raise EndpointError("the stream ended before its end: did the server die?")


def _read(events: Iterator[tuple[float, dict[str, Any]]], start: float) -> Answer:
    first = last = 0.0
    texts: list[str] = []
    ids: list[int] = []
    usage: dict[str, Any] = {}
    for now, event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            new = choice.get("token_ids") or ()
            if text or new:
                first, last = first or now, now
                texts.append(text)
                ids.extend(new)
    if not first:
        raise EndpointError("the answer has no tokens")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        ttft_s=first - start,
        last_s=last - start,
        text="".join(texts),
        token_ids=tuple(ids) or None,
        output_tokens=usage.get("completion_tokens") or len(ids) or len(texts),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
