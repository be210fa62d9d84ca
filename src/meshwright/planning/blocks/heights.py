"""How much a step with few blocks holds when, and how much it would hold with all of them.

The most may be held at another moment with many blocks than with few. So three stretches of a step
are separate: till the backward pass reaches a block, the last block's backward pass, and what
comes from the first block's backward pass on. In the first two each block more adds what its
forward pass keeps, in the third what its backward pass leaves, its gradients for the most part.

What is held is linear in the number of blocks within a stretch, as all blocks but the first and the
last are equal and each is passed once. It is not linear over the whole step: with few blocks the
peak may be in the last stretch (large gradients), with many in the second (what is kept grows
faster). So each stretch is extended by itself, and the largest of the three is the peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...hlo.arithmetic import work_of
from ...hlo.origins import Sources, op_name_of
from ...hlo.peak import Alive, LiveTensor, in_words
from ...hlo.text import Computation, Instruction, Module, parse
from ...jaxprs.scopes import phase_of
from .marks import marked, without

BlockTensors = tuple[tuple[LiveTensor, int | None], ...]  # arrays, and the block of each
_Place = tuple[tuple[Computation, int], ...]  # an instruction, after the loops around it
_Product = tuple[int, int | None, str]  # which moment it is, its block, its pass


@dataclass(frozen=True)
class Height:
    """The most bytes of temporary arrays that a stretch of a step holds, and what they are."""

    nbytes: int
    tensors: BlockTensors = field(default=(), repr=False)


@dataclass(frozen=True)
class Heights:
    """Those of each stretch; ``turning`` is the last block's backward pass, ``None`` where that is
    the first block as well. ``kept_bytes`` are held between the first block and the next, and
    behind the last, ``left_bytes`` when the backward pass leaves the first one.

    Blocks may be computed again: ``again_bytes`` are what ``kept_bytes`` are, once each has been.
    ``soon`` says that the first one is before the last one's backward pass begins, so that what
    was to be thrown away is held after all; XLA for CPU schedules steps so."""

    before: Height
    turning: Height | None
    after: Height
    kept_bytes: tuple[int, int]
    left_bytes: int
    again_bytes: tuple[int, int] = (0, 0)
    soon: bool = False

    @property
    def most(self) -> int:
        return max(height.nbytes for height in (self.before, self.turning, self.after) if height)


@dataclass(frozen=True)
class Peak:
    """The most that is held with all blocks: ``tensors`` with two of them, of which the block
    ``many`` stands for all others but one. Each more of them adds ``more_bytes``."""

    nbytes: int
    tensors: BlockTensors = field(repr=False)
    many: int
    more_bytes: int = 0


def heights_of(text: str) -> Heights | None:
    """Those of a compiled step whose blocks are marked; ``None`` where none is to be seen."""
    return _Walk(parse(text)).heights()


def peak_with(one: Heights, two: Heights, count: int) -> Peak:
    """The peak with ``count`` blocks, from those with one and with two.

    >>> one = Heights(Height(50), None, Height(60), kept_bytes=(30, 30), left_bytes=10)
    >>> two = Heights(Height(90), Height(95), Height(100), kept_bytes=(28, 60), left_bytes=50)
    >>> peak_with(one, two, 4).nbytes, peak_with(one, two, 9).nbytes
    (180, 380)
    """
    below, after = _bytes_below(one, two), _bytes_after(one, two)
    turning = two.turning or two.before
    stretches = (two.before, 0, below), (turning, 0, below), (two.after, 1, after)
    most = (
        Peak(stretch.nbytes + more * (count - 2), stretch.tensors, many, more)
        for stretch, many, more in stretches
    )
    return max(most, key=lambda peak: peak.nbytes)


def _bytes_below(one: Heights, two: Heights) -> int:
    """What a block keeps for its backward pass. A lone block is the first and the last at once, and
    the compiler orders either a little otherwise than one between: of three views the middle one.
    """
    (_, alone), (first, last) = (
        height.again_bytes if two.soon else height.kept_bytes for height in (one, two)
    )
    views = (last - alone, last - first, two.before.nbytes - one.before.nbytes)
    return max(0, sorted(views)[1])


def _bytes_after(one: Heights, two: Heights) -> int:
    """What a block's backward pass leaves. Of two views the smaller one: the other has something
    in it that is held for a moment only."""
    views = (two.left_bytes - one.left_bytes, two.after.nbytes - one.after.nbytes)
    return max(0, min(views))


class _Walk:
    """Goes through a program in the order of its schedule, into the loops that hold blocks."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.alive = Alive(module)
        self.sources = Sources(module)

    def heights(self) -> Heights | None:
        entry = self.module.computations[self.module.entry]
        moments = list(self._moments(entry, (), 0))
        sizes = [nbytes for _, nbytes in moments]
        products = self._products(moments)
        # What is computed again may stand anywhere: compilers make one of it and the first time.
        turns = [(at, block) for at, block, phase in products if phase == "backward"]
        blocks = [block for _, block in turns if block is not None]
        if 0 not in blocks:
            return None
        latest = max(blocks)
        last, first = (next(at for at, block in turns if block == some) for some in (latest, 0))
        soon = any(at < last and (some, phase) == (0, "recompute") for at, some, phase in products)

        def behind(*passes: str) -> tuple[int, int]:
            own = ([p for p in products if p[1] == some and p[2] in passes] for some in (0, latest))
            first, later = (min(sizes[_behind(moment, products, last)]) for moment in own)
            return first, later

        return Heights(
            before=self._most(moments[:last]),
            turning=self._most(moments[last:first]) if last < first else None,
            after=self._most(moments[first:]),
            kept_bytes=behind("forward"),
            left_bytes=sizes[max(at for at, block in turns if block == 0)],
            again_bytes=behind("forward", "recompute"),
            soon=soon,
        )

    def _products(self, moments: list[tuple[_Place, int]]) -> list[_Product]:
        products_at = [(at, self._product(*place[-1])) for at, (place, _) in enumerate(moments)]
        return [(at, *product) for at, product in products_at if product is not None]

    def _most(self, moments: list[tuple[_Place, int]]) -> Height:
        if not moments:
            return Height(0)
        place, nbytes = max(moments, key=lambda moment: moment[1])
        alive = [self.alive.at(*point, within=point is place[-1]) for point in place]
        tensors = in_words([one for some in alive for one in some], self.sources)
        return Height(
            nbytes, tuple((_unmarked(tensor), marked(tensor.origin.path)) for tensor in tensors)
        )

    def _moments(
        self, inside: Computation, around: _Place, below: int
    ) -> Iterator[tuple[_Place, int]]:
        for at, (instruction, nbytes, within) in enumerate(self.alive.at_each(inside)):
            body = self._body_with_blocks(instruction)
            place = (*around, (inside, at))
            if body is None:
                yield place, below + nbytes + within
            else:
                yield from self._moments(body, place, below + nbytes)

    def _body_with_blocks(self, instruction: Instruction) -> Computation | None:
        if instruction.opcode not in ("while", "call", "conditional"):
            return None
        for body in (self.module.computations[name] for name in instruction.called):
            if any(marked(op_name_of(one)) is not None for one in body.instructions):
                return body
        return None

    def _product(self, inside: Computation, at: int) -> tuple[int | None, str] | None:
        """The block and the pass that an instruction is of, if there is a product in it."""
        instruction = inside.instructions[at]
        product = work_of(instruction, inside, self.module).heaviest
        if product is None:
            return None
        path = (
            op_name_of(product)
            or op_name_of(instruction)
            or self.sources.of(inside, instruction.name)[1]
        )
        return marked(path), phase_of(path)


def _behind(own: list[_Product], products: list[_Product], end: int) -> slice:
    """From the last of a block's own products before ``end`` to the next product of any: what
    comes next may begin there."""
    last = max((at for at, _, _ in own if at < end), default=0)
    return slice(last, min((at for at, _, _ in products if last < at < end), default=end))


def _unmarked(tensor: LiveTensor) -> LiveTensor:
    return replace(tensor, origin=replace(tensor.origin, path=without(tensor.origin.path)))
