"""Distinct prompts, the same for the same seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from kvtier.cli.bench.recovery.client import Prompt

Kind: TypeAlias = Literal["ids", "text"]
_SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u"))


def make_prompts(count: int, tokens: int, kind: Kind, *, vocabulary: int, seed: int) -> list[Prompt]:
    """`count` prompts that differ from the first token on.

    Kind "ids": `tokens` token ids each, from a quarter of `vocabulary` up, as the special ones lie low.
    Kind "text": as many words of two syllables; how many tokens that is, the server says.
    """
    return [_prompt(random.Random(f"{seed} {i}"), i, tokens, kind, vocabulary) for i in range(count)]


def _prompt(draw: random.Random, number: int, tokens: int, kind: Kind, vocabulary: int) -> Prompt:
    if kind == "text":
        words = (draw.choice(_SYLLABLES) + draw.choice(_SYLLABLES) for _ in range(tokens - 1))
        return " ".join([str(number), *words])
    low = vocabulary // 4
    ids = [low + number % (vocabulary - low)]
    return ids + [draw.randrange(low, vocabulary) for _ in range(tokens - 1)]
