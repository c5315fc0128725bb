"""The only importer of the native extension. Everything works without it, at more CPU per byte."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

core: ModuleType | None = None
"""`kvtier._core`, or None: then `why_not` says why."""
why_not: str = ""

if os.environ.get("KVTIER_NATIVE", "1") == "0":
    why_not = "switched off by KVTIER_NATIVE=0"
else:
    try:
        core = importlib.import_module("kvtier._core")
    except ImportError as error:
        why_not = f"not built or not loadable: {error}"
