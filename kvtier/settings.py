"""Settings from outside: a TOML file, `KVTIER_*` variables and keywords, in rising precedence."""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_origin, get_type_hints

from kvtier.config import FIELDS, StoreConfig
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

Source: TypeAlias = "str | PathLike[str] | Sequence[str | PathLike[str]] | None"
"""What `kvtier.open` opens: a settings file, a directory, directories, or DRAM alone."""

_PREFIX = "KVTIER_"
_SWITCHES = ("KVTIER_NATIVE",)
_SIZES = (
    "capacity", "dram", "landing", "chunk_bytes", "part_bytes", "io_window", "free_space",
    "endurance", "scrub",
)  # fmt: skip


def load(source: Source, overrides: dict[str, Any]) -> StoreConfig:
    """Build a StoreConfig. `source` is a `.toml` file, the disk tier's directory or directories, or None.

    Raises InvalidRequest for an unknown setting (with the nearest name), a value that does not
    parse, or a file that cannot be read.
    """
    from_file: dict[str, Any] = {}
    if isinstance(source, str | os.PathLike) and Path(source).suffix == ".toml":
        from_file = _read_toml(Path(source))
    elif source is not None:
        overrides = {"paths": source, **overrides}
    for name in (*from_file, *overrides):
        if name not in FIELDS:
            raise InvalidRequest(_unknown(name, FIELDS))
    values = {**from_file, **_from_environment(), **overrides}
    if "paths" in values:
        values["paths"] = _paths(values["paths"])
    return _validate(values)


def _paths(value: object) -> tuple[Path, ...]:
    """One directory or several."""
    paths = []
    for path in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
            raise InvalidRequest(
                f"paths is {_shown(value)}, needs the disk tier's directory, a list of them, or a .toml file"
            )
        paths.append(Path(path))
    return tuple(paths)


def _quotas(value: str) -> dict[str, str]:
    """Sizes by tenant of "acme=10GiB,beta=5GiB"."""
    entries = [entry.rpartition("=") for entry in value.split(",") if entry.strip()]
    return {tenant.strip(): size.strip() for tenant, _, size in entries}


_PARSERS: dict[str, Callable[[str], object]] = {
    "KVTIER_PATHS": lambda value: value.split(os.pathsep),
    "KVTIER_QUOTAS": _quotas,
}


def _from_environment() -> dict[str, Any]:
    variables = {_PREFIX + name.upper(): name for name in FIELDS}
    values: dict[str, Any] = {}
    for variable, value in os.environ.items():
        if variable in variables:
            parse = _PARSERS.get(variable, str)
            values[variables[variable]] = parse(value)
        elif variable.startswith(_PREFIX) and variable not in _SWITCHES:
            raise InvalidRequest(_unknown(variable, tuple(variables)))
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"cannot read the settings file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, and of numbers and arrays without end
        raise InvalidRequest(f"the settings file {path} is not valid TOML: {error}") from error


def _unknown(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
    return f"unknown setting {_shown(name)}; {hint}"


def _shown(value: object) -> str:
    """A value in a message: not all of one that nobody would read."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _parsed_as(hint: Any) -> Any:
    """The type that a setting is parsed as. Choices are checked by StoreConfig, which knows the nearest."""
    return str if get_origin(hint) is Literal else hint


def _validate(values: dict[str, Any]) -> StoreConfig:
    """Parse `values` by the types of StoreConfig; sizes may be words like "64GiB"."""
    from pydantic import ByteSize, ValidationError, create_model

    hints = get_type_hints(StoreConfig)
    definitions: dict[str, Any] = {
        field.name: (
            ByteSize if field.name in _SIZES else _parsed_as(hints[field.name]),
            {} if field.default is MISSING else field.default,
        )
        for field in fields(StoreConfig)
    }
    definitions["quotas"] = (dict[str, ByteSize], {})
    try:
        model = create_model("Settings", **definitions)(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        needs = "needs bytes of at least 0, or a size like '64GiB'" if name in _SIZES else first["msg"]
        if name == "quotas":
            needs = "needs a size like '64GiB' for each tenant: a table, or \"acme=10GiB,beta=5GiB\""
        raise InvalidRequest(f"setting {name!r} is {_shown(first['input'])}: {needs}") from error
    return StoreConfig(**{name: getattr(model, name) for name in FIELDS})
