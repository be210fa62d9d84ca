"""Delay compensation (DC-ASGD; Zheng and others, 2017): what it knows of the past.

A gradient that was taken at old values is corrected by ``factor * g * g * (value - old value)``.
With ``adaptive`` the factor is divided by the root of a running mean of the gradient's square.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .shards import Shard

MOST_PEERS = 64  # of which is kept what they read, so that those who are gone are forgotten
KEEP = 0.95  # of the mean square, as in the paper
EPSILON = 1e-7

_Rows = tuple[np.ndarray, np.ndarray]  # where they lie, and their values


@dataclass(frozen=True)
class Delay:
    """How one gradient is corrected: ``before`` is what it was taken at.

    ``squares`` is the running mean, which the correction moves on; ``None``: the factor is as it
    is. Both have the shape of the gradient.
    """

    factor: float
    before: np.ndarray
    squares: np.ndarray | None = None

    def corrected(self, value: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """The gradient as it would about be at ``value``, in memory of its own."""
        move = value - self.before
        move *= gradient
        move *= gradient
        move *= gradient.dtype.type(self.factor)
        squares = self.squares
        if squares is not None:
            squares *= KEEP
            squares += (1 - KEEP) * gradient * gradient
            move /= np.sqrt(squares + EPSILON)
        move += gradient
        return move

    def part(self, here: slice) -> Delay:
        """The same for a part of flat arrays."""
        squares = None if self.squares is None else self.squares.reshape(-1)[here]
        return Delay(self.factor, self.before.reshape(-1)[here], squares)


class Backups:
    """What each peer last read of some variables: where its next gradient is taken."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._by_peer: dict[str, dict[str, np.ndarray]] = {}  # the one heard last at the end
        self._rows: dict[str, dict[str, _Rows]] = {}  # the last lookup of each table
        self._squares: dict[str, np.ndarray] = {}

    def keep_all(self, names: Iterable[str]) -> None:
        """From now on, keep what is read of these variables."""
        self.names.update(names)

    def keep(self, peer: str, shard: Shard) -> None:
        """A peer reads a variable."""
        if shard.name not in self.names:
            return
        own = _own(self._by_peer, peer)
        if shard.name in own and own[shard.name].shape == shard.shape:
            np.copyto(own[shard.name], shard.values)
        else:
            own[shard.name] = shard.values.copy()

    def keep_rows(self, peer: str, shard: Shard, rows: np.ndarray, values: np.ndarray) -> None:
        """A peer has looked up these rows of a table."""
        if shard.name in self.names:
            positions = np.array(shard.positions(rows))
            _own(self._rows, peer)[shard.name] = (positions, values.copy())

    def get(self, peer: str, name: str) -> np.ndarray | None:
        """What the peer read, if that was kept."""
        return self._by_peer.get(peer, {}).get(name)

    def delay(self, peer: str, shard: Shard, factor: float, adaptive: bool) -> Delay | None:
        """How a gradient of the whole shard is corrected, if it is known what it was taken at."""
        before = self.get(peer, shard.name)
        if before is None or before.shape != shard.shape:
            return None
        if not adaptive:
            return Delay(factor, before)
        squares = self._mean(shard)
        return Delay(factor, before, squares[: len(before)] if before.ndim else squares)

    def corrected_rows(
        self,
        peer: str,
        shard: Shard,
        rows: np.ndarray,
        values: np.ndarray,
        factor: float,
        adaptive: bool,
    ) -> np.ndarray:
        """The gradient of rows, corrected where it is of the peer's last lookup, each row once."""
        looked_up, before = self._rows.get(peer, {}).get(shard.name, (None, None))
        if looked_up is None or before is None or not np.array_equal(looked_up, rows):
            return values
        if len(np.unique(rows)) < len(rows):
            return values
        values = values.astype(shard.dtype, copy=False)
        squares = self._mean(shard)[rows] if adaptive else None
        values = Delay(factor, before, squares).corrected(shard.full()[rows], values)
        if squares is not None:
            self._mean(shard)[rows] = squares
        return values

    def _mean(self, shard: Shard) -> np.ndarray:
        full, mean = shard.full(), self._squares.get(shard.name)
        if mean is None or mean.shape != full.shape:
            fresh = np.zeros_like(full)
            if mean is not None and mean.ndim:
                fresh[: len(mean)] = mean  # a hash table has grown
            self._squares[shard.name] = mean = fresh
        return mean


def _own(by_peer: dict[str, Any], peer: str) -> dict[str, Any]:
    """What is kept of a peer, who was heard last now."""
    own = by_peer.pop(peer, {})
    by_peer[peer] = own
    if len(by_peer) > MOST_PEERS:
        del by_peer[next(iter(by_peer))]
    return own
