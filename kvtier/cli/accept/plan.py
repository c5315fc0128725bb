"""What a run is to do and what it is judged by, and what of that cannot be."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from kvtier.cli.bench.data import Amount
from kvtier.cli.bench.mixed import room
from kvtier.cli.bench.recovery.course import plan_waves
from kvtier.cli.sizes import size
from kvtier.config import GIB, MIB
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.cli.bench.recovery.client import Api
    from kvtier.cli.bench.recovery.sessions import Kind

_SOAK_LEAST = 32 * MIB
_SPARE = 128 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the gates are judged by. None: the value is told, and not judged."""

    must_reserve: bool = True
    alignment: int = 4096  # bytes
    stated_read_gb_s: float | None = None
    stated_write_gb_s: float | None = None
    tolerance: float = 0.1
    """Part by which a rate may stay below what was stated."""
    read_gb_s: float | None = None
    write_gb_s: float | None = None
    read_p99_ms: float | None = None
    """Of paced reads beside saturating writes."""
    p99_ratio: float | None = None
    """By how much writes may raise the p99 of reads."""
    prefill_tokens_s: float | None = None
    baseline_tolerance: float = 0.2
    """Part by which figures of one machine may be worse than the baseline's, where no limit is given."""
    ttft_lower: float = 25.0  # percent
    throughput_higher: float = 29.0  # percent
    cached: float = 90.0
    """Percent of the recovered prompts' tokens that must come from the cache."""
    ttft_s: float | None = None
    """Most TTFT of a session for goodput, and of p99."""
    tpot_ms: float | None = None
    bandwidth_drop: float = 20.0
    """Percent that a re-measured bandwidth may be below the median of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured, on what. The defaults are the long form."""

    capacity: int = 64 * GIB
    """Bytes that the directory is asked to hold."""
    health_bytes: int = 8 * GIB
    gib: float = 4.0
    chunk_mib: float = 2.0
    rounds: int = 5
    mixed_seconds: float = 5.0
    model: str | None = None
    url: str | None = None
    api: Api = "completions"
    prompt: Kind = "ids"
    vocabulary: int = 16000
    dtype: str = "float32"
    """Precision of the model in process; a server's is its own."""
    tokens: int = 4096
    output_tokens: int = 16
    concurrency: tuple[int, ...] = (4, 8, 16)
    trials: int = 3
    settle: float = 5.0
    restart_command: str | None = None
    clear_post: str | None = None
    pause: bool = False
    baseline: str = "recompute"
    """A digest of the baseline's report, or `recompute`."""
    hours: float = 72.0
    remeasure_minutes: float = 60.0
    soak_scale: int = 8
    """What the sizes of the soak's chunks are multiplied by; 8: up to 2 MiB."""
    seed: int = 0
    limits: Limits = Limits()

    @classmethod
    def short(cls) -> Self:
        """A few minutes: for trying out, and for an emulated device."""
        return cls(
            capacity=GIB, health_bytes=256 * MIB, gib=0.125, rounds=3, mixed_seconds=2.0, tokens=1024,
            concurrency=(2, 4), hours=0.03, remeasure_minutes=0.5, settle=1.0, soak_scale=2,
        )  # fmt: skip

    def with_(self, given: Mapping[str, Any], limits: Mapping[str, Any]) -> Self:
        """With what is not None of `given` in place. Raises InvalidRequest for what cannot be done."""
        plan = replace(
            self,
            **{name: value for name, value in given.items() if value is not None},
            limits=replace(
                self.limits, **{name: value for name, value in limits.items() if value is not None}
            ),
        )
        plan.check()
        return plan

    def check(self) -> None:
        """Raise InvalidRequest for what would fail after hours."""
        plan_waves(self.concurrency)
        amount = self.amount
        least = {
            "--trials": (self.trials, 3), "--rounds": (self.rounds, 1), "--tokens": (self.tokens, 1),
            "--output-tokens": (self.output_tokens, 2), "--health": (self.health_bytes, MIB),
            "--vocabulary": (self.vocabulary, 2),
        }  # fmt: skip
        for option, (value, smallest) in least.items():
            if value < smallest:
                raise InvalidRequest(f"{option} is {value}, needs at least {smallest}")
        for option, seconds in {
            "--hours": self.hours, "--remeasure-minutes": self.remeasure_minutes,
            "--mixed-seconds": self.mixed_seconds,
        }.items():  # fmt: skip
            if not seconds > 0:
                raise InvalidRequest(f"{option} is {seconds}, needs to be above 0")
        needed = max(self.health_bytes, room(amount, 1), self._beside_soak + self.soak_scale * _SOAK_LEAST)
        if needed > self.capacity:
            raise InvalidRequest(
                f"--capacity is {size(self.capacity)}, but what is measured takes {size(needed)}: "
                "raise it, or lower --gib and --health"
            )
        for name in ("tolerance", "baseline_tolerance"):
            if not 0 <= getattr(self.limits, name) < 1:
                raise InvalidRequest(
                    f"--{name.replace('_', '-')} is {getattr(self.limits, name)}, needs 0 or more, below 1"
                )

    @property
    def amount(self) -> Amount:
        """What one pass of reads or writes moves."""
        return Amount.of(self.gib, self.chunk_mib)

    @property
    def _beside_soak(self) -> int:
        return self.amount.on_disk(1) + _SPARE

    @property
    def soak_capacity(self) -> int:
        """Bytes of the soak's store: all but what re-measuring takes meanwhile."""
        return self.capacity - self._beside_soak

    @property
    def method(self) -> dict[str, Any]:
        """What must be equal for two runs to be compared at the main gate."""
        names = ("model", "api", "prompt", "dtype", "tokens", "output_tokens", "vocabulary")
        return {name: getattr(self, name) for name in names} | {"served": self.url is not None}

    def config(self) -> dict[str, Any]:
        """Everything, as plain data: what a stopped run must have the same to go on."""
        data = asdict(self)
        return {**data.pop("limits"), **data}
