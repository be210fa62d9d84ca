"""For which platform a step is traced: it is written otherwise for a CPU than for others."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar

from ..scoped import scoped

_platform: ContextVar[str | None] = ContextVar("traced_for", default=None)


def traced_for() -> str:
    """The platform that is traced for: that of JAX's devices, or of a target.

    >>> with tracing_for("tpu"):
    ...     traced_for()
    'tpu'
    """
    import jax

    return _platform.get() or jax.default_backend()


def traced_for_gpu() -> bool:
    """Whether it is traced for GPUs, which JAX and targets call otherwise.

    >>> with tracing_for("cuda"):
    ...     traced_for_gpu()
    True
    """
    return traced_for() in ("gpu", "cuda", "rocm")


def tracing_for(platform: str) -> contextlib.AbstractContextManager[None]:
    """Trace as for devices of this kind, whatever the present ones are."""
    return scoped(_platform, platform)


def export_platform() -> str:
    """The platform that a step is exported for to run in this process: ``"cuda"`` for what JAX
    calls ``"gpu"`` elsewhere.

    >>> export_platform()
    'cpu'
    """
    import jax.export

    return jax.export.default_export_platform()
