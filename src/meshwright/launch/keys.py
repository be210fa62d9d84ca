"""The keys by which the tasks of one cluster know each other (CURVE, as in ZeroMQ's RFC 26).

There are two pairs for a cluster: one for those that listen (servers and chief), one for those
that only connect (workers and evaluator), so that a worker cannot pass for a server.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ClusterError

_NAMES = ("public", "secret", "server_public", "client_public", "client_secret")
_LISTENERS = ("ps", "chief")
HOW_TO_MAKE = "Make a file of them once, with `python -m meshwright.launch.new_keys FILE`."
_Z85_LENGTH = 40  # 32 bytes in ZeroMQ's base 85


@dataclass(frozen=True)
class Keys:
    """What one task needs: its own pair, and the public keys of those it speaks with (Z85 texts).

    ``public`` and ``secret`` are its own pair, ``server_public`` is the public key of those that
    listen, ``client_public`` and ``client_secret`` are the pair of those that connect.

    :meth:`make` gives the pair of the listeners together with that of the others; :meth:`of`
    cuts it down to what a task of one job may know.

    >>> keys = Keys.make()
    >>> worker = keys.of("worker")
    >>> worker.server_public == keys.public, worker.public in keys.allowed
    (True, True)
    """

    public: str
    secret: str = field(repr=False)
    server_public: str
    client_public: str = ""
    client_secret: str = field(default="", repr=False)

    @classmethod
    def make(cls) -> Keys:
        """New keys for a cluster, as its listeners hold them."""
        import zmq

        public, secret = (text.decode() for text in zmq.curve_keypair())
        client_public, client_secret = (text.decode() for text in zmq.curve_keypair())
        return cls(public, secret, public, client_public, client_secret)

    @property
    def allowed(self) -> frozenset[str]:
        """Public keys that a listener accepts."""
        return frozenset({self.server_public, self.client_public} - {""})

    def of(self, job: str) -> Keys:
        """The keys for a task of this job.

        Raises :class:`ClusterError` where these are a worker's keys, and the job listens.
        """
        listens = self.public == self.server_public
        if job in _LISTENERS:
            if not listens:
                raise ClusterError(
                    f"these are keys of a worker, and a {job} needs the servers' pair. "
                    "Give it the file that Keys.make().save(path) wrote."
                )
            return self
        if not listens or not self.client_public:
            return self
        return Keys(self.client_public, self.client_secret, self.server_public, self.client_public)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them to a new file that only its owner may read.

        Raises :class:`ClusterError` where there is a file already, or none can be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(self), file)
        except OSError as error:
            raise ClusterError(
                f"the keys cannot be written to {os.fspath(path)!r}: {error.strerror}."
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Keys:
        """Read what :meth:`save` wrote.

        Raises :class:`ClusterError` for a file that is missing, holds no keys, or that other
        users may read or write.
        """
        name = os.fspath(path)
        try:
            _check_mode(Path(path))
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            keys = cls(**{name: str(values.get(name, "")) for name in _NAMES})
        except OSError as error:
            raise ClusterError(f"the keys in {name!r} cannot be read: {error.strerror}.") from error
        except (ValueError, AttributeError) as error:
            if isinstance(error, ClusterError):
                raise
            raise ClusterError(f"{name!r} holds no keys. {HOW_TO_MAKE}") from error
        if any(len(key) != _Z85_LENGTH for key in (keys.public, keys.secret, keys.server_public)):
            raise ClusterError(f"{name!r} holds no keys. {HOW_TO_MAKE}")
        return keys


def _check_mode(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o066:
        verb, doing = ("read", "read") if mode & 0o044 else ("written to", "changed")
        raise ClusterError(
            f"the keys in {str(path)!r} can be {verb} by others (mode {mode:04o}). "
            f"Run `chmod 600 {path}`; make new keys if another user may have {doing} them."
        )
