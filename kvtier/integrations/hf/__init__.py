"""Prefix caching for Hugging Face transformers: decoders with a plain `DynamicCache`, on CPU or CUDA.

Needs `torch` and `transformers` (`pip install 'kvtier[demo]'`).
"""

from kvtier.integrations.hf.prefix_cache import PrefixCache, kv_layout
from kvtier.integrations.hf.weights import weights_digest

__all__ = ["PrefixCache", "kv_layout", "weights_digest"]
