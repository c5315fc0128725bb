"""Host memory: callers' buffers as addresses, the arena of page-aligned slots, and copies."""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier._native import core
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

Buffer: TypeAlias = Any
"""A C-contiguous ndarray, CPU tensor of any dtype, memoryview, bytearray, or (as a source) bytes."""
Buffers: TypeAlias = "Sequence[Buffer] | npt.NDArray[Any]"
"""A buffer per key, or one array whose first axis has an entry per key."""

HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it yet
_SLOW = 5e-9  # CPU seconds per byte of huge pages: 0.1e-9 where memory is at hand, 2e-9 from a host's
_TRIAL = 64 << 20  # bytes before that is judged
_SHORT = 240  # bytes: up to here XXH3 is another algorithm, which the native core does not have
_libc = ctypes.CDLL(None)


def regions(buffers: Buffers, *, name: str, writable: bool) -> tuple[list[int], list[int]]:
    """Address and length in bytes of every buffer. The caller keeps the buffers alive.

    Raises InvalidRequest, naming `name` and the index, for anything that is not contiguous host
    memory of at least one byte, or not writable where it has to be.
    """
    if isinstance(buffers, np.ndarray) and len(buffers):
        # Rows by arithmetic: iterating over an array of one axis gives scalars, which are copies.
        first, nbytes = _region(buffers[0, ...], name, writable, 0)
        stride = buffers.strides[0]
        if abs(stride) < nbytes and len(buffers) > 1:
            raise InvalidRequest(f"{name} has rows that overlap, needs a row of its own for each key")
        return [first + i * stride for i in range(len(buffers))], [nbytes] * len(buffers)
    addresses, lengths = [], []
    for i, buffer in enumerate(buffers):
        address, nbytes = _region(buffer, name, writable, i)
        addresses.append(address)
        lengths.append(nbytes)
    return addresses, lengths


def _region(buffer: Buffer, name: str, writable: bool, index: int | None = None) -> tuple[int, int]:
    where = name if index is None else f"{name}[{index}]"
    if hasattr(buffer, "data_ptr"):
        return _tensor_region(buffer, where)
    if not isinstance(buffer, np.ndarray):
        try:
            view = memoryview(buffer)
        except TypeError:
            raise InvalidRequest(
                f"{where} is {type(buffer).__name__}, needs an ndarray, CPU tensor, memoryview or bytearray"
            ) from None
        if not view.c_contiguous:
            raise InvalidRequest(f"{where} is not contiguous, needs C-contiguous memory: copy it first")
        if view.nbytes == 0:
            raise InvalidRequest(f"{where} is empty, needs at least one byte")
        buffer = np.frombuffer(view, np.uint8)
    elif not buffer.flags.c_contiguous:
        raise InvalidRequest(f"{where} is not contiguous, needs C-contiguous memory: copy it first")
    if buffer.dtype.hasobject:
        raise InvalidRequest(f"{where} holds Python objects, needs plain bytes")
    interface = buffer.__array_interface__
    address, read_only = interface["data"]
    if writable and read_only:
        raise InvalidRequest(f"{where} is read-only, needs writable memory")
    if buffer.nbytes == 0:
        raise InvalidRequest(f"{where} is empty, needs at least one byte")
    return address, buffer.nbytes


def _tensor_region(tensor: Any, where: str) -> tuple[int, int]:
    if tensor.device.type != "cpu":
        raise InvalidRequest(f"{where} is on {tensor.device}, needs host memory: copy it to the CPU first")
    if not tensor.is_contiguous():
        raise InvalidRequest(
            f"{where} is not contiguous, needs C-contiguous memory: call .contiguous() first"
        )
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        raise InvalidRequest(f"{where} is empty, needs at least one byte")
    return tensor.data_ptr(), nbytes


def copy_many(sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
    """Copy `lengths[i]` bytes from address `sources[i]` to `targets[i]`, without the GIL."""
    if core is not None:
        core.copy_many(
            np.array(sources, np.uint64), np.array(targets, np.uint64), np.array(lengths, np.uint64)
        )
        return
    for source, target, nbytes in zip(sources, targets, lengths, strict=True):
        ctypes.memmove(target, source, nbytes)


def copy_hashed(sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """`copy_many`, and the `checksum` of every piece, taken in the same pass where the native core is."""
    if core is None or min(lengths, default=0) <= _SHORT:
        copy_many(sources, targets, lengths)
        return [checksum(target, nbytes) for target, nbytes in zip(targets, lengths, strict=True)]
    sums = np.empty(len(sources), np.uint64)
    addresses = [np.array(numbers, np.uint64) for numbers in (sources, targets, lengths)]
    core.copy_hashed(*addresses, sums)
    return sums.tolist()


def zero(address: int, nbytes: int) -> None:
    """Clear `nbytes` bytes at `address`."""
    if nbytes:  # a call of no bytes would still give up the GIL and wait for it
        ctypes.memset(address, 0, nbytes)


def checksum(address: int, nbytes: int) -> int:
    """xxh3_64 of `nbytes` bytes at `address`, seed 0. Releases the GIL."""
    if core is not None and nbytes > _SHORT:
        return int(core.xxh3_64(address, nbytes, 0))
    return xxhash.xxh3_64_intdigest((ctypes.c_uint8 * nbytes).from_address(address))


class Arena:
    """One anonymous mapping that a forked child does not inherit; `populate` backs it with memory.

    `nbytes` is rounded up to whole 2 MiB. Views handed out keep the mapping alive.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        # The mapping is one huge page longer, so that the slots can start on a huge page.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        whole = np.frombuffer(mmap.mmap(-1, self.nbytes + HUGE_PAGE, flags=flags), np.uint8)
        start: int = whole.__array_interface__["data"][0]
        skip = -start % HUGE_PAGE
        self.address: int = start + skip
        self._whole = whole[skip : skip + self.nbytes]
        self._advise(0, self.nbytes, mmap.MADV_DONTFORK)
        self.huge = True
        """Whether pages are huge ones, as far as the kernel has them."""
        self._populated = 0
        self._seconds = 0.0  # of CPU that this took

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Writable uint8 view of shape (nbytes,) at `offset`."""
        return self._whole[offset : offset + nbytes]

    def populate(self, offset: int, nbytes: int) -> None:
        """Have the kernel back a range with memory now, without the GIL; its content stays as it is.

        Takes huge pages, which save a third of the time of reads, unless they come very slowly: a
        virtual machine may have to get them from its host.
        """
        before = time.thread_time()
        if self.huge:
            self._advise(offset, nbytes, mmap.MADV_HUGEPAGE)
        self._advise(offset, nbytes, _MADV_POPULATE_WRITE)
        self._populated += nbytes
        self._seconds += time.thread_time() - before
        if self._populated >= _TRIAL and self._seconds > self._populated * _SLOW:
            self.huge = False

    def _advise(self, offset: int, nbytes: int, advice: int) -> None:
        # Not mmap.madvise, which keeps the GIL while the kernel clears memory. What an old kernel
        # refuses costs only speed (pages come small, or at the first touch) or a copy at fork.
        _libc.madvise(ctypes.c_void_p(self.address + offset), ctypes.c_size_t(nbytes), advice)
