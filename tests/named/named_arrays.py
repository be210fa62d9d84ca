"""Small named arrays, meshes for them, and where rules put them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import meshwright as mw
import meshwright.named as mn


def mesh(**axes: int) -> mw.Mesh:
    return mw.create_mesh(axes or {"rows": 4, "cols": 2})


def counting(*sizes: int) -> Any:
    return jnp.arange(1.0, 1 + np.prod(sizes)).reshape(sizes)


def lies_by(rules: mn.BoundRules, x: mn.NamedArray) -> bool:
    return x.array.sharding.is_equivalent_to(rules.layout(x.dims).sharding, x.array.ndim)
