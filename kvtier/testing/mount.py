"""One mounted device: a process that serves a FUSE file system, and how it always ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from kvtier.errors import TierUnavailable

_PATIENCE = 10.0  # seconds for a device to mount, and to end
_PLAIN, _DETACHING = ("-u", ""), ("-u -z", "-l")


class Mount:
    """A device's process and its mount point, `path`.

    Each device is a mount and a process of its own, so a hung or vanished one leaves the others alone.
    """

    def __init__(self, binary: Path, path: Path, backing: Path, fields: dict[str, object]) -> None:
        self.path = path
        path.mkdir()
        backing.mkdir()
        given = {"mountpoint": path, "backing": backing, "parent": os.getpid(), **fields}
        self._process = subprocess.Popen(
            [binary, *(f"{name}={value}" for name, value in given.items())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the caller, who then closes the device
        )
        try:
            self._wait_until_mounted()
        except BaseException:
            self.stop()
            raise

    def _wait_until_mounted(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline() != b"ready\n":
            reason = self._process.stderr.read().decode(errors="replace").strip()
            raise TierUnavailable(
                f"cannot mount an emulated device: {reason} (mounting needs root, or fusermount3 set-uid; "
                "in a container: --device /dev/fuse --cap-add SYS_ADMIN)"
            )
        self._connection = Path(f"/sys/fs/fuse/connections/{os.minor(self.path.stat().st_dev)}/abort")

    def stats(self) -> str:
        """The device's state, JSON text. Raises OSError."""
        return (self.path / ".kvtier/stats").read_text()

    def obey(self, command: str) -> None:
        """Give the device a command. Raises OSError."""
        control = os.open(self.path / ".kvtier/control", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(control, command.encode())
        finally:
            os.close(control)

    def abort(self) -> None:
        """Fail everything in flight and to come: the mount is dead until it is unmounted."""
        try:
            self._connection.write_text("1")
        except (OSError, AttributeError):  # no control file system here, or never mounted
            self._kill()

    def _kill(self) -> None:
        """End the process, also from a forked child, which cannot wait for it; the mount is dead then."""
        if self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            while is_mounted(self.path) and self.path.stat():
                time.sleep(0.001)

    def detach(self) -> None:
        """Unmount from under whoever uses it: their open files go on working. Raises OSError."""
        _unmount(self.path, _DETACHING)
        if is_mounted(self.path):
            raise OSError(f"cannot detach the emulated device at {self.path}")

    def stop(self) -> None:
        """Unmount and end the process, whatever hangs. Never raises."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.abort()
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                stream.close()
        if is_mounted(self.path):
            _unmount(self.path, _PLAIN, _DETACHING)
        with contextlib.suppress(OSError):
            self.path.rmdir()


def is_mounted(path: Path) -> bool:
    """Whether something is mounted there, also if it is dead (which `os.path.ismount` denies)."""
    with open("/proc/self/mountinfo") as mounts:
        return any(line.split()[4] == str(path) for line in mounts)


def _unmount(path: Path, *ways: tuple[str, str]) -> None:
    """Unmount a device by the first way that works, of pairs of options: of fusermount3, and of umount."""
    tool = shutil.which("fusermount3")
    for with_tool, with_umount in ways:
        command = [tool, *with_tool.split()] if tool else ["umount", *with_umount.split()]
        if subprocess.run([*command, str(path)], capture_output=True, check=False).returncode == 0:
            return
