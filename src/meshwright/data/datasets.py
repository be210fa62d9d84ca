"""Real digits for the demo, the examples and the benchmarks: a file, Keras' cache, or our subset.

Nothing here can hold a program up: the download runs in a thread that is left behind once it has
been silent for too long, and only bytes with the right hash are ever written into the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import lzma
import os
import threading
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError

_IMAGES = ("x_train", "x_test")
_LABELS = ("y_train", "y_test")
_SUBSET = "mnist_subset.npz.xz"
_SUBSET_ORIGIN = "the subset of MNIST shipped with Meshwright ({sizes})"
_PATIENCE_S = 3.5  # of silence; loading the subset afterwards stays within five seconds in all
_SLOWEST_BYTES_PER_S = 200_000  # below this a download would keep the user waiting for a minute
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, eq=False)
class Digits:
    """Handwritten digits, grey values from 0 to 255, and where they came from, in words.

    >>> digits = shipped_subset()
    >>> digits.x_train.shape[1:], digits.x_train.dtype.name, digits.y_test.shape
    ((28, 28), 'uint8', (2000,))
    """

    x_train: np.ndarray  # shape=(n, 28, 28), dtype=uint8
    y_train: np.ndarray  # shape=(n,), dtype=uint8
    x_test: np.ndarray  # shape=(m, 28, 28), dtype=uint8
    y_test: np.ndarray  # shape=(m,), dtype=uint8
    origin: str


@dataclass(frozen=True)
class Download:
    """Where a file is downloaded from and the hash that it must have."""

    url: str
    sha256: str


KERAS_MNIST = Download(
    url="https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
    sha256="731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
)


def mnist(
    path: str | os.PathLike[str] | None = None,
    *,
    source: Download = KERAS_MNIST,
    patience_s: float = _PATIENCE_S,
) -> Digits:
    """MNIST (LeCun and Cortes), from the first of these that there is; ``origin`` says which.

    A ``path`` given; else the file that ``keras.datasets`` keeps in its cache, or its download,
    given up after ``patience_s`` seconds without a byte; else the subset shipped with Meshwright.
    Raises :class:`DataError` if a path is given and does not hold MNIST's four arrays.

    >>> digits = mnist(source=Download("http://localhost:9/mnist.npz", sha256=""))
    >>> digits.x_train.shape[1:]
    (28, 28)
    """
    if path is not None:
        return _from_file(Path(path).expanduser())
    reasons = []
    for attempt in (_from_cache, _from_download):
        try:
            return attempt(source, patience_s)
        except DataError as error:
            reasons.append(str(error))
    return shipped_subset("\n".join(reasons))


def shipped_subset(why: str = "") -> Digits:
    """The real MNIST digits that are part of the package; ``why`` is added to the origin.

    >>> len(shipped_subset().x_test)
    2000
    """
    packed = resources.files("meshwright").joinpath("digits", _SUBSET).read_bytes()
    return _read(lzma.decompress(packed), "\n".join(filter(None, (_SUBSET_ORIGIN, why))))


def cache_files() -> tuple[Path, ...]:
    """Where ``keras.datasets`` keeps MNIST, the likelier place first.

    ``$KERAS_HOME`` or ``~/.keras``; Keras itself turns to ``/tmp`` from a home it cannot write.
    """
    home = Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser()
    return tuple(base / "datasets" / "mnist.npz" for base in (home, Path("/tmp/.keras")))


# One way each to the digits; a way that leads nowhere is a DataError


def _from_file(path: Path) -> Digits:
    if not path.is_file():
        raise DataError(_no_file(path))
    try:
        return _read(path.read_bytes(), f"MNIST from {path} ({{sizes}})")
    except DataError as error:
        raise DataError(f"{path} does not hold MNIST: {error}") from None
    except _UNREADABLE as error:
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) cannot be read as an .npz file: {error}. "
            "It may be an incomplete download: delete it and fetch it again, or pass another path."
        ) from error


def _from_cache(source: Download, patience_s: float) -> Digits:
    del source, patience_s  # every way has the same arguments, and this one needs none
    cached = [path for path in cache_files() if path.is_file()]
    if not cached:
        raise DataError(f"Keras' cache has no {cache_files()[0]}.")
    return _from_file(cached[0])


def _from_download(source: Download, patience_s: float) -> Digits:
    content = _fetch(source.url, patience_s)
    if hashlib.sha256(content).hexdigest() != source.sha256:
        raise DataError(
            f"{source.url} gave {len(content):,} bytes that are not MNIST (wrong hash)."
        )
    cached = _keep(content, cache_files()[0])
    return _read(content, f"MNIST from {source.url} ({{sizes}}), {cached}")


def _keep(content: bytes, path: Path) -> str:
    """Put a whole file into the cache, or none; a cache that cannot be written is not an error."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        return f"not kept ({error})"
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return f"kept in {path}"


# The download


class _Download(threading.Thread):
    """Reads a URL into memory, in a thread that hangs where the network hangs."""

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__(name="meshwright-download", daemon=True)
        self.url, self.timeout_s = url, timeout_s
        self.received = bytearray()
        self.error: Exception | None = None
        self.abandoned = False

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self.url, timeout=self.timeout_s) as response:
                while not self.abandoned and (chunk := response.read1(1 << 16)):
                    self.received += chunk
        except Exception as error:  # whatever it is, it means that there is no download
            self.error = error


def _fetch(url: str, patience_s: float) -> bytes:
    """The bytes at ``url``; :class:`DataError` on failure, on silence and on a trickle."""
    download = _Download(url, timeout_s=patience_s + 1)  # so that the thread left behind ends
    download.start()
    start = last_heard = time.monotonic()
    count = 0
    while download.is_alive():
        download.join(0.02)
        now = time.monotonic()
        if len(download.received) > count:
            count, last_heard = len(download.received), now
        too_slow = now - start > patience_s and count < _SLOWEST_BYTES_PER_S * (now - start)
        if download.is_alive() and (too_slow or now - last_heard > patience_s):
            download.abandoned = True
            raise DataError(
                f"The download of {url} was stopped after {now - start:.1f} s and {count:,} bytes."
            )
    if download.error is not None:
        reason = getattr(download.error, "reason", download.error)
        raise DataError(f"The download of {url} failed: {reason}.")
    return bytes(download.received)


# The arrays and their checks


def _read(content: bytes, origin: str) -> Digits:
    if not zipfile.is_zipfile(io.BytesIO(content)):  # NumPy would take it for a pickle and say so
        raise zipfile.BadZipFile("the archive is missing or truncated")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return _checked(dict(arrays), origin)


def _checked(arrays: Mapping[str, Any], origin: str) -> Digits:
    faults = _missing(arrays) or [
        fault for part in ("train", "test") for fault in _faults(arrays, part)
    ]
    if faults:
        raise DataError(
            "; ".join(faults) + ". Expected x_train, x_test (n, 28, 28) and y_train, y_test (n,), "
            "whole numbers, as in the mnist.npz of keras.datasets."
        )
    sizes = f"{len(arrays['x_train']):,} digits to train on and {len(arrays['x_test']):,} to test"
    arrays = {name: np.asarray(arrays[name], np.uint8) for name in (*_IMAGES, *_LABELS)}
    return Digits(**arrays, origin=origin.format(sizes=sizes))


def _missing(arrays: Mapping[str, Any]) -> list[str]:
    missing = [name for name in (*_IMAGES, *_LABELS) if name not in arrays]
    return [f"no array {', '.join(missing)} among {', '.join(arrays) or 'none'}"] if missing else []


def _faults(arrays: Mapping[str, Any], part: str) -> list[str]:
    images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
    faults = []
    if images.ndim != 3 or images.shape[1:] != (28, 28) or not len(images):
        faults.append(f"x_{part} has shape {images.shape}")
    if labels.shape != images.shape[:1]:
        faults.append(f"y_{part} has shape {labels.shape} beside {images.shape[0]} images")
    for name, array, largest in ((f"x_{part}", images, 255), (f"y_{part}", labels, 9)):
        if array.dtype.kind not in "ui":
            faults.append(f"{name} holds {array.dtype}")
        elif array.size and (array.min() < 0 or array.max() > largest):
            faults.append(f"{name} goes from {array.min()} to {array.max()}, not 0 to {largest}")
    return faults


def _no_file(path: Path) -> str:
    way_out = "Give the path of an mnist.npz, or none: then Keras' cache or the subset is taken."
    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.npz"))
        hint = f"In it: {', '.join(inside)}." if inside else "No .npz file is in it."
        return f"{path} is a folder. {hint} {way_out}"
    return f"There is no file {path}. {way_out}"
