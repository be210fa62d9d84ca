"""Names for inferred dims, from the paths of a model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..layouts.dim_names import ANY
from .factors import Factor

Labels = tuple[Factor | None, ...]


@dataclass(frozen=True)
class Argument:
    """An argument of a step, for its dims to be named after.

    ``role`` is that of a :class:`~meshwright.ParamInfo`, or ``"input"``. ``names`` are those that
    the author gave the dims: equal ones lie alike. ``owner`` is the path of the parameter that a
    slot belongs to, and lies as; ``order`` is the place of a parameter in its model. An input that
    ``has_rows`` has a row of the batch for each index of its first dim.
    """

    path: str
    role: str = "parameter"
    names: tuple[str, ...] | None = None
    owner: str | None = None
    order: int = 0
    has_rows: bool = False


class Created(NamedTuple):
    """An array other than an argument: the layer that it is of, and the operation that makes it."""

    path: str
    kind: str
    labels: Labels


def names_of(
    arguments: Iterable[tuple[Argument, Labels]], created: Iterable[Created]
) -> dict[Factor, str]:
    """One name for each factor that some array is split along: unique, and the same in each run.

    The author's own names come first, then the batch, then parameters by their order.
    """
    arguments = _in_order(arguments)
    names = _Names()
    for argument, labels in arguments:
        for name, one in zip(argument.names or (), labels, strict=False):
            if name != ANY:
                names.name(one, name)
    inputs = [(a, labels) for a, labels in arguments if a.role == "input"]
    for _, labels in inputs[:1]:
        names.name(next(iter(labels), None), "batch")
    for role in ("parameter", "state", "slot"):
        for argument, labels in arguments:
            if argument.role == role:
                names.name_all(labels, _of_parameter(argument.path, len(labels)))
    for argument, labels in inputs:
        names.name_all(labels, [f"{argument.path}.dim{i}" for i in range(len(labels))])
    for path, kind, labels in created:
        if all(one is None or one in names.names for one in labels):
            continue
        where = f"{path}.{kind}" if path else kind
        names.name_all(labels, [f"{where}.dim{i}" for i in range(len(labels))])
    return names.names


def _in_order(arguments: Iterable[tuple[Argument, Labels]]) -> list[tuple[Argument, Labels]]:
    """In the model's order; within a layer arrays of more dims come first."""
    ordered = sorted(arguments, key=lambda entry: entry[0].order)
    layers: dict[str, int] = {}
    for argument, _ in ordered:
        layers.setdefault(_layer(argument.path), len(layers))
    return sorted(ordered, key=lambda entry: (layers[_layer(entry[0].path)], -len(entry[1])))


def _layer(path: str) -> str:
    """The layer of a parameter; the whole path where its own name is none of the usual ones."""
    layer, _, last = path.rpartition("/")
    return layer if layer and last in _WEIGHTS else path


_WEIGHTS = {
    *("bias", "beta", "gamma", "kernel", "scale", "weight", "weights", "b", "w"),
    *("embeddings", "embedding", "depthwise_kernel", "pointwise_kernel", "recurrent_kernel"),
    *("moving_mean", "moving_variance"),
}


class _Names:
    """The names of factors so far; the first one that a factor gets is kept."""

    def __init__(self) -> None:
        self.names: dict[Factor, str] = {}
        self._often: dict[str, int] = defaultdict(int)

    def name(self, one: Factor | None, name: str) -> None:
        if one is None or one in self.names:
            return
        self._often[name] += 1
        often = self._often[name]
        self.names[one] = name if often == 1 else f"{name}#{often}"

    def name_all(self, labels: Labels, names: Sequence[str]) -> None:
        for one, name in zip(labels, names, strict=True):
            self.name(one, name)


def _of_parameter(path: str, rank: int) -> list[str]:
    """``block/ffn/kernel`` has the dims ``block/ffn.in`` and ``block/ffn.out``."""
    layer, last = _layer(path), path.rpartition("/")[2]
    if last == "embeddings" and rank == 2:
        ends = ["vocab", "out"]
    elif rank > 3:  # the kernel of a convolution
        ends = [*(f"dim{i}" for i in range(rank - 2)), "in", "out"]
    else:
        ends = ["in", *(f"dim{i}" for i in range(1, rank - 1)), "out"][-rank:] if rank else []
    return [f"{layer}.{end}" for end in ends]


# Families


def families_of(
    sizes: Mapping[str, int], together: Iterable[Sequence[str]], created: Collection[str] = ()
) -> dict[str, str]:
    """The family of each name: the name without the numbers of blocks and layers.

    ``together`` are names that one array has: those are never of one family, and keep the last
    number of their layers, all of those, or all of their numbers. ``created`` are names of dims
    that activations alone have: blocks that no name tells apart, as those of a plain function, have
    them in order.

    >>> families_of({"block_0/ffn.out": 8, "block_1/ffn.out": 8}, [])
    {'block_0/ffn.out': 'block/ffn.out', 'block_1/ffn.out': 'block/ffn.out'}
    >>> families_of({"dense.out": 8, "dense_1.out": 8}, [("dense.out", "dense_1.out")])
    {'dense.out': 'dense.out', 'dense_1.out': 'dense_1.out'}
    >>> sizes = {"conv2_block1_1_conv.out": 8, "conv2_block1_2_conv.out": 8}
    >>> families_of(sizes, [sizes])  # block 2 of the stage has the same two
    {'conv2_block1_1_conv.out': 'conv_block_1_conv.out', 'conv2_block1_2_conv.out': \
'conv_block_2_conv.out'}
    >>> families_of({"block2a_dw.out": 8, "block2b_dw.out": 8}, [])
    {'block2a_dw.out': 'block_dw.out', 'block2b_dw.out': 'block_dw.out'}
    >>> families_of({"0.out": 8, "1.out": 8}, [])
    {'0.out': '*.out', '1.out': '*.out'}
    >>> families_of({"reshape.dim3": 8, "reshape.dim3#2": 8}, [], ["reshape.dim3#2"])
    {'reshape.dim3': 'reshape.dim3', 'reshape.dim3#2': 'reshape.dim3'}
    """
    beside: dict[str, set[str]] = defaultdict(set)
    for names in together:
        for name in names:
            beside[name].update(names)
    families: dict[str, str] = {}
    unnamed = list(sizes)
    for level in (_without_numbers, _with_last_number, _with_own_numbers):
        groups: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name in unnamed:
            in_order = name.partition("#")[0] if name in created else name
            groups[level(in_order), sizes[name]].append(name)
        unnamed = []
        for (family, _), names in groups.items():
            if any(len(beside[name].intersection(names)) > 1 for name in names):
                unnamed += names
            else:
                families.update(dict.fromkeys(names, family))
    families.update({name: name for name in unnamed})
    return {name: families[name] for name in sizes}


def _without_numbers(name: str) -> str:
    path, dot, end = name.partition(".")
    plain = "/".join(filter(None, map(_plain, path.split("/"))))
    return (plain or "*") + dot + end  # a path of numbers alone, as in a list of layers


def _with_own_numbers(name: str) -> str:
    path, dot, end = name.partition(".")
    *blocks, layer = path.split("/")
    return "/".join([*filter(None, map(_plain, blocks)), layer]) + dot + end


def _with_last_number(name: str) -> str:
    """With the last number of the layer only: in many nets that of a layer within its block."""
    path, dot, end = _with_own_numbers(name).partition(".")
    starts = [match.start() for match in _NUMBER.finditer(path)]
    begin = starts[-1] if starts else len(path)
    return _plain(path[:begin]) + path[begin:] + dot + end


def _plain(part: str) -> str:
    return _NUMBER.sub("", part).strip("_")


_NUMBER = re.compile(r"(_?\d+|(?<=block)\d+[a-z])(?=_|$)")  # EfficientNet has a "block2a"
