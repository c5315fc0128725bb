"""Sizes and rates as people write them."""

from __future__ import annotations

import re

from kvtier.errors import InvalidRequest

_SIZES = {"": 1, **{f"{p}iB": 1 << 10 * i for i, p in enumerate("KMGTP", 1)}}
_SIZES |= {f"{p}B": 1000**i for i, p in enumerate("kMGTP", 1)}


def parse_size(text: str, option: str) -> int:
    """Bytes of "64GiB" or "1.6TB". Raises InvalidRequest, naming the option."""
    return round(_parse(text, option, "", "a size such as 64GiB or 1.6TB"))


def parse_rate(text: str, option: str) -> float:
    """GB/s (10**9 bytes a second) of "3GB/s" or "900MB/s". Raises InvalidRequest, naming the option."""
    return _parse(text, option, "/s", "a rate such as 3GB/s or 900MB/s") / 1e9


def _parse(text: str, option: str, suffix: str, needs: str) -> float:
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?([kKMGTP]?i?B?){suffix}", text.strip())
    unit = _SIZES.get(found[2]) if found else None
    if found is None or unit is None or not float(found[1]):
        raise InvalidRequest(f"{option} is {text!r}, needs {needs}")
    return float(found[1]) * unit
