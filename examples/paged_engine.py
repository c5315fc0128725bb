"""A small paged-attention engine whose prompts survive a restart. Run it twice:

    python examples/paged_engine.py /var/tmp/kv

The first run computes the prompt and stores its KV, the second one loads it: the same tokens, sooner. The
decoder has random weights; what is to be learned here is `Engine.generate`, where kvtier comes in.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

import kvtier
from kvtier.connector import Connector, Economy

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8, 8, 2, 64, 4096
WIDTH = HEADS * HEAD_DIM
BLOCK_TOKENS = 16  # the engine's page
CHUNK_TOKENS = 128  # what is stored as one: eight blocks
STEP_TOKENS = 256  # a prompt is computed in pieces of this size


class Decoder:
    """A Llama-like decoder; the KV of layer l is in `kv[l]`, keys and values by block."""

    def __init__(self, blocks: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) * 1.5 / rows**0.5

        width_kv = KV_HEADS * HEAD_DIM
        self.embedding, self.head = weight(VOCAB, WIDTH) * VOCAB**0.5, weight(WIDTH, VOCAB)
        self.layers = [
            {
                "q": weight(WIDTH, WIDTH), "k": weight(WIDTH, width_kv), "v": weight(WIDTH, width_kv),
                "o": weight(WIDTH, WIDTH), "up": weight(WIDTH, 4 * WIDTH), "down": weight(4 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS)
        ]  # fmt: skip
        shape = (blocks, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
        self.kv = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(LAYERS)]

    def digest(self) -> bytes:
        """32 bytes that say which weights these are: other weights must never meet this KV."""
        digest = hashlib.sha256()
        for layer in ({"embedding": self.embedding}, *self.layers):
            for tensor in layer.values():
                digest.update(tensor.numpy().tobytes())
        return digest.digest()

    @torch.inference_mode()
    def forward(self, tokens: list[int], start: int, table: torch.Tensor) -> int:
        """Compute `tokens`, which stand at position `start` on, into their blocks; the token that follows."""
        positions = torch.arange(start, start + len(tokens))
        end = start + len(tokens)
        mask = positions[:, None] >= torch.arange(end)
        used = table[: -(-end // BLOCK_TOKENS)]
        x = self.embedding[torch.tensor(tokens)]
        for layer, (keys, values) in zip(self.layers, self.kv, strict=True):
            h = rms_norm(x, (WIDTH,))
            q = rotate((h @ layer["q"]).view(-1, HEADS, HEAD_DIM), positions)
            place = (table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS)
            keys[place] = rotate((h @ layer["k"]).view(-1, KV_HEADS, HEAD_DIM), positions)
            values[place] = (h @ layer["v"]).view(-1, KV_HEADS, HEAD_DIM)
            k, v = (
                plane[used].flatten(0, 1)[:end].repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1)[None]
                for plane in (keys, values)
            )
            seen = scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, mask)
            x = x + seen[0].transpose(0, 1).reshape(-1, WIDTH) @ layer["o"]
            x = x + silu(rms_norm(x, (WIDTH,)) @ layer["up"]) @ layer["down"]
        return int((rms_norm(x[-1], (WIDTH,)) @ self.head).argmax())


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (tokens, heads, dim)."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (positions[:, None] * frequencies)[:, None, :]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


@dataclass
class Generated:
    """New tokens, and what it took to get to the first one: tokens loaded, seconds of that and in all."""

    tokens: list[int]
    loaded: int
    load_seconds: float
    first_seconds: float


class Engine:
    """Runs one request at a time; a real one has a scheduler around the same calls."""

    def __init__(self, store: kvtier.Store, blocks: int) -> None:
        self.decoder = Decoder(blocks)
        self.free = list(range(blocks))
        self.connector = Connector(
            store,
            self.decoder.kv,
            axes="block token head dim",  # of each tensor in kv
            model="paged-engine-example",
            weights=self.decoder.digest(),
            chunk_tokens=CHUNK_TOKENS,
            economy=Economy(),  # match is then 0 where computing the prompt is faster
        )

    def generate(self, prompt: list[int], count: int, *, use_store: bool = True) -> Generated:
        """Greedy decoding of `count` tokens."""
        began = time.perf_counter()
        table = [self.free.pop() for _ in range(-(-(len(prompt) + count) // BLOCK_TOKENS))]
        ids = torch.tensor(table)
        with self.connector.request(prompt) as request:
            # One token is left to compute, for its logits. What is matched stays until it is loaded.
            found = self.connector.match(request, limit=len(prompt) - 1) if use_store else 0
            load = self.connector.load(request, table, 0, found)
            # An engine would go on with other requests here, and recompute load.result().invalid_blocks.
            start = loaded = load.result().tokens
            load_seconds = time.perf_counter() - began
            while start < len(prompt):
                end = min(len(prompt), (start // STEP_TOKENS + 1) * STEP_TOKENS)
                token = self.decoder.forward(prompt[start:end], start, ids)
                start = end
            first_seconds = time.perf_counter() - began
            self.connector.economy.observe_prefill(len(prompt) - loaded, first_seconds - load_seconds)
            tokens = [token]
            for position in range(len(prompt), len(prompt) + count - 1):
                tokens.append(self.decoder.forward(tokens[-1:], position, ids))
            if use_store:
                request.extend(tokens[:-1])  # the KV of the last one has not been computed
                self.connector.save(request, table, loaded)
        self.connector.fence(table)  # the copies out of these blocks are done: they may be used again
        self.free += table
        return Generated(tokens, loaded, load_seconds, first_seconds)


def main() -> None:
    """One prompt, answered with the store and, if that had any of it, without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", help="where the KV is kept")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompt")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate")
    options = parser.parse_args()
    prompt = torch.randint(VOCAB, (options.tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    blocks = -(-(options.tokens + options.new) // BLOCK_TOKENS)
    chunk_bytes = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4 * CHUNK_TOKENS
    settings = {"capacity": "512MiB", "dram": "128MiB", "chunk_bytes": chunk_bytes}
    with kvtier.open(options.directory, **settings) as store:
        engine = Engine(store, blocks)
        answer = engine.generate(prompt, options.new)
        print("tokens:", *answer.tokens)
        loaded = f"{answer.loaded} of {len(prompt)} tokens loaded"
        print(f"first token after {answer.first_seconds:.3f} s: {loaded}")
        if answer.loaded:
            again = engine.generate(prompt, options.new, use_store=False)
            print(f"restored in {answer.load_seconds:.3f} s, prefill takes {again.first_seconds:.3f} s")
            print("tokens identical:", answer.tokens == again.tokens)
        engine.connector.close()
        store.flush().result()


if __name__ == "__main__":
    main()
