"""Every version test and every private import of JAX and Keras, each with its version and reason.

Nothing heavy is imported before it is used: ``import meshwright`` must stay fast.
"""

from __future__ import annotations


def jax_is_running() -> bool:
    """Whether JAX has created its clients, after which devices cannot be added any more.

    JAX 0.10.2 has no public question for this (``jax.devices()`` would start them); the function
    has been in ``xla_bridge`` since 0.4.26.
    """
    import sys

    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
