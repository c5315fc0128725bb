"""Prefix caching for Hugging Face transformers: decoders with a plain `DynamicCache`, on CPU or CUDA.

Needs `torch` and `transformers` (`pip install 'kvtier[demo]'`).
"""

from kvtier.integrations.hf.prefix_cache import PrefixCache
from kvtier.integrations.hf.weights import weights_digest

__all__ = ["PrefixCache", "weights_digest"]
