"""The bar over the shards of an evaluation or a prediction."""

from __future__ import annotations

import keras

from ...program import Logs
from ...run.progress import is_live


class ShardBar:
    """Draws as Keras does: a bar for 1 and ``"auto"``, a line at the end for 2, nothing for 0.

    Outside of terminals and notebooks a bar is drawn once, at the end.
    """

    def __init__(self, verbose: str | int, num_shards: int) -> None:
        self._verbose = 1 if verbose == "auto" else int(verbose)
        self._count, self._num_drawn = num_shards, 0
        self._live = self._verbose == 1 and is_live()
        self._bar = keras.utils.Progbar(num_shards, verbose=self._verbose, unit_name="shard")

    def look(self, ended: int) -> None:
        """Draw the number of shards that have ended, if there is a terminal to draw in."""
        if self._live and self._num_drawn < ended < self._count:
            self._num_drawn = ended
            self._bar.update(ended)

    def end(self, logs: Logs | None = None) -> None:
        """All shards have ended, with these metrics."""
        if self._verbose:
            ordered = sorted((logs or {}).items(), key=lambda item: item[0] != "loss")
            self._bar.update(self._count, ordered, finalize=True)
