"""The arrays and layouts that Keras variables hold."""

from __future__ import annotations

from typing import Any


def stored_dtype(variable: Any) -> str:
    """The dtype a variable is stored in; ``variable.dtype`` is the compute dtype inside a layer."""
    return variable._dtype


def set_variable(variable: Any, value: Any, sharding: Any) -> None:
    """Give a Keras variable its value and the layout that later assignments keep."""
    variable._layout = sharding
    variable._value = value


def raw_value(variable: Any) -> Any:
    """The array a variable holds, without autocast or placeholder; ``None`` if it is empty."""
    return variable._value


def restore_value(variable: Any, value: Any) -> None:
    """Put back the array a variable held."""
    variable._value = value


def variable_layout(variable: Any) -> Any:
    """The layout, or sharding, that Keras has noted on a variable; ``None`` if it has none."""
    return variable._layout


def note_layout(variable: Any, layout: Any) -> None:
    """Note on a variable how it lies; its value stays where it is."""
    variable._layout = layout


def add_layout_property(read: Any) -> None:
    """Give every Keras variable a ``layout``, as TensorFlow's ``DVariable`` had one."""
    from keras.src.backend.jax.core import JaxVariable

    variables: Any = JaxVariable
    if not hasattr(variables, "layout"):
        variables.layout = property(read)


def own_variables(layer: Any) -> list[Any]:
    """The variables right inside a layer, in no layer of it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]
