"""Optional packages: whether they are installed, asked before any work that needs them begins."""

from __future__ import annotations

import importlib.metadata
import importlib.util


def is_installed(module: str) -> bool:
    """Whether a module could be imported; the module itself is not.

    >>> is_installed("json.decoder"), is_installed("no_such_package.part")
    (True, False)
    """
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def version_of(distribution: str) -> str | None:
    """The version of an installed package; ``None`` where it is missing.

    >>> version_of("no-such-package") is None
    True
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def require(module: str, error: type[Exception], what: str, extra: str) -> None:
    """Raise an error of this type, with the pip command, if an optional package is missing.

    >>> require("no_such_package", ValueError, "flying takes wings", "wings")
    Traceback (most recent call last):
    ValueError: flying takes wings, which is not installed: pip install "meshwright[wings]".
    """
    if not is_installed(module):
        raise error(f'{what}, which is not installed: pip install "meshwright[{extra}]".')
