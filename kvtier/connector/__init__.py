"""The engine's side of kvtier: tokens and block tables in, KV out. For any engine with KV in tensors."""

from kvtier.connector.connector import Connector
from kvtier.connector.economy import Economy
from kvtier.connector.load import LoadResult, LoadTransfer
from kvtier.connector.request import Request
from kvtier.connector.shared import SharedStore, shared_store

__all__ = ["Connector", "Economy", "LoadResult", "LoadTransfer", "Request", "SharedStore", "shared_store"]
