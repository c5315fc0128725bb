"""Faults that an emulated device can be told to have."""

from __future__ import annotations

import errno as errnos
from dataclasses import dataclass
from typing import Literal

from kvtier.errors import InvalidRequest

Op = Literal["read", "write", "fsync", "open", "fallocate", "ftruncate", "metadata", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Which requests fail, and how. The first fault that fires on a request decides.

    Which: requests of kind `op` on files whose path in the device, or last name, fits the glob `file`, and
    which overlap [`offset`, `offset` + `length`); from the `nth` of these on, each with `probability`
    (drawn from `seed`), `count` times at most. `direct` leaves only opens with O_DIRECT, `sector` only
    reads and writes whose offset or length is no multiple of so many bytes.

    How: `errno` answers with an error. `short` moves that many bytes and says so. `torn` stores that many
    bytes of a write, and claims success unless `errno` is given too. `flip_bit` flips that bit, counted
    from where the request and the range begin to overlap, in what a read returns or a write stores.
    `hang` waits for `release_hangs` (True) or that many seconds, `delay` waits so many seconds; both then
    go on as usual, or with `errno`. `capacity` refuses, with ENOSPC unless `errno` is given, what would
    make the device hold more than so many bytes.

    A request is at most 1 MiB: the kernel splits larger ones, and each part meets the faults by itself.
    """

    op: Op = "any"
    file: str = "*"
    offset: int = 0
    length: int | None = None
    nth: int = 1
    probability: float = 1.0
    seed: int = 0
    count: int | None = None
    direct: bool = False
    sector: int | None = None
    errno: int | None = None
    short: int | None = None
    torn: int | None = None
    flip_bit: int | None = None
    hang: bool | float = False
    delay: float = 0.0
    capacity: int | None = None

    def __post_init__(self) -> None:
        optional = (self.errno, self.short, self.torn, self.flip_bit, self.capacity)
        if optional == (None,) * 5 and self.hang is False and self.delay <= 0:
            raise InvalidRequest("a fault needs errno, short, torn, flip_bit, hang, delay or capacity")
        if self.short is not None and self.torn is not None:
            raise InvalidRequest("a write is either short or torn")
        if "\n" in self.file or len(self.file.encode()) > 255:
            raise InvalidRequest("file is a glob of at most 255 bytes, without line breaks")
        if not 0 <= self.probability <= 1:
            raise InvalidRequest(f"probability is {self.probability}, but must be from 0 to 1")
        if self.direct and self.op != "open":
            raise InvalidRequest(f'direct is for opens, but op is "{self.op}"')
        if self.sector is not None and (self.sector < 1 or self.op not in ("read", "write")):
            raise InvalidRequest(f'sector is {self.sector} for op "{self.op}", but needs reads or writes')

    @classmethod
    def gone(cls, errno: int = errnos.ENODEV) -> Fault:
        """The device is gone: everything fails."""
        return cls(errno=errno)

    def command(self, number: int) -> str:
        """The fault as a command to the device, as rule `number`."""
        wait = self.delay if self.hang in (True, False) else float(self.hang)
        error = self.errno if self.errno or self.capacity is None else errnos.ENOSPC
        fields = {
            "id": number,
            "op": self.op,
            "file": self.file,
            "offset": self.offset,
            "length": self.length,
            "nth": self.nth,
            "probability": self.probability,
            "seed": self.seed,
            "count": self.count,
            "direct": int(self.direct),
            "sector": self.sector,
            "errno": error,
            "keep": self.short if self.torn is None else self.torn,
            "torn": int(self.torn is not None),
            "flip_bit": self.flip_bit,
            "hang": int(self.hang is not False),
            "delay_ns": round(wait * 1e9),
            "capacity": self.capacity,
        }
        lines = [f"{name}={value}" for name, value in fields.items() if value is not None]
        return "\n".join(["inject", *lines])
