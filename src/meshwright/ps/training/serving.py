"""A compiled Keras model whose variables lie on the servers while it trains.

``put`` brings the model's values and the optimizer's slots there, ``take`` brings them back.
Between fits the model is an ordinary Keras model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from ... import _compat
from ...errors import ModelError
from ...frontends.keras.program import KerasVariables, keras_program
from ...program import Logs
from ...step.local import Local
from ..shared.client import Servers
from ..shared.consistency import Backup, Sync, gradient_options
from ..shared.placing import VariableSpec
from ..shared.slots import Slots, load_slots, optimizer_heads, read_slots, set_rate
from ..worker.updates import Update
from .compression import Compression
from .embeddings import KerasLookups, building
from .export import export_step, shapes
from .metrics import base_of, check_metrics, logs_of
from .optimizers import clip_of, outer_of, rate_of, table_optimizers, take_apart
from .server_variables import OnServers, Subject, layout_on_workers
from .worker_step import TrainStep

# The optimizer of state that moves: a step's move is a gradient, and is gone as it is.
_AS_IT_IS = {"class_name": "SGD", "config": {"learning_rate": 1.0}}


class Served(OnServers):
    """One model and its variables on the servers of one strategy.

    Raises :class:`~meshwright.ModelError` for what cannot be trained so.
    """

    def __init__(self, subject: Subject, local: Local | None = None, any_rows: bool = True) -> None:
        strategy, model = subject.strategy, subject.model
        batches, tables = subject.batches, subject.tables
        self._local = local
        with building():
            _compat.build_for(model, batches[0])
        variables = KerasVariables.of(model)
        check_metrics(model.metrics)
        in_rounds = isinstance(strategy.consistency, Sync | Backup)
        self._apart = (  # what the servers do of the model's optimizer, or the outer one
            outer_of(local, model.optimizer)
            if local is not None
            else take_apart(model.optimizer, variables.params, in_rounds=in_rounds)
        )
        self.lookups = KerasLookups(model, variables, tables.embeddings)
        self._own_optimizers = table_optimizers(
            self.lookups,
            tables.optimizer,
            local,
            loss_scale=getattr(model.optimizer, "loss_scale_factor", None),
            in_rounds=in_rounds,
        )
        base = base_of(model, variables)
        layout = layout_on_workers(strategy, model, variables, self.lookups)
        if layout is not None:
            layout.warn_of_rows(shapes(batches[0]))
        exported = export_step(
            keras_program(model, variables),
            batches,
            lookups=self.lookups,
            clip=None if local else clip_of(self._apart, self._own_optimizers),
            base=base,
            any_rows=any_rows,
            local=local is not None,
            platforms=strategy.worker_platforms,
            layout=layout,
        )
        super().__init__(strategy, model, variables, self.lookups, exported, counts=True)
        self.epoch = 0  # the key of the row that counts the metrics now
        self._written: dict[int, Any] = {}  # id of a variable -> the value that `take` gave it
        self._rates = self._rates_now()

    @property
    def tables_away(self) -> dict[str, VariableSpec]:
        """The tables whose rows or slots the model itself does not have, by their names."""
        inside = self._in_model(self._trained)
        return {name: spec for name, spec in self.specs.tables.items() if name not in inside}

    # What a step needs

    def step(self, key: str, compression: Compression | None, fresh: bool) -> TrainStep:
        """The step that workers run."""
        slots: dict[str, np.ndarray] = {}
        if self._local:
            slots = {path: np.asarray(slot.value) for path, slot in self.variables.slots.items()}
        return TrainStep(
            key,
            self.exported,
            self.specs,
            self.seeds(),
            compression,
            fresh,
            self._local is not None,
            slots,
        )

    # To the servers

    def put(self) -> None:
        """Give the servers the model's values, the optimizer and its slots."""
        self._check_groups()
        trained = self._trained
        undecayed = [s for p, s in trained.items() if p in self._apart.without_decay]
        compensation = "compensation" in gradient_options(self._strategy.consistency)
        heads = optimizer_heads(
            self._apart.config,
            list(trained.values()),
            self._prefix,
            without_decay=undecayed,
            compensation=compensation,
        )
        moving = [s for s in self.specs.moving.values() if np.dtype(s.dtype).kind == "f"]
        moves = optimizer_heads(_AS_IT_IS, moving, f"{self._prefix}/moves")
        self.put_values()
        by_table = [
            head
            for name, own in self._own_optimizers.items()
            for head in optimizer_heads(
                own.apart.config,
                [self.specs.tables[name]],
                self._group_of(name),
                compensation=compensation,
            ).items()
        ]
        for server, head in [*heads.items(), *moves.items(), *by_table]:
            self._strategy.optimizer(head, server)
        if not self._local:
            slots, steps, own = self._slots(), self._iterations(), self._in_model(trained)
            self._on_servers(lambda servers: load_slots(servers, own, slots, steps))
        self._note()

    def _check_groups(self) -> None:
        """Raise :class:`~meshwright.ModelError` for tables that another optimizer trains so far."""
        groups_before: dict[str, str] = vars(self._strategy).setdefault("groups_of_tables", {})
        groups = {
            name: self._group_of(name) if name in self._own_optimizers else self._prefix
            for name in self.specs.tables
        }
        if changed := [
            name
            for name, group in groups.items()
            if groups_before.get(self.specs.tables[name].name, group) != group
        ]:
            raise ModelError(
                f"the optimizer of these tables cannot change from the model's to one of their own "
                f"or back: {', '.join(changed)}. The servers hold its slots. Train on with the "
                "same optimizer, or use a new strategy."
            )
        groups_before.update(
            {self.specs.tables[name].name: group for name, group in groups.items()}
        )

    def put_changed(self) -> bool:
        """Give the servers what a callback has changed in the model; returns whether it has."""
        self._put_rate()
        changed = [
            self._assign(path, spec)
            for path, spec in self._own().items()
            if self._has_changed(self._variable(path))
        ]
        if changed:
            self._on_servers(lambda servers: servers.push(changed))
            self._note()
        return bool(changed)

    def _has_changed(self, variable: Any) -> bool:
        return self._written.get(id(variable)) is not _compat.raw_value(variable)

    def _put_rate(self) -> None:
        """A callback may have set a learning rate."""
        before, self._rates = self._rates, self._rates_now()
        if self._local:
            return  # it is the inner optimizer's
        for group, (rate, specs) in self._rates.items():
            if rate is not None and rate != before[group][0]:
                self._on_servers(lambda s, r=rate, of=specs, g=group: set_rate(s, r, of, g))

    def _rates_now(self) -> dict[str, tuple[float | None, list[VariableSpec]]]:
        """The learning rate of each group of variables on the servers, and the variables."""
        rates = {
            self._group_of(name): (own.rate, [self.specs.tables[name]])
            for name, own in self._own_optimizers.items()
        }
        return {
            self._prefix: (rate_of(self.model.optimizer), list(self._trained.values())),
            **rates,
        }

    def average_tables(self) -> bool:
        """Put averages into the tables that Keras cannot, as it does where ``fit`` ends.

        Returns whether there are any.
        """
        away = self.tables_away.items()
        averaged = [Update(spec, "average", ()) for name, spec in away if self._is_averaged(name)]
        if averaged:
            self._on_servers(lambda servers: servers.push(averaged))
        return bool(averaged)

    def _is_averaged(self, table: str) -> bool:
        own = self._own_optimizers.get(table)
        return bool((self.model.optimizer if own is None else own.optimizer).use_ema)

    # From the servers

    def take(self, slots: bool = True) -> None:
        """Give the model the servers' values, and the optimizer its slots."""
        own = self._own()
        values = self._on_servers(lambda servers: servers.read(list(own.values())))
        for path, value in zip(own, values, strict=True):
            self._variable(path).assign(value)
        if slots:
            self.take_slots()
        self._note()

    def take_slots(self) -> None:
        """Give the optimizer its slots; inner slots of local steps stay on the workers."""
        if self._local:
            return
        trained = self._in_model(self._trained)
        slots, steps = self._on_servers(lambda servers: read_slots(servers, trained))
        for path, (owner, kind) in self._owners().items():
            value = slots.get(owner, {}).get(kind)
            if value is not None:
                self.variables.slots[path].assign(value)
        for path, kind in self._shared_scalars().items():
            self.variables.slots[path].assign(next(iter(slots.values()))[kind])
        self._iteration.assign(steps)  # how many steps it has made

    def logs(self) -> Logs:
        """The metrics of all batches since :meth:`begin_counts`."""
        return self.logs_from(self.counts())

    def counts(self) -> np.ndarray:
        """What the metrics have counted since then."""
        assert self.specs.counts is not None
        spec, epoch = self.specs.counts, np.array([self.epoch])
        return self._on_servers(lambda servers: servers.lookup(spec, epoch))[0]

    def logs_from(self, counts: np.ndarray) -> Logs:
        """The metrics as Keras shows them, from counts."""
        return logs_of(self.model, self.variables, self.exported.parts, counts)

    def begin_counts(self, before: Sequence[float] | None = None) -> None:
        """Count from 0, in a new row, or continue the counts of a checkpoint."""
        assert self.specs.counts is not None
        self.epoch = int.from_bytes(os.urandom(7), "little")
        if before is not None and len(before) == self.specs.counts.shape[1]:
            row = np.array([self.epoch]), np.array([before], np.float64)
            update = Update(self.specs.counts, "rows_assign", row)
            self._on_servers(lambda servers: servers.push([update]))

    # How it is done

    @property
    def _trained(self) -> dict[str, VariableSpec]:
        """What the model's own optimizer trains, by path."""
        tables = self.specs.tables.items()
        shared = {name: spec for name, spec in tables if name not in self._own_optimizers}
        return {**self.specs.params, **shared}

    def _group_of(self, table: str) -> str:
        """What the servers call a table that has an optimizer of its own, as a group."""
        return f"{self._prefix}/{table}/optimizer"

    def _note(self) -> None:
        variables = [self._variable(path) for path in self._own()]
        self._written = {id(variable): _compat.raw_value(variable) for variable in variables}

    def _owners(self) -> dict[str, tuple[str, str]]:
        """Path of each slot that belongs to a parameter -> that parameter, and its kind."""
        v = self.variables
        infos = {path: v.infos[id(slot)] for path, slot in v.slots.items()}
        return {
            path: (info.owner, path.rpartition("/")[2])
            for path, info in infos.items()
            if info.owner is not None
        }

    @property
    def _iteration(self) -> Any:
        """What the optimizer counts its steps with; its ``iterations`` may be a part of them."""
        return next(v for v in self.model.optimizer.variables if v.name == "iteration")

    def _slots(self) -> Slots:
        slots: Slots = {}
        for path, (owner, kind) in self._owners().items():
            value = np.asarray(self.variables.slots[path].value)
            slots.setdefault(owner, {})[kind] = value
        for path, kind in self._shared_scalars().items():
            for own in slots.values():  # on the servers, every part has one of its own
                own[kind] = np.asarray(self.variables.slots[path].value)
        return slots

    def _shared_scalars(self) -> dict[str, str]:
        """Path of each number that an optimizer keeps for all parameters -> its kind on servers."""
        if type(self.model.optimizer) is not keras.optimizers.Nadam:
            return {}
        v = self.variables
        lone = [path for path, slot in v.slots.items() if v.infos[id(slot)].owner is None]
        model_own = ("/iteration", "/learning_rate")
        return {path: "u_product" for path in lone if not path.endswith(model_own)}

    def _iterations(self) -> int:
        return int(np.asarray(self._iteration.value))

    def _on_servers(self, do: Callable[[Servers], Any]) -> Any:
        return self._strategy.with_servers(do)
