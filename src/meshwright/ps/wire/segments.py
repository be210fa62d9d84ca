"""Memory that two processes of one host map, and that no other process can find.

On Linux a segment is an unnamed file in memory, which its peer opens by way of its owner's
``/proc/PID/fd``: nothing can be left behind by processes that are killed. Elsewhere it is a file
with a random name, for its owner's eyes alone, and the peer takes the name away as it opens it.
Either way what the peer must know travels over the encrypted channel.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

_NAME = re.compile(r"(meshwright-[0-9a-f]{32})(?:@([0-9]+):([0-9]+))?")  # process and descriptor
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # all pages at once: they are reserved anyway
_UNNAMED = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()
_SEALS = 7  # F_SEAL_SEAL, _SHRINK and _GROW: a peer that cut it short would end this process


class Segment:
    """Mapped memory; :meth:`make` makes one, and :meth:`find` opens that of the peer."""

    def __init__(self, name: str, fd: int, num_bytes: int, *, writing: bool) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self._fd = fd
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writing else 0)
        self.memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | _POPULATE, access)

    @classmethod
    def make(cls, num_bytes: int) -> Segment:
        """A new one; raises ``OSError`` where the host has no such memory left."""
        name = f"meshwright-{secrets.token_hex(16)}"
        path = None if _UNNAMED else _folders()[0] / name
        fd = _new(name, path)
        try:
            _reserve(fd, num_bytes)
            if path is None:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
                name = f"{name}@{os.getpid()}:{fd}"
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # for as long as this process lives
            return cls(name, fd, num_bytes, writing=True)
        except BaseException:
            os.close(fd)
            if path is not None:
                path.unlink(missing_ok=True)
            raise

    @classmethod
    def find(cls, name: str, num_bytes: int) -> Segment:
        """The peer's; raises ``OSError`` where it cannot be opened. A name is gone afterwards."""
        parts = _NAME.fullmatch(name)
        if parts is None:
            raise OSError(f"invalid segment name {name!r}")
        text, process, descriptor = parts.groups()
        fd = _opened_unnamed(text, process, descriptor) if process else _opened(text)
        try:
            _check(fd, num_bytes, unnamed=bool(process))
            if not process:
                _remove(text)
            return cls(name, fd, num_bytes, writing=False)
        except BaseException:
            os.close(fd)
            raise

    def owner_is_gone(self) -> bool:
        """Whether the process that made it has ended: its lock is then free."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Let go of the file; the memory stays for as long as arrays lie in it."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        if "@" not in self.name:
            _remove(self.name)  # where no peer has opened it
        # Never `memory.close()`: NumPy's arrays would then point at nothing, and crash. The memory
        # goes with the last of them, and with this object.


def host() -> str:
    """What two tasks have in common that share a host's memory: which start of it this is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _new(name: str, path: Path | None) -> int:
    if path is None:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _opened(name: str) -> int:
    for folder in _folders():
        with contextlib.suppress(FileNotFoundError):
            return os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    raise FileNotFoundError(f"no segment {name!r} on this host")


def _opened_unnamed(name: str, process: str, descriptor: str) -> int:
    fd = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    # In another container the same number may be another process, and another file.
    if str(Path(f"/proc/self/fd/{fd}").readlink()) != f"/memfd:{name} (deleted)":
        os.close(fd)
        raise FileNotFoundError(f"no segment {name!r} on this host")
    return fd


def _remove(name: str) -> None:
    for folder in _folders():
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)


def _folders() -> list[Path]:
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return [path for path in folders if path.is_dir() and os.access(path, os.W_OK | os.X_OK)]


def _reserve(fd: int, num_bytes: int) -> None:
    # A page that is not there when it is first written to would end the process (SIGBUS).
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
    else:
        for start in range(0, num_bytes, 1 << 20):
            os.pwrite(fd, bytes(min(1 << 20, num_bytes - start)), start)


def _check(fd: int, num_bytes: int, *, unnamed: bool) -> None:
    status = os.fstat(fd)
    ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if unnamed:
        fit = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    else:
        fit = stat.S_IMODE(status.st_mode) == 0o600
    if not ours or not fit or status.st_size != num_bytes:
        raise OSError("a segment is not as its peer described it")
