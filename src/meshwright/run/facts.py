"""What a run is about to do, as short texts that the processes of a group compare."""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint.randomness import read_randomness
from ..data.fingerprint import fingerprint
from ..jaxprs.listing import listed, texts_of
from ..launch.outlines import Outlined
from ..program import TrainState

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def fields_text(value: Any) -> str:
    """The fields of a dataclass as a JSON object."""
    fields = {f.name: repr(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return json.dumps({name: _ADDRESS.sub("", text) for name, text in fields.items()})


def weights_facts(state: TrainState) -> dict[str, str]:
    """Fingerprints of what this process holds of the weights; a shard that others hold is compared.

    They are made of about 16,384 elements of each shard, evenly spread.
    """
    facts = {}
    for path, array in {**state.params, **state.state}.items():
        for shard in array.addressable_shards if _is_plain(array) else ():
            where = ", ".join(f"{s.start or 0}:{s.stop or ''}" for s in shard.index)
            name = f"weight {path}[{where}]"
            if name not in facts:
                facts[name] = f"{tuple(array.shape)} {fingerprint(np.asarray(shard.data))}"
    return facts


def step_facts(step: Any, state: TrainState, batch: Any) -> dict[str, str]:
    """The fingerprint of a compiled step, by its lines; nothing where it cannot be traced."""
    if not hasattr(step, "trace"):
        return {}
    number = count = 0
    for text in texts_of(step.trace(state, batch).jaxpr):
        number, count = zlib.crc32(text.encode(), number), count + 1
    fact = f"program {number:08x} of {count} lines"

    def texts() -> list[tuple[str, str]]:
        return [
            (each.text, str(each)) for each in listed(_innermost(step).trace(state, batch).jaxpr)
        ]

    return {"step": Outlined(fact, texts)}


def _innermost(step: Any) -> Any:
    """The function that was compiled within others: JAX keeps lines of the source in its trace,
    and not where its equations become those of another program."""
    while hasattr(getattr(step, "__wrapped__", None), "trace"):
        step = step.__wrapped__
    return step


def seed_facts(more: Mapping[str, Any]) -> dict[str, str]:
    """The states of the generators of random numbers."""
    states = {**read_randomness(), **more}
    texts = {name: json.dumps(value) for name, value in states.items() if value is not None}
    return {f"seed ({n})": f"state {zlib.crc32(t.encode()):08x}" for n, t in texts.items()}


def _is_plain(array: Any) -> bool:
    return isinstance(array, jax.Array) and not jnp.issubdtype(array.dtype, jax.dtypes.extended)
