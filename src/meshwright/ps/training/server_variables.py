"""Where the variables of a model lie on the servers, and what they are called there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...frontends.keras.program import KerasVariables
from ..options import Tables
from ..shared.placing import VariableSpec, placed
from ..worker.updates import Update
from .embeddings import KerasLookups
from .exported import Exported
from .signature import Signature
from .worker_layout import WorkerLayout, worker_layout
from .worker_step import Seeds, Specs, moved


@dataclass(frozen=True, eq=False)
class Subject:
    """A Keras model under a strategy, which makes variables and lends its servers.

    ``batches`` are one of each shape that is known beforehand.
    """

    strategy: Any
    model: Any
    batches: Sequence[Any]
    tables: Tables

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """Those of the batches."""
        return tuple(map(Signature.of, self.batches))


class ServerVariables:
    """Places the variables and tables of one model on the servers of a strategy.

    ``prefix`` begins all names. It is the model's name, and a number where another model of that
    name has other weights there. The same weights lie at the same place whatever the model is
    compiled with, so that a table outlives a new optimizer, and predictions find what was trained.
    """

    def __init__(
        self, strategy: Any, model: str, variables: KerasVariables, lookups: KerasLookups
    ) -> None:
        self._strategy, self._model = strategy, model
        self._variables, self._layers = variables, lookups.served
        self.prefix = self._prefix()

    def of(self, paths: Sequence[str], part: Mapping[str, Any]) -> dict[str, VariableSpec]:
        """The variables of these paths, made where they are not there."""
        return {path: self.make(path, np.asarray(part[path].value)) for path in paths}

    def of_tables(self, names: Sequence[str]) -> dict[str, VariableSpec]:
        """Tables by their names: parameters of the model, and those that only servers have."""
        params = self._variables.params
        return {
            name: self.of([name], params)[name] if name in params else self._table(name)
            for name in names
        }

    def make(self, path: str, value: np.ndarray) -> VariableSpec:
        """A variable with this first value."""
        name = f"{self.prefix}/{path}"
        return self._strategy.variable(value, dtype=value.dtype, name=name).spec

    def counts(self, count: int) -> VariableSpec:
        """A table in which the metrics of each epoch are summed, in a row of its own."""
        name = f"{self.prefix}/metrics/{count}"
        spec = self._strategy.place(name, (0, count), "float64", is_hash=True)
        self._strategy.create(spec, {"kind": "zeros", "params": {}, "seed": None})
        return spec

    def _table(self, name: str) -> VariableSpec:
        layer = self._layers[name]
        is_hash = layer.size == "hash"
        shape = (0 if is_hash else int(layer.size), layer.dim)
        spec = self._spread(f"{self.prefix}/{name}", shape, is_hash)
        init = {"kind": layer.initializer, "params": {}, "seed": layer.seed}
        self._strategy.create(spec, init)
        return spec

    def _spread(self, name: str, shape: tuple[int, int], is_hash: bool) -> VariableSpec:
        """A table over all servers, unless the strategy has a partitioner that says otherwise."""
        if self._strategy.partitioner is not None and not is_hash:
            return self._strategy.place(name, shape, "float32")
        servers = self._strategy.num_servers
        num_shards = servers if is_hash else min(servers, shape[0])
        loads = [0] * servers
        return placed(
            name, shape, "float32", num_shards=num_shards, loads_bytes=loads, is_hash=is_hash
        )

    def _prefix(self) -> str:
        v = self._variables
        weights = [v.infos[id(variable)] for variable in (*v.params.values(), *v.state.values())]
        shapes = frozenset((info.path, tuple(info.dims)) for info in weights)
        tables = frozenset((layer.name, layer.size, layer.dim) for layer in self._layers.values())
        served: dict[str, Any] = vars(self._strategy).setdefault("models_served", {})
        for number in itertools.count(1):
            prefix = self._model if number == 1 else f"{self._model}~{number}"
            if served.setdefault(prefix, (shapes, tables)) == (shapes, tables):
                return prefix
        raise AssertionError


class OnServers:
    """A model's exported step, and its variables on the servers of a strategy.

    ``counts`` says whether there is also a table that metrics are summed in.
    """

    def __init__(
        self,
        strategy: Any,
        model: Any,
        variables: KerasVariables,
        lookups: KerasLookups,
        exported: Exported,
        *,
        counts: bool,
    ) -> None:
        self._strategy, self.model = strategy, model
        self.variables, self.exported = variables, exported
        places = ServerVariables(strategy, model.name, variables, lookups)
        parts, count = exported.parts, exported.parts.num_counts
        self._prefix = places.prefix
        self.specs = Specs(
            places.of(parts.params, variables.params),
            places.of(parts.moving, variables.state),
            places.of(parts.frozen, variables.state),
            places.of_tables([table.name for table in parts.tables]),
            places.counts(count) if counts else None,
        )

    def belongs_to(self, strategy: Any) -> bool:
        """Whether its variables are this strategy's."""
        return self._strategy is strategy

    def put_values(self) -> None:
        """Give the servers the model's values alone."""
        values = [self._assign(path, spec) for path, spec in self._own().items()]
        self._strategy.with_servers(lambda servers: servers.push(values))

    def seeds(self) -> dict[str, np.ndarray]:
        """The model's seeds as they are now."""
        state = self.variables.state
        return {path: np.asarray(state[path].value) for path in self.exported.parts.seeds}

    def moved(self, seeds: Seeds, batches: int, *, held_out: bool = False) -> Seeds:
        """Seeds after a number of batches: of training, or of evaluation and prediction."""
        parts = self.exported.parts
        draws = parts.draws_held_out if held_out else parts.draws
        by_path = zip(parts.seeds, draws, strict=True)
        return {path: moved(seeds[path], number * batches) for path, number in by_path}

    def move_on(self, batches: int, *, held_out: bool = False) -> None:
        """Advance the model's seeds by a number of batches."""
        for path, seed in self.moved(self.seeds(), batches, held_out=held_out).items():
            self.variables.state[path].assign(seed)

    def _own(self) -> dict[str, VariableSpec]:
        """The variables that the model has too, by path."""
        specs = self.specs
        return {**specs.params, **specs.moving, **specs.frozen, **self._in_model(specs.tables)}

    def _in_model(self, specs: Mapping[str, VariableSpec]) -> dict[str, VariableSpec]:
        return {path: spec for path, spec in specs.items() if path in self.variables.params}

    def _variable(self, path: str) -> Any:
        v = self.variables
        return v.params[path] if path in v.params else v.state[path]

    def _assign(self, path: str, spec: VariableSpec) -> Update:
        return Update(spec, "assign", (np.asarray(self._variable(path).value),))


def layout_on_workers(
    strategy: Any, model: Any, variables: KerasVariables, lookups: KerasLookups
) -> WorkerLayout | None:
    """How a model's step lies on the devices of each worker; ``None`` where that is one."""
    tables = [table.name for table in lookups.tables]
    worker = strategy.worker
    return None if worker is None else worker_layout(worker, model, variables, tables)
