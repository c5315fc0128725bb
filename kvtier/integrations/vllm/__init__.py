"""vLLM: `KvtierConnector`, a KV connector, and `KvtierTier`, a tier of vLLM's own KV offloading.

With the connector kvtier owns DRAM and disk. With the tier (`"type": "kvtier"`) vLLM keeps the GPU and
its DRAM pool, and kvtier the disk. Installing kvtier beside vLLM registers both. Supported versions are
in `compat.SUPPORTED`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.integrations.vllm.connector import KvtierConnector
    from kvtier.integrations.vllm.tier import KvtierTier

__all__ = ["KvtierConnector", "KvtierTier"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: every vLLM process imports this package, few use it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier.integrations.vllm.compat import check_version

    check_version()  # before anything is imported that another version may not have
    module = importlib.import_module(f"{__name__}.{name.removeprefix('Kvtier').lower()}")
    return getattr(module, name)
