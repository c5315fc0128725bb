"""A transformers model in this process, with a store. Loads run side by side, the model one step at a time.

Prompts whose KV has come are computed at once, and the sessions that generate take turns between them, as in
an engine with continuous batching, but for the batches.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvtier import Store, StoreConfig
from kvtier.cli._demo.model import load_model
from kvtier.cli._demo.steps import warm_up
from kvtier.cli.bench.recovery.client import Answer
from kvtier.cli.bench.recovery.counters import DeviceReads, drop_files
from kvtier.cli.bench.recovery.wave import Wave
from kvtier.config import MIB
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.integrations.hf import PrefixCache, kv_layout, weights_digest
from kvtier.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from transformers import DynamicCache

    from kvtier.cli.bench.recovery.client import Prompt

_CHUNK_TOKENS = 256
_GET_TIMEOUT = 300.0  # a slow device may take its time for all sessions of a wave


class LocalModel:
    """The model in `folder`, in `dtype`, and its store in `directory`, with room for `sessions` sessions.

    Raises DemoError if the model does not load, InvalidRequest for prompts longer than it reads,
    TierUnavailable where the store does not fit.
    """

    def __init__(
        self, folder: Path, dtype: str, directory: Path, *, tokens: int, output_tokens: int, sessions: int
    ) -> None:
        self._name, self._dtype, self._directory = folder.name, dtype, directory
        self._output_tokens = output_tokens
        self._chunk_tokens = min(_CHUNK_TOKENS, tokens)
        self._model = load_model(folder, dtype)
        longest = getattr(self._model.config, "max_position_embeddings", tokens + output_tokens)
        if tokens + output_tokens > longest:
            raise InvalidRequest(
                f"--tokens is {tokens}, but the model reads at most {longest - output_tokens}"
            )
        self.vocabulary: int = self._model.config.vocab_size
        weights_digest(self._model)
        warm_up(self._model)
        chunk = kv_layout(self._model, chunk_tokens=self._chunk_tokens).chunk_bytes
        chunks = tokens // self._chunk_tokens
        window = max(64 * MIB, 2 * chunk)
        self._config = StoreConfig(
            paths=(directory,), capacity=sessions * chunks * chunk * 5 // 4 + 16 * chunk + 64 * MIB,
            dram=(chunks + 2) * chunk, chunk_bytes=chunk, landing=window, io_window=window,
            get_timeout=_GET_TIMEOUT, put_timeout=_GET_TIMEOUT, on_incompatible="discard",
        )  # fmt: skip
        self._chunk_bytes = chunk
        self._open()
        self.reads = DeviceReads([directory])

    def _open(self) -> None:
        self._store = Store(self._config)
        self._prefix_cache = PrefixCache(self._model, self._store, chunk_tokens=self._chunk_tokens)

    def describe(self) -> dict[str, Any]:
        """Model, precision, sizes and threads."""
        return {
            "model": self._name,
            "class": type(self._model).__name__,
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "weights_sha256": weights_digest(self._model).hex(),
            "precision": self._dtype,
            "chunk_tokens": self._chunk_tokens,
            "kv_bytes_per_token": self._chunk_bytes // self._chunk_tokens,
            "threads": torch.get_num_threads(),
            "served": "in process, one sequence at a time",
        }

    def ask(self, prompts: Mapping[int, Prompt], *, on_answer: Callable[[], object]) -> Wave:
        """All at once; what was computed is on disk when it returns. Raises TierUnavailable if it is not."""
        loaded: queue.SimpleQueue[_Session | tuple[int, str]] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=self._load, args=(*item, loaded), daemon=True) for item in prompts.items()
        ]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        answers: dict[int, Answer] = {}
        failures: dict[int, str] = {}
        done: list[_Session] = []
        coming, active = len(threads), deque[_Session]()
        while coming or active:
            try:
                # With nothing to generate there is time to wait.
                arrived = loaded.get(block=not active) if coming else None
            except queue.Empty:
                arrived = None
            if isinstance(arrived, _Session):
                coming -= 1
                self._prefill(arrived)
                active.append(arrived)
            elif arrived is not None:
                coming -= 1
                failures[arrived[0]] = arrived[1]
            else:
                session = active.popleft()
                if len(session.tokens) < self._output_tokens:
                    self._generate(session)
                    active.append(session)
                else:
                    answers[session.number] = session.answer()
                    done.append(session)
                    on_answer()
        wall = time.perf_counter() - begin
        self._save(done)
        return Wave(answers, failures, wall, None)

    def _load(self, number: int, prompt: Prompt, loaded: queue.SimpleQueue[Any]) -> None:
        ids, begin = torch.tensor([prompt]), time.perf_counter()
        try:
            cache, restored = self._prefix_cache.restore(ids)
        except Exception as error:
            loaded.put((number, f"{type(error).__name__}: {error}"))
        else:
            loaded.put(_Session(number, ids, cache, restored, begin))

    def _prefill(self, session: _Session) -> None:
        session.took(self._prefix_cache.prefill(session.ids, session.cache))
        session.first = session.last

    def _generate(self, session: _Session) -> None:
        ids = torch.tensor([session.tokens[-1:]])
        with torch.no_grad():
            session.took(self._model(input_ids=ids, cache=session.cache, use_cache=True).logits)

    def _save(self, sessions: list[_Session]) -> None:
        """What was computed, after the last token, so that no session waits for another's save."""
        for session in sessions:
            if session.restored + 1 < session.ids.shape[1]:
                saved = self._prefix_cache.save(session.ids, session.cache, until="disk").result()
                if not saved.ok:
                    reasons = {Reason(int(reason)).name.lower() for reason in saved.reason if reason}
                    raise TierUnavailable(f"a session could not be stored: {', '.join(sorted(reasons))}")

    def forget(self) -> str:
        """Close the store, drop its files from the page cache, and open it again with nothing in DRAM."""
        synced = self._store.flush().result().synced
        self._store.close()
        if not synced:
            raise TierUnavailable("the device did not confirm what was written")
        dropped = drop_files([self._directory])
        self._open()
        return f"store closed and opened again; {dropped}"

    def close(self) -> None:
        """Close the store."""
        self._store.close()


@dataclass(slots=True)
class _Session:
    number: int
    ids: torch.Tensor
    cache: DynamicCache
    restored: int
    begin: float
    first: float = 0.0
    last: float = 0.0
    tokens: list[int] = field(default_factory=list)

    def took(self, logits: torch.Tensor) -> None:
        """A step has given logits: the next token is there."""
        self.tokens.append(int(logits[0, -1].argmax()))
        self.last = time.perf_counter()

    def answer(self) -> Answer:
        return Answer(
            ttft_s=self.first - self.begin,
            last_s=self.last - self.begin,
            text="",
            token_ids=tuple(self.tokens),
            output_tokens=len(self.tokens),
            prompt_tokens=self.ids.shape[1],
            cached_tokens=self.restored,
        )
