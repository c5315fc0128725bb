"""A model small enough to run vLLM on in tests: random weights, and no tokenizer needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 32
"""Tokens per block of the engines that the tests start."""


def save_tiny_llama(path: Path, *, seed: int = 0) -> Path:
    """Write a Llama of 4 layers to `path`; a block of 32 tokens of its KV takes 64 KiB in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.2,  # so that greedy tokens vary
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def save_tiny_gemma(path: Path) -> Path:
    """Write a Gemma 3 of four layers to `path`, two of them with a sliding window of 128 tokens."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(path)
    return path


def prompt(number: int, tokens: int) -> list[int]:
    """Token ids that are the same for the same arguments, and begin differently for each number."""
    return [4 + (i * 7919 + number * 131) % 1000 for i in range(tokens)]
