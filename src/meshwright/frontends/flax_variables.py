"""Variables of Flax, each of which holds one array, and the names of its dims that a model gives.

Flax took its logical axes from Mesh-TensorFlow: a model names the dims of its weights, and rules
beside it say over which axes of a mesh a dim is split. The names are all that is read here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import jax

from ..layouts.dim_names import ANY, DimNames, dims
from ..layouts.dim_rules import is_name
from .trees import Tree

# Linen's variables have names as an attribute; those of NNX have had these keys for them.
_KEYS = ("out_sharding", "sharding_names", "sharding")
_KINDS = (("flax.core.meta", "AxisMetadata"), ("flax.nnx", "Variable"))


def tree_of(tree: Any) -> Tree:
    """The paths of a tree's arrays, without the ends that variables of Flax add to them."""
    return Tree(tree, is_variable, _names_of)


def is_variable(node: Any) -> bool:
    """Whether a node of a tree is such a variable, and holds one array."""
    kinds = tuple(
        getattr(sys.modules[module], name) for module, name in _KINDS if module in sys.modules
    )
    return isinstance(node, kinds) and len(jax.tree.leaves(node)) == 1


def _names_of(node: Any) -> DimNames | None:
    """What the model calls the dims; none where an optimizer has made another array of it."""
    if not is_variable(node):
        return None
    (array,) = jax.tree.leaves(node)
    names = getattr(node, "names", None) or _metadata(node)
    if not isinstance(names, tuple | jax.sharding.PartitionSpec) or len(names) != array.ndim:
        return None
    return dims(_plain(names))


def _metadata(node: Any) -> Any:
    metadata = node.get_metadata() if hasattr(node, "get_metadata") else {}
    return next((metadata[key] for key in _KEYS if metadata.get(key)), None)


def _plain(names: Iterable[Any]) -> list[str]:
    """The names that dims can have here; of two dims with one name, rules are for the first."""
    plain: list[str] = []
    for name in names:
        can_be = isinstance(name, str) and is_name(name) and name not in plain
        plain.append(name if can_be else ANY)
    return plain
