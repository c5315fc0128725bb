"""Tiered KV-cache storage for LLM inference: open a store, put chunks, get them back."""

from kvtier.config import StoreConfig
from kvtier.errors import (
    IncompatibleStore,
    InvalidRequest,
    KVTierError,
    StoreClosed,
    StoreInUse,
    TierUnavailable,
    UnsupportedModel,
)
from kvtier.hashing import chunk_keys, derived_keys
from kvtier.layout import KVLayout, Namespace
from kvtier.owner import Owner
from kvtier.store.follow import Follower, KeyChanges
from kvtier.store.lease import Lease, Reservation
from kvtier.store.store import Store
from kvtier.store.store import open_store as open
from kvtier.store.transfer import Transfer
from kvtier.types import BatchResult, ChunkKey, FlushResult, OwnerUsage, Reason, Status, TierName

__version__ = "0.1.0"

__all__ = [
    "BatchResult", "ChunkKey", "FlushResult", "Follower", "IncompatibleStore", "InvalidRequest",
    "KVLayout", "KVTierError", "KeyChanges", "Lease", "Namespace", "Owner", "OwnerUsage", "Reason",
    "Reservation", "Status", "Store", "StoreClosed", "StoreConfig", "StoreInUse", "TierName",
    "TierUnavailable", "Transfer", "UnsupportedModel", "chunk_keys", "derived_keys", "open",
]  # fmt: skip
