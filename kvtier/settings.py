"""Settings from outside: a TOML file, `KVTIER_*` variables and keywords, in rising precedence."""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from kvtier.config import FIELDS, StoreConfig
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from os import PathLike

_PREFIX = "KVTIER_"
_SWITCHES = ("KVTIER_NATIVE",)
_SIZES = ("capacity", "dram", "landing", "chunk_bytes", "part_bytes", "io_window")


def load(source: str | PathLike[str] | None, overrides: dict[str, Any]) -> StoreConfig:
    """Build a StoreConfig. `source` is a `.toml` file, the disk tier's directory, or None.

    Raises InvalidRequest for an unknown setting (with the nearest name), a value that does not
    parse, or a file that cannot be read.
    """
    from_file: dict[str, Any] = {}
    if source is not None and not isinstance(source, str | os.PathLike):
        raise InvalidRequest(f"path is {type(source).__name__}, needs a directory or a .toml file")
    if source is not None and Path(source).suffix == ".toml":
        from_file = _read_toml(Path(source))
    elif source is not None:
        overrides = {"path": Path(source), **overrides}
    for name in (*from_file, *overrides):
        if name not in FIELDS:
            raise InvalidRequest(_unknown(name, FIELDS))
    return _validate({**from_file, **_from_environment(), **overrides})


def _from_environment() -> dict[str, Any]:
    variables = {_PREFIX + name.upper(): name for name in FIELDS}
    values: dict[str, Any] = {}
    for variable, value in os.environ.items():
        if variable in variables:
            values[variables[variable]] = value
        elif variable.startswith(_PREFIX) and variable not in _SWITCHES:
            raise InvalidRequest(_unknown(variable, tuple(variables)))
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the settings file {path} is not valid TOML: {error}") from error


def _unknown(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
    return f"unknown setting {name!r}; {hint}"


def _validate(values: dict[str, Any]) -> StoreConfig:
    """Parse `values` by the types of StoreConfig; sizes may be words like "64GiB"."""
    from pydantic import ByteSize, ValidationError, create_model

    hints = get_type_hints(StoreConfig)
    definitions: dict[str, Any] = {
        field.name: (ByteSize if field.name in _SIZES else hints[field.name], field.default)
        for field in fields(StoreConfig)
    }
    try:
        model = create_model("Settings", **definitions)(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        needs = "needs bytes of at least 0, or a size like '64GiB'" if name in _SIZES else first["msg"]
        raise InvalidRequest(f"setting {name!r} is {first['input']!r}: {needs}") from error
    return StoreConfig(**{name: getattr(model, name) for name in FIELDS})
