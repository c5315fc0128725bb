"""The `aio` engine: aiofiles on an event loop of its own. Buffered and simple, for odd platforms and as
the reference that the other engines are held against.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import io
import logging
import os
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal

import aiofiles

from kvtier.io.base import SHORT, Batch, IOEngine
from kvtier.io.parts import Operation
from kvtier.io.threads import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)
_MOST_REFUSALS = 1000  # a device that says "again" this often is reported as it is


class AioEngine(IOEngine):
    """Each operation has an open file to itself, since aiofiles moves by the file's own position."""

    name = "aio"

    def __init__(self, in_flight: int) -> None:
        """Run up to `in_flight` operations at a time. Raises RuntimeError if there is no thread to be had."""
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(in_flight)
        self._files: defaultdict[tuple[int, ...], list[Any]] = defaultdict(list)  # idle ones, oldest first
        self._idle_files = 0
        self._most_idle = in_flight
        self._idle = threading.Condition()
        self._running = 0
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtier-aio", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()  # its descriptors would stay open for as long as somebody has the error
            raise

    def submit(self, batch: Batch) -> None:
        """Start every operation; see IOEngine.submit."""
        with self._idle:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._running += 1
        asyncio.run_coroutine_threadsafe(self._run(batch), self._loop)

    def close(self, timeout: float) -> bool:
        """Wait for running batches, then end the loop; see IOEngine.close."""
        end = time.monotonic() + timeout
        with self._idle:
            self._closed = True
            drained = self._idle.wait_for(lambda: self._running == 0, timeout)
        if drained and self._thread.is_alive() and self._thread is not threading.current_thread():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(max(1.0, end - time.monotonic()))
            self._loop.close()
        return drained

    async def _run(self, batch: Batch) -> None:
        results = await asyncio.gather(*(self._result(batch, i) for i in range(len(batch.ops))))
        batch.results[:] = results
        try:
            batch.on_done(batch)
        except Exception:
            _log.exception("the completion of a batch failed")
        with self._idle:
            self._running -= 1
            self._idle.notify_all()

    async def _result(self, batch: Batch, index: int) -> int:
        operation = Operation.of(batch, index)
        async with self._places:
            try:
                return await self._with_file(operation)
            except OSError as error:
                return error.errno or errno.EIO
            except RuntimeError:  # the interpreter ends, and gives no work to threads any more
                return self._without_threads(operation)

    def _without_threads(self, operation: Operation) -> int:
        try:
            return run(operation)
        except OSError as error:
            return error.errno or errno.EIO

    async def _with_file(self, operation: Operation) -> int:
        """Run an operation on an idle file, or a new one; one that failed is not used again."""
        if operation.fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flags = fcntl.fcntl(operation.fd, fcntl.F_GETFL) & os.O_ACCMODE
        status = os.fstat(operation.fd)  # a number may have been closed and given to another file
        place = operation.fd, flags, status.st_dev, status.st_ino
        file = self._take(place) or await _open(operation.fd, flags)
        try:
            await file.seek(operation.offset)
            result = await (_write(file, operation) if operation.is_write else _read(file, operation))
        except io.UnsupportedOperation:
            await file.close()
            raise OSError(errno.EBADF, "the descriptor is not open for that") from None
        except BaseException:
            await file.close()
            raise
        await self._keep(place, file)
        return result

    def _take(self, place: tuple[int, ...]) -> Any:
        """An idle file, or None."""
        idle = self._files.pop(place, [])
        file = idle.pop() if idle else None
        if idle:
            self._files[place] = idle
        self._idle_files -= file is not None
        return file

    async def _keep(self, place: tuple[int, ...], file: Any) -> None:
        """Have a file ready for the next operation, and close those that were idle for longest."""
        self._files[place].append(file)
        self._idle_files += 1
        while self._idle_files > self._most_idle:
            oldest = self._files.pop(next(iter(self._files)))
            self._idle_files -= len(oldest)
            for file in oldest:
                await file.close()

    async def _end(self) -> None:
        # The interpreter's end takes the threads that aiofiles works on, and then the files, too.
        with contextlib.suppress(RuntimeError):
            for files in self._files.values():
                for file in files:
                    await file.close()
            self._files.clear()
            await self._loop.shutdown_default_executor()


async def _open(fd: int, flags: int) -> Any:
    """The file behind a descriptor, with a position of its own and without O_DIRECT."""
    mode: Literal["rb", "wb", "r+b"] = "r+b"
    if flags != os.O_RDWR:
        mode = "rb" if flags == os.O_RDONLY else "wb"

    def opener(path: str, _: int) -> int:
        opened = os.open(path, flags | os.O_CLOEXEC)  # not Python's flags: they would cut the file off
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)  # or it reads ahead into other slots
        return opened

    return await aiofiles.open(f"/proc/self/fd/{fd}", mode, buffering=0, opener=opener)


async def _read(file: Any, operation: Operation) -> int:
    result = await _transfer(file.readinto, operation.memory(), at_end=SHORT)
    return result or operation.check()


async def _write(file: Any, operation: Operation) -> int:
    operation.sign()
    return await _transfer(file.write, operation.memory(), at_end=errno.EIO)


async def _transfer(
    call: Callable[[memoryview], Awaitable[int | None]], memory: memoryview, *, at_end: int
) -> int:
    """Move all of `memory`; `at_end` if the call makes no progress."""
    done = refused = 0
    while done < len(memory):
        moved = await call(memory[done:])
        if moved is None:  # "again"
            refused += 1
            if refused == _MOST_REFUSALS:
                return errno.EAGAIN
            continue
        if moved == 0:
            return at_end
        done += moved
    return 0
