"""Time spans as people are told them."""

from __future__ import annotations


def age(seconds: float) -> str:
    """In the largest unit of which there are two or more; never less than 0 seconds."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
