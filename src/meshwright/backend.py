"""Settles that Keras runs on JAX, as early as ``import meshwright``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .errors import BackendError

_VARIABLE = "KERAS_BACKEND"


def settle_keras_backend() -> None:
    """Choose JAX for Keras where nothing is chosen yet; never imports Keras.

    Raises :class:`BackendError` if another backend is chosen already. The command-line program
    prints the message without a traceback and exits.
    """
    if "keras" in sys.modules:
        chosen = sys.modules["keras"].config.backend()
        if chosen != "jax":
            raise BackendError(
                f"Keras is already imported with the backend {chosen!r}, and Meshwright runs on "
                "JAX. Put `import meshwright` before `import keras`, or set the environment "
                f"variable {_VARIABLE}=jax."
            )
        return
    chosen = os.environ.setdefault(_VARIABLE, "jax") or "jax"
    if chosen != "jax":
        error = BackendError(
            f"{_VARIABLE}={chosen} is set, and Meshwright runs on JAX. "
            f"Change that line to {_VARIABLE}=jax."
        )
        raise SystemExit(f"Error: {error}") if _is_the_program() else error
    os.environ[_VARIABLE] = "jax"


def _is_the_program() -> bool:
    return Path(sys.argv[0]).stem == "meshwright"
