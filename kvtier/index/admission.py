"""Admission: which chunks are worth a slot in a tier at all. Who leaves it is the policy's to say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.index.policies.ghost import Ghost

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.config import AdmissionName

_PLACES = 1 << 20
"""Keys remembered that were put once: 8 bytes each."""


class Always:
    """Every chunk is."""

    is_selective = False
    """Whether a chunk that was refused should be offered again when it is put again."""

    def admits(self, key: bytes, has_room: Callable[[], bool]) -> bool:
        """Whether a chunk that is put gets a slot; `has_room` tells whether one is free. Asked once a put."""
        return True


class SecondTouch(Always):
    """What is put a second time, while its key is remembered."""

    is_selective = True

    def __init__(self) -> None:
        self._ghost = Ghost(_PLACES)

    def admits(self, key: bytes, has_room: Callable[[], bool]) -> bool:
        """See Always."""
        was_seen = self._ghost.recall(key) is not None
        self._ghost.remember(key)
        return was_seen


class GhostInformed(SecondTouch):
    """The same where somebody would have to leave for it; what is free is for everybody."""

    def admits(self, key: bytes, has_room: Callable[[], bool]) -> bool:
        """See Always."""
        return super().admits(key, has_room) or has_room()


ADMISSIONS: dict[str, type[Always]] = {
    "always": Always, "second-touch": SecondTouch, "ghost": GhostInformed,
}  # fmt: skip


def make(name: AdmissionName) -> Always:
    """An admission by its name in the settings."""
    return ADMISSIONS[name]()
