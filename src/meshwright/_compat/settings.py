"""What Keras keeps for the whole process: its seed, types, names and choice of kernels."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any


def in_stateless_scope() -> bool:
    """Whether Keras is only tracing shapes, or calling a function without side effects."""
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    return in_stateless_scope()


def global_seed() -> list[int] | None:
    """The state of the generator of unseeded ``keras.random`` calls; ``None`` if it is unused.

    ``keras.random`` (Keras 3.15) exports neither the generator nor a way to set it.
    """
    generator = _global_seed_generator()
    return None if generator is None else [int(word) for word in generator.state.numpy()]


def set_global_seed(state: list[int] | None) -> None:
    """Set what :func:`global_seed` read."""
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    if state is None:
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)
    else:
        seed_generator.global_seed_generator().state.assign(state)


def _global_seed_generator() -> Any:
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


@contextlib.contextmanager
def keras_sees(platform: str) -> Iterator[None]:
    """Let Keras choose its attention kernels for another platform than that of the devices here.

    Keras 3.15 asks ``jax.devices()[0].platform`` as it traces (``backend/jax/nn.py``). Does
    nothing where Keras was never imported.
    """
    nn: Any = sys.modules.get("keras.src.backend.jax.nn")
    if nn is None:
        yield
        return
    real, nn.jax = nn.jax, _WithDevicesOf(platform)
    try:
        yield
    finally:
        nn.jax = real


@contextlib.contextmanager
def keras_splits_attention() -> Iterator[None]:
    """Let Keras compute attention without its kernel for TPUs, which XLA cannot cut over a mesh.

    Keras 3.15 takes it by itself where the first device is a TPU (``backend/jax/nn.py``). A layer
    that was given ``flash_attention=True`` still gets it, and XLA's refusal.
    """
    nn: Any = sys.modules.get("keras.src.backend.jax.nn")
    real = getattr(nn, "_can_use_flash_attention", None)
    if real is None:
        yield
        return

    def can(*args: Any, raise_error: bool = False, **options: Any) -> bool:
        if not raise_error and nn.jax.devices()[0].platform == "tpu":
            return False
        return real(*args, raise_error=raise_error, **options)

    nn._can_use_flash_attention = can
    try:
        yield
    finally:
        nn._can_use_flash_attention = real


class _WithDevicesOf:
    """The module ``jax``, whose first device is of another platform."""

    def __init__(self, platform: str) -> None:
        self._platform = {"cuda": "gpu"}.get(platform, platform)

    def devices(self) -> list[Any]:
        return [types.SimpleNamespace(platform=self._platform)]

    def __getattr__(self, name: str) -> Any:
        import jax

        return getattr(jax, name)


def keras_name(cls: Any) -> str:
    """The name that Keras writes into files for one of its own classes; ``""`` for others."""
    from keras.src import api_export

    return api_export.REGISTERED_OBJS_TO_NAMES.get(cls, "")


def write_as_keras_name(cls: Any, name: str) -> None:
    """Let files name a class as one of Keras' own, so that plain Keras reads them."""
    from keras.src import api_export

    api_export.REGISTERED_OBJS_TO_NAMES[cls] = name


def read_keras_name_as(name: str, reader: Any) -> None:
    """Let ``reader.from_config`` make what a file names so."""
    from keras.src import api_export

    api_export.REGISTERED_NAMES_TO_OBJS[name] = reader


@contextlib.contextmanager
def names_from_the_start() -> Iterator[None]:
    """Inside, Keras numbers layer names from one again, so two builds give the same paths.

    Keras 3.15 resets this counter only together with everything else (``clear_session``).
    """
    from keras.src.backend.common import global_state

    counted = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", counted)


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Everything that is made inside is made, and computed, in float64.

    Keras 3.15 would round to single inside BatchNormalization, ``tanh``, Adafactor and others: its
    type promotion knows no ``float64`` on JAX.
    """
    import jax
    import keras
    from keras.src.backend.common import dtypes

    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    floatx = keras.config.floatx()
    policy = keras.config.dtype_policy()
    rounded = dtypes.BIT64_TO_BIT32_DTYPE.pop("float64", None)
    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)
        keras.config.set_floatx(floatx)
        jax.config.update("jax_enable_x64", x64)
        if rounded is not None:
            dtypes.BIT64_TO_BIT32_DTYPE["float64"] = rounded
