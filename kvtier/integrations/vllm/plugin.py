"""What vLLM calls in each of its processes, by the entry point `kvtier` of `vllm.general_plugins`."""

from __future__ import annotations

import contextlib
import logging

_log = logging.getLogger(__name__)
_PACKAGE = "kvtier.integrations.vllm"


def register() -> None:
    """Make the connector `KvtierConnector` and the tier type `kvtier` known to vLLM.

    Opens nothing; may be called again.
    """
    with contextlib.suppress(ImportError, ValueError):  # ValueError: it is registered already
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector("KvtierConnector", _PACKAGE, "KvtierConnector")
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:
        _log.debug("this vLLM has no secondary tiers, so there is no tier 'kvtier'")
        return
    with contextlib.suppress(ValueError):
        SecondaryTierFactory.register_tier("kvtier", _PACKAGE, "KvtierTier")
