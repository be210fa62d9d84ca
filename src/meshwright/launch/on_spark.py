"""``mw.SparkLauncher``: the processes of a group as the tasks of a barrier stage of Spark.

Each task runs the launcher's own agent with one process below it. RDDs and DataFrames feed the
processes, as with ``InputMode.SPARK`` of TensorFlowOnSpark.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ClusterError, DataError, ProcessError
from ..extras import require
from .group_options import GroupOptions
from .limits import SCRIPT_S
from .processes import free_port
from .remote import Work, attempts, run_part, values_of
from .rows import Uneven, agree_on, note_length, spool
from .spark_servers import SparkCluster, reason_of, servers_on_spark


class SparkLauncher:
    """Runs a function as a group of processes on the executors of a ``SparkContext``::

        launcher = SparkLauncher(sc, max_restarts=3)
        results = launcher.run(train, data=dataframe, epochs=3)  # train(rows, epochs=3)

    ``sc`` is the ``SparkContext``. There are ``num_processes`` tasks, as many as Spark runs at
    once unless given. ``devices`` makes virtual CPU devices in each process. When a task dies,
    Spark ends the whole stage, and it is submitted again, ``max_restarts`` times at most: with
    ``checkpoint=`` training goes on from there. ``stall_s``, ``join_s`` and ``script_s``
    are those of ``meshwright launch``.

    Raises :class:`~meshwright.ClusterError` for invalid values, and where Spark is not installed.

    >>> SparkLauncher(None, num_processes=0)
    Traceback (most recent call last):
    meshwright.errors.ClusterError: SparkLauncher: num_processes must be 1 or more and ...
    """

    def __init__(
        self,
        sc: Any,
        num_processes: int | None = None,
        *,
        devices: int | None = None,
        max_restarts: int = 0,
        stall_s: float = 10.0,
        join_s: float = 60.0,
        script_s: float = SCRIPT_S,
    ) -> None:
        if (num_processes is not None and num_processes < 1) or max_restarts < 0:
            raise ClusterError(
                "SparkLauncher: num_processes must be 1 or more and max_restarts 0 or more; "
                f"received {num_processes} and {max_restarts}."
            )
        require("pyspark", ClusterError, "SparkLauncher needs PySpark", "spark")
        count = sc.defaultParallelism if num_processes is None else num_processes
        self._sc, self._count, self._max_restarts = sc, count, max_restarts
        self._check_slots(count)
        self._options = GroupOptions(
            devices=devices,
            stall_s=stall_s,
            join_s=join_s,
            script_s=script_s,
            nodes=count,
            rendezvous="later:0",
        )

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        data: Any = None,
        uneven: Uneven = "pad",
        **kwargs: Any,
    ) -> list[Any]:
        """Call a function in every process of a group; what it returned in each, by rank.

        ``data`` is an RDD or a DataFrame. Its rows are shared out over the processes, written to
        the disks of their hosts, and passed as the function's first argument
        (:class:`~meshwright.launch.rows.Rows`). All have as many: where partitions differ, short
        ones repeat rows (``uneven="pad"``), or long ones leave some out (``"drop"``); stderr says
        how many. Raises :class:`~meshwright.ProcessError` for the process that failed first, and
        :class:`~meshwright.DataError` where a process has no rows.
        """
        work = Work.of_call(function, *args, **kwargs)
        self._check_python()
        rows = self._partitioned(data)
        part = _Part(work, self._options, None if data is None else uneven)

        def once() -> list[Any]:
            from py4j.protocol import Py4JJavaError

            try:
                parts = rows.barrier().mapPartitions(part).collect()
            except Py4JJavaError as error:
                text = f"Spark has ended the barrier stage: {reason_of(error)}"
                raise ProcessError(text) from error
            replies = [pickle.loads(reply) for reply in parts]
            errors = [reply for reply in replies if isinstance(reply, Exception)]
            if errors:
                raise errors[0]
            return values_of(replies)

        def note(line: str) -> None:
            print(f"meshwright: {line}", file=sys.stderr, flush=True)

        return attempts(self._max_restarts, once, note)

    @contextlib.contextmanager
    def parameter_servers(self, workers: int = 2, ps: int = 1) -> Iterator[SparkCluster]:
        """A cluster of workers and parameter servers in a barrier stage, the driver as its chief.

        ``num_processes`` is not used; Spark must run ``workers + ps`` tasks at once, within
        ``join_s``, and their hosts reach ``spark.driver.host``. A process that dies is started
        again where it was. When Spark ends the stage, as it does when one of its own tasks dies,
        :class:`~meshwright.TaskError` is raised. Use it as::

            with launcher.parameter_servers(workers=4, ps=2) as cluster:
                strategy = mw.ParameterServer(cluster)
        """
        self._check_slots(workers + ps)
        self._check_python()
        options = self._options
        with servers_on_spark(self._sc, workers, ps, options.devices, options.join_s) as cluster:
            yield cluster

    def _check_slots(self, count: int) -> None:
        master, slots = self._sc.master, self._sc.defaultParallelism
        if master.startswith("local") and count > slots:
            raise ClusterError(
                f"a barrier stage needs {count} tasks at once, and {master} runs {slots}: use "
                f"local[{count}], or fewer processes."
            )

    def _check_python(self) -> None:
        """Look at the Python of one executor, before anything there imports this package."""
        look = types.FunctionType(_versions.__code__, {"__builtins__": builtins})
        look.__module__ = "__main__"  # which Spark sends by value
        (there,) = self._sc.parallelize([0], 1).map(look).collect()
        if there != (here := look(0)):
            raise ClusterError(
                f"the tasks of Spark run {self._sc.pythonExec} with {there}, and this program runs "
                f"{sys.executable} with {here}. Set PYSPARK_PYTHON to a Python with the same "
                "packages, before the SparkContext is made."
            )

    def _partitioned(self, data: Any) -> Any:
        if data is None:
            return self._sc.parallelize(range(self._count), self._count)
        rdd = getattr(data, "rdd", data)
        if not hasattr(rdd, "barrier"):
            raise DataError(
                f"data must be an RDD or a DataFrame of Spark; received {type(data).__name__}."
            )
        if rdd.getNumPartitions() == self._count:
            return rdd
        return rdd.repartition(self._count)


def _versions(_: int) -> str:
    """What a Python has; it must not need this module."""
    import importlib.metadata
    import sys

    lines = [f"Python {sys.version_info.major}.{sys.version_info.minor}"]
    for name in ("meshwright", "jax"):
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"no {name}")
    return ", ".join(lines)


class _Part:
    """What each task of the barrier stage does."""

    def __init__(self, work: Work, options: GroupOptions, uneven: Uneven | None) -> None:
        self._work, self._options = work, options
        self._uneven: Uneven | None = uneven

    def __call__(self, rows: Iterable[Any]) -> Iterator[bytes]:
        from dataclasses import replace

        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        index = context.partitionId()
        host = context.getTaskInfos()[0].address.rpartition(":")[0] or "127.0.0.1"
        with tempfile.TemporaryDirectory(prefix="meshwright-call-") as name:
            folder = Path(name)
            count = 0 if self._uneven is None else spool(rows, folder)
            answers = [json.loads(s) for s in context.allGather(json.dumps([count, free_port()]))]
            counts, port = [n for n, _ in answers], answers[0][1]
            options = replace(
                self._options, rendezvous=f"{host}:{port}" if len(answers) > 1 else ""
            )
            try:
                if self._uneven is not None:
                    length = agree_on(counts, self._uneven)
                    note_length(folder, length)
                    if index == 0 and len(set(counts)) > 1:
                        text = f"partitions have {counts} rows; each process uses {length}"
                        print(f"meshwright: {text} ({self._uneven})", file=sys.stderr, flush=True)
                reply: Any = run_part(self._work, options, folder)
            except (ClusterError, DataError) as error:
                reply = error
        yield pickle.dumps(reply)
