"""How each fault is brought about."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvtier
from kvtier.testing.faults import Fault
from small_stores import CHUNK, numbered_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from .scene import Scene

_WHERE: dict[str, dict[str, Any]] = {
    "open": {"op": "any"},
    "put": {"op": "write", "file": "slab"},
    "append": {"op": "write", "file": "journal"},
    "dram": {"op": "write", "file": "slab"},
    "get": {"op": "read", "file": "slab"},
    "lease": {"op": "read", "file": "slab"},
    "prefetch": {"op": "read", "file": "slab"},
    "lend": {"op": "read", "file": "slab"},
    "paths": {"op": "any"},
    "flush": {"op": "fsync"},
    "close": {"op": "any"},
}
"""Which requests a fault of the device strikes at a moment, with kind `slab`."""
_WHERE_OF_FILES = _WHERE | {
    "put": {"op": "write", "file": "*/incoming/*"},
    "append": {"op": "write", "file": "ledger"},
    **{moment: {"op": "read", "file": "*.kv1"} for moment in ("get", "lease", "prefetch", "lend")},
}
_libc = ctypes.CDLL(None, use_errno=True)
_SECCOMP = {"x86_64": 317, "aarch64": 277}  # the number of the system call


def device(**fault: Any) -> Callable[[Scene, str], None]:
    """A fault of the device, on the requests of the moment unless `fault` says which."""

    def begin(scene: Scene, moment: str) -> None:
        scene.device.inject(Fault(**{**_where(scene, moment), **fault}), device=scene.struck)

    return begin


def flip(op: str) -> Callable[[Scene, str], None]:
    """Flip one bit of every request, anywhere in its first part."""

    def begin(scene: Scene, moment: str) -> None:
        log = "ledger" if scene.cell.kind == "files" else "journal"
        where = {**_where(scene, moment), "op": op, **({"file": log} if moment == "open" else {})}
        nbytes = 128 if where["file"] == log else CHUNK
        scene.device.inject(Fault(**where, flip_bit=scene.rng.randrange(8 * nbytes)))

    return begin


def torn(error: int | None = None) -> Callable[[Scene, str], None]:
    """Tear the n-th write behind its n-th page."""

    def begin(scene: Scene, moment: str) -> None:
        for kept in range(0, CHUNK, 4096):
            scene.device.inject(Fault(**_where(scene, moment), count=1, torn=kept, errno=error))

    return begin


def underneath(name: str, how: Callable[[Path], None]) -> Callable[[Scene, str], None]:
    """Somebody else does something to a file of the store."""

    def begin(scene: Scene, moment: str) -> None:
        for path in scene.paths[-1].glob("chunks/*" if name == "chunk" else name):
            how(path)

    return begin


def _where(scene: Scene, moment: str) -> dict[str, Any]:
    return (_WHERE_OF_FILES if scene.cell.kind == "files" else _WHERE)[moment]


def cut(path: Path) -> None:
    os.truncate(path, 200 if path.name in ("journal", "ledger") else 4096)


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    other = path.parents[1] / "other"
    other.write_bytes(os.urandom(path.stat().st_size))
    other.rename(path)


def abort(scene: Scene, moment: str) -> None:
    scene.device.abort(device=scene.struck)


def detach(scene: Scene, moment: str) -> None:
    scene.device.detach(device=scene.struck)


def refuse_direct(scene: Scene, moment: str) -> None:
    scene.device.inject(Fault(op="open", direct=True, errno=errno.EINVAL))


def nothing(scene: Scene, moment: str) -> None:
    """The case's settings are the fault."""


def few_descriptors(scene: Scene, moment: str) -> None:
    """No more than are open now, and the room that there is."""
    lowest = os.dup(0)
    os.close(lowest)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + scene.room, before[1]))
    scene.undo.append(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before))


def little_memory(scene: Scene, moment: str) -> None:
    """No more address space than is used now, and the room that there is."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (scene.room << 20), before[1]))
    scene.undo.append(lambda: resource.setrlimit(resource.RLIMIT_AS, before))


def little_locked_memory(scene: Scene, moment: str) -> None:
    _drop_capability(14)  # CAP_IPC_LOCK, which is above the limit
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))


def no_huge_pages(scene: Scene, moment: str) -> None:
    _check(_libc.prctl(41, 1, 0, 0, 0))  # PR_SET_THP_DISABLE


def refuse_uring(scene: Scene, moment: str) -> None:
    """As the default seccomp profile of containers does."""
    _forbid(425, 426, 427)  # io_uring_setup, _enter, _register


def tear_down_uring(scene: Scene, moment: str) -> None:
    """A ring that works stops working."""
    _forbid(426)


def fork(scene: Scene) -> None:
    """The child has no store, and ends; what the parent has begun goes on."""
    pid = os.fork()
    if pid == 0:
        try:
            scene.store.match([numbered_key(0)])
        except kvtier.StoreClosed:
            os._exit(0)
        os._exit(1)
    if os.waitpid(pid, 0)[1]:
        scene.problems.append("the forked child can use the store")


def _forbid(*calls: int) -> None:
    """Answer system calls with EPERM, in all threads of this process and for good (seccomp)."""

    def instruction(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    program = [instruction(0x20, 0, 0, 0)]  # load the number of the call
    program += [instruction(0x15, len(calls) - i, 0, call) for i, call in enumerate(calls)]  # equal: deny
    program += [instruction(0x06, 0, 0, 0x7FFF0000), instruction(0x06, 0, 0, 0x00050001)]  # allow; EPERM
    code = ctypes.create_string_buffer(b"".join(program))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    _check(_libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    _check(_libc.syscall(_SECCOMP[os.uname().machine], 1, 1, filter_))  # SET_MODE_FILTER, FLAG_TSYNC


def _drop_capability(number: int) -> None:
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    sets = (ctypes.c_uint32 * 6)()
    _check(_libc.capget(header, sets))
    for i in range(3):  # effective, permitted, inheritable
        sets[i] &= ~(1 << number)
    _check(_libc.capset(header, sets))


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
