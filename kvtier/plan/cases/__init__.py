"""Published cases, as input files with the figures that were printed."""

from __future__ import annotations

import difflib
import tomllib
from importlib import resources
from typing import Any

from kvtier.errors import InvalidRequest


def names() -> list[str]:
    """The cases that there are."""
    files = (file.name for file in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def read(name: str) -> dict[str, Any]:
    """A case's tables. Raises InvalidRequest for one that is not there."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names())}"
        raise InvalidRequest(f"unknown case {name!r}; {hint}")
    return tomllib.loads((resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8"))
