"""What compilers said before, kept by content: the same step for the same target is asked once.

The key is a hash of the step as it is compiled, of the target and of all versions that take part,
so nothing that is kept can be out of date. The folder is that of the user's caches;
``MESHWRIGHT_CACHE`` names another one, or switches this off (``off``). The entries that were not
used for longest go when there is too much.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..extras import version_of

VARIABLE = "MESHWRIGHT_CACHE"
_MOST_BYTES = 1 << 30
_PACKAGES = ("jax", "jaxlib", "libtpu", "numpy")


def folder() -> Path | None:
    """Where answers are kept; ``None`` if that is switched off."""
    named = os.environ.get(VARIABLE, "")
    if named.lower() in ("off", "0", "no", "false"):
        return None
    if named:
        return Path(named).expanduser()
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "meshwright" / "compiled"


def key_of(contents: Iterable[bytes | str]) -> str:
    """The name of an answer: a hash of what was asked, of versions, machine and compiler flags."""
    digest = hashlib.sha256()
    flags = (os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    versions = (version_of(package) or "" for package in _PACKAGES)
    around = (*versions, sys.version, platform.machine(), *flags)
    for part in (*contents, *around):
        part = part.encode() if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def recall(key: str) -> dict[str, Any] | None:
    """The answer of that key, or ``None``."""
    if (root := folder()) is None:
        return None
    path = root / f"{key}.json.gz"
    try:
        answer = json.loads(gzip.decompress(path.read_bytes()))
        path.touch()  # it is in use
    except (OSError, EOFError, ValueError):  # absent, or cut off by a full disk
        return None
    return answer


def remember(key: str, answer: dict[str, Any]) -> None:
    """Keep an answer. What cannot be written is not kept, and nothing else comes of it."""
    if (root := folder()) is None:
        return
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
        packed = gzip.compress(json.dumps(answer).encode(), compresslevel=3)
        # Written aside and renamed: a concurrent reader sees all of it, or nothing.
        with tempfile.NamedTemporaryFile(dir=root, suffix=".part", delete=False) as file:
            file.write(packed)
        Path(file.name).replace(root / f"{key}.json.gz")
        _make_room(root)


def _make_room(root: Path) -> None:
    entries = [(path.stat(), path) for path in root.glob("*.json.gz")]
    too_much = sum(stat.st_size for stat, _ in entries) - _MOST_BYTES
    for stat, path in sorted(entries, key=lambda entry: entry[0].st_mtime):
        if too_much <= 0:
            return
        path.unlink(missing_ok=True)
        too_much -= stat.st_size
