"""``mw.RayLauncher``: the processes of a group as actors of a Ray cluster.

Ray chooses the hosts, by a placement group. In each actor runs the launcher's own agent with one
process below it, so that a failure is named as under ``meshwright launch``: Ray itself notices
only actors that die, not processes that freeze.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ClusterError, ProcessError, TaskError
from ..extras import require
from .addresses import join_address
from .cluster import DescribedCluster
from .group_options import GroupOptions
from .keeper import TaskKeeper
from .keys import Keys
from .limits import SCRIPT_S, seconds_faults
from .processes import free_port
from .remote import Result, Work, attempts, run_part, values_of
from .settings import TaskSettings
from .spec import ClusterSpec, Task

_LAST_WORDS_S = 20.0  # after an actor's death: for the others to notice, say so, and end
_STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")


@dataclass(frozen=True)
class RayLauncher:
    """Runs a function or a program as a group of processes on a Ray cluster.

    Each of the ``num_processes`` gets ``resources``, such as ``{"CPU": 4, "GPU": 1}``, as a bundle
    of one placement group; ``placement`` is Ray's strategy for it. ``devices`` makes virtual CPU
    devices in each. After a failure the whole group is started again, ``max_restarts`` times at
    most: with ``checkpoint=`` training goes on from there. ``start_s`` is how long Ray may take to
    find the resources; ``stall_s``, ``join_s`` and ``script_s`` are those of ``meshwright
    launch``.

    Raises :class:`~meshwright.ClusterError` for invalid values, and where Ray is not installed or
    has no such resources.

    >>> RayLauncher(num_processes=2, resources={"CPU": 1}).placement
    'SPREAD'
    """

    num_processes: int
    resources: Mapping[str, float] | None = None
    placement: str = "SPREAD"
    devices: int | None = None
    max_restarts: int = 0
    start_s: float = 300.0
    stall_s: float = 10.0
    join_s: float = 60.0
    script_s: float = SCRIPT_S

    def __post_init__(self) -> None:
        faults = []
        if self.num_processes < 1:
            faults.append(f"num_processes must be 1 or more; received {self.num_processes}.")
        if self.placement not in _STRATEGIES:
            names = ", ".join(_STRATEGIES)
            faults.append(f"placement must be one of {names}; received {self.placement!r}.")
        if self.max_restarts < 0:
            faults.append(f"max_restarts must be 0 or more; received {self.max_restarts}.")
        faults += seconds_faults(
            start_s=self.start_s,
            stall_s=self.stall_s,
            join_s=self.join_s,
            script_s=self.script_s,
        )
        if faults:
            raise ClusterError("RayLauncher: " + "\n".join(faults))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function in every process of a group; what it returned in each, by rank.

        The function travels by value, with what it refers to. In it, ``mw.create_mesh`` has the
        devices of all processes. Raises :class:`~meshwright.ProcessError` for the process that
        failed first, :class:`~meshwright.Preempted` where all have saved and ended, and
        :class:`~meshwright.ShippingError` for a function that cannot be sent.
        """
        return self._run(Work.of_call(function, *args, **kwargs))

    def run_program(self, arguments: Sequence[str]) -> None:
        """Run a Python program with its arguments as every process; errors as in :meth:`run`.

        The file must be there on every host, at the same path.
        """
        self._run(Work(tuple(arguments)))

    @contextlib.contextmanager
    def parameter_servers(self, workers: int = 2, ps: int = 1) -> Iterator[DescribedCluster]:
        """A cluster of workers and parameter servers as actors, with this process as its chief.

        ``resources`` are those of each task; ``num_processes`` is not used. A task that dies is
        started again by its actor. Use it as::

            with launcher.parameter_servers(workers=4, ps=2) as cluster:
                strategy = mw.ParameterServer(cluster)
        """
        tasks = [Task("ps", i) for i in range(ps)] + [Task("worker", i) for i in range(workers)]
        with self._placed(len(tasks), _make_task_actor) as (ray, actors):
            addresses = ray.get([actor.address.remote() for actor in actors])
            keys = Keys.make()
            spec = ClusterSpec(
                {
                    "chief": [join_address(ray.util.get_node_ip_address(), free_port())],
                    "ps": addresses[:ps],
                    "worker": addresses[ps:],
                }
            )
            settings = [TaskSettings(task, spec, orphan_s=60.0) for task in tasks]
            started = [
                actor.start.remote(own, keys.of(own.task.job), self.devices)
                for actor, own in zip(actors, settings, strict=True)
            ]
            _get(ray, started)
            try:
                yield DescribedCluster(spec, keys, self.devices)
            finally:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get([actor.stop.remote() for actor in actors], timeout=10.0)

    # Parts

    def _run(self, work: Work) -> list[Any]:
        def note(line: str) -> None:
            print(f"meshwright: {line}", file=sys.stderr, flush=True)

        return attempts(self.max_restarts, lambda: self._once(work), note)

    def _once(self, work: Work) -> list[Any]:
        with self._placed(self.num_processes, _make_agent) as (ray, agents):
            meeting = ray.get(agents[0].meeting.remote())
            options = GroupOptions(
                devices=self.devices,
                stall_s=self.stall_s,
                join_s=self.join_s,
                script_s=self.script_s,
                nodes=self.num_processes,
                rendezvous=meeting if self.num_processes > 1 else "",
            )
            hosts = ray.get([agent.place.remote() for agent in agents])
            return values_of(_results(ray, agents, hosts, work, options))

    @contextlib.contextmanager
    def _placed(self, count: int, make: Callable[[Any], Any]) -> Iterator[tuple[Any, list[Any]]]:
        """``count`` actors, each in a bundle of its own; all are gone afterwards."""
        require("ray", ClusterError, "RayLauncher needs Ray", "ray")
        import ray
        import ray.exceptions
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not ray.is_initialized():
            ray.init(log_to_driver=True)
        bundle = dict(self.resources or {"CPU": 1})
        group = placement_group([bundle] * count, strategy=self.placement)
        actors: list[Any] = []
        try:
            try:
                ray.get(group.ready(), timeout=self.start_s)
            except ray.exceptions.GetTimeoutError as error:
                raise ClusterError(
                    f"Ray has not found {count} x {bundle} ({self.placement}) within "
                    f"{self.start_s:g} s; the cluster has {_rounded(ray.cluster_resources())}. "
                    "Ask for less, add nodes, or choose another placement."
                ) from error
            kinds = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
            options: dict[str, Any] = {kinds[k]: v for k, v in bundle.items() if k in kinds}
            options["resources"] = {k: v for k, v in bundle.items() if k not in kinds}
            options = {"num_cpus": 0, **options}
            for index in range(count):
                where = PlacementGroupSchedulingStrategy(group, index)
                actors.append(make(ray).options(scheduling_strategy=where, **options).remote())
            yield ray, actors
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)


def _results(
    ray: Any, agents: list[Any], hosts: list[str], work: Work, options: GroupOptions
) -> list[Result]:
    """The results of all agents; those that are left when one is dead may still say why."""
    pending = {agent.run.remote(work, options): index for index, agent in enumerate(agents)}
    results: list[Result] = []
    failures: list[tuple[int, str]] = []
    until_s = float("inf")
    while pending and time.monotonic() < until_s:
        ready, _ = ray.wait(list(pending), timeout=1.0)
        for reference in ready:
            index = pending.pop(reference)
            try:
                results.append(ray.get(reference))
            except ray.exceptions.RayActorError as error:
                failures.append((index, " ".join(str(error).split())[:300]))
                until_s = min(until_s, time.monotonic() + _LAST_WORDS_S)
    if failures:
        index, why = failures[0]
        raise ProcessError(
            f"a process of the group on host {hosts[index]} is gone with its Ray actor: {why}",
            host=hosts[index],
        )
    return results


def _get(ray: Any, references: list[Any]) -> None:
    try:
        ray.get(references)
    except ray.exceptions.RayTaskError as error:
        raise TaskError(f"a task could not be started: {error.cause}") from error


def _rounded(resources: Mapping[str, float]) -> dict[str, float]:
    return {k: round(v, 2) for k, v in resources.items() if not k.startswith("node:")}


# Actors. Their classes are made where Ray is installed.


class Agent:
    """In an actor: runs one process of the group."""

    def meeting(self) -> str:
        """A ``host:port`` of this node."""
        import ray

        return join_address(ray.util.get_node_ip_address(), free_port())

    def place(self) -> str:
        """The name of this node, for messages."""
        return os.uname().nodename

    def run(self, work: Work, options: GroupOptions) -> Result:
        """See :func:`~.remote.run_part`."""
        with tempfile.TemporaryDirectory(prefix="meshwright-call-") as folder:
            return run_part(work, options, Path(folder))


class TaskActor(TaskKeeper):
    """In an actor: keeps one worker or parameter server running."""

    def address(self) -> str:
        """A ``host:port`` of this node."""
        return Agent().meeting()


def _make_agent(ray: Any) -> Any:
    return ray.remote(Agent)


def _make_task_actor(ray: Any) -> Any:
    return ray.remote(TaskActor)
