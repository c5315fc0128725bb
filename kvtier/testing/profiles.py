"""The figures of the emulated devices."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """What one request meets on each of `devices` equal devices.

    A request waits for one of `max_in_flight` places, then for its turn on the wire (its bytes divided by
    the bandwidth, shared by all requests of its direction), then for the latency plus a random part of
    `jitter`. Metadata costs nothing. Requests are of 1 MiB at most: the kernel splits what is larger, or
    read into memory that does not start on a page; a plain `pread` sends its parts one after another.
    """

    name: str
    devices: int = 1
    read_latency: float = 0.0  # seconds per request
    write_latency: float = 0.0  # seconds per request
    jitter: float = 0.0  # seconds, at most, uniform
    read_bandwidth: int = 0  # bytes per second and device; 0 for no cap
    write_bandwidth: int = 0  # bytes per second and device; 0 for no cap
    max_in_flight: int = 1024  # requests per device, at most 1024

    def __post_init__(self) -> None:
        if self.devices < 1 or not 1 <= self.max_in_flight <= 1024:
            raise InvalidRequest(f"profile {self.name}: needs devices >= 1 and max_in_flight from 1 to 1024")
        figures = (self.read_latency, self.write_latency, self.jitter)
        if min(*figures, self.read_bandwidth, self.write_bandwidth) < 0:
            raise InvalidRequest(f"profile {self.name}: latencies and bandwidths cannot be negative")

    @property
    def fields(self) -> dict[str, int]:
        """The figures as the device's process takes them."""
        return {
            "read_latency_ns": round(self.read_latency * 1e9),
            "write_latency_ns": round(self.write_latency * 1e9),
            "jitter_ns": round(self.jitter * 1e9),
            "read_bytes_per_s": self.read_bandwidth,
            "write_bytes_per_s": self.write_bandwidth,
            "max_in_flight": self.max_in_flight,
        }


_MB = 1_000_000

PROFILES = {
    profile.name: profile
    for profile in (
        # No timing at all: for tests of faults.
        DeviceProfile(name="instant"),
        # The first experiments' device: 4 ms a read, and what its file system could carry at best.
        DeviceProfile(name="prototype-4ms", read_latency=4e-3, read_bandwidth=2100 * _MB),
        # One fast disk, capped at what a file system in user space carries on two cores.
        DeviceProfile(
            name="local-nvme",
            read_latency=100e-6,
            write_latency=30e-6,
            jitter=20e-6,
            read_bandwidth=2000 * _MB,
            write_bandwidth=1000 * _MB,
            max_in_flight=128,
        ),
        DeviceProfile(
            name="sata-ssd",
            read_latency=200e-6,
            write_latency=100e-6,
            jitter=100e-6,
            read_bandwidth=530 * _MB,
            write_bandwidth=450 * _MB,
            max_in_flight=32,
        ),
        # Four namespaces behind a fabric. A serial reader gets 1/5 to 1/6 of what the four carry, much as
        # on the array where 0.98 GB/s became 5.23; slowed to 0.3 of that for small machines.
        DeviceProfile(
            name="nvmeof-4",
            devices=4,
            read_latency=300e-6,
            write_latency=300e-6,
            jitter=100e-6,
            read_bandwidth=400 * _MB,
            write_bandwidth=400 * _MB,
            max_in_flight=32,
        ),
        # A share at the far end of a gigabit link.
        DeviceProfile(
            name="slow-network",
            read_latency=5e-3,
            write_latency=5e-3,
            jitter=2e-3,
            read_bandwidth=110 * _MB,
            write_bandwidth=110 * _MB,
            max_in_flight=64,
        ),
    )
}


def profile(name: str) -> DeviceProfile:
    """The profile of that name. Raises InvalidRequest for an unknown one."""
    try:
        return PROFILES[name]
    except KeyError:
        raise InvalidRequest(f"no profile {name!r}; there are {', '.join(sorted(PROFILES))}") from None
