"""A forward pass by stages: a thread for each stage of this process, batches one after another.

While one stage computes a batch, the stage before it computes the next (inference pipelines as in
GPipe's forward pass and Triton's ensembles). Between processes batches travel through rank 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np

from ..arrays.by_hand import run_compiled
from ..errors import MeshwrightError, ModelFailedError
from ..launch.progress import inside
from ..program import TrainState
from ..stages.forward_line import Segments, crossing_shape
from .forward import Forward, Shape, fastest
from .source import Source
from .stage_cut import Stage, Stages, line_of
from .turns import turn

States = Sequence[TrainState | None]  # of each stage; None for those of other processes
Say = Callable[[dict[str, Any], list[np.ndarray], int], None]  # a word to one process


@dataclass(eq=False)
class Task:
    """A batch on its way through the stages: its inputs, and what the last stage passed on."""

    shape: Shape
    states: States
    version: str
    arrays: list[Any]
    passed: list[Any] = field(default_factory=list)
    future: Future[list[Any]] = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class StagedForward(Forward):
    """The forward pass of a source with stages; see :class:`~.forward.Forward`.

    The weights of a batch are those of each stage. Over several processes rank 0 begins batches,
    once :meth:`lead` was called there.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        assert source.stages is not None
        self._stages: Stages = source.stages
        self.depth = len(self._stages.all) + 1  # one computed in each stage, one that is ready
        self.is_split = not self._stages.are_here
        self._parts = [
            _Part(stage, Forward(stage.source), is_first=number == 0)
            for number, stage in enumerate(self._stages.here)
        ]
        self._under_way: dict[int, Task] = {}
        self._numbers = 0
        self._lock_of_tasks = threading.Lock()
        self._say: Say | None = None

    def compile(self, shapes: Sequence[Shape]) -> None:
        """Compile the stages of this process for these shapes, what is not compiled yet."""
        from concurrent.futures import ThreadPoolExecutor

        jobs = []
        for shape in (shape for shape in shapes if shape not in self._parts[0].compiled):
            jobs += [(part, shape, part.lowered(shape, self._stages)) for part in self._parts]
        with ThreadPoolExecutor(4) as pool:
            calls = list(pool.map(lambda job: job[2][0].compile(), jobs))
        for (part, shape, (_, keys, sizes)), call in zip(jobs, calls, strict=True):
            part.compiled[shape] = _Compiled(call, keys, sizes)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(self._parts[0].compiled)

    def begun(
        self, state: Any, shape: Shape, arrays: list[Any], version: str = ""
    ) -> Callable[[], list[Any]]:
        """Begin a batch; what is returned waits for its outputs, NumPy arrays in order."""
        self.compile([shape])
        task = Task(shape, state, version, jax.tree.leaves(self.source.batch(arrays)))
        self._begin(task, 0)
        return task.future.result

    def __call__(self, weights: Any, shape: Shape, arrays: list[Any]) -> list[Any]:
        return self.begun(weights, shape, arrays)()

    def seconds(self, state: States, shape: Shape) -> float:
        """What the slowest stage of this process takes for a batch of zeros."""
        return max(part.seconds(state[part.stage.number], shape) for part in self._parts)

    def close(self) -> None:
        """End the threads of the stages; another batch begins them again."""
        for part in self._parts:
            part.close()

    def memory(self, shape: Shape) -> Any:
        """What the compiler says of the memory of the first stage of this process."""
        return self._parts[0].compiled[shape].call.memory_analysis()

    # From stage to stage

    def _begin(self, task: Task, stage: int) -> None:
        """Give a batch to a stage, here or in another process; after the last one it is done."""
        if stage == len(self._stages.all):
            task.future.set_result([np.asarray(value) for value in task.passed])
            return
        process = self._stages.all[stage].process
        if process == jax.process_index():
            part = self._parts[stage - self._parts[0].stage.number]
            part.add(task, lambda: self._begin(task, stage + 1))
            return
        assert self._say is not None, "rank 0 leads before it begins a batch"
        with self._lock_of_tasks:
            self._numbers += 1
            number = self._numbers
            self._under_way[number] = task
        word = {"stage": stage, "task": number, "version": task.version, "rows": task.shape.rows}
        word |= {"lengths": list(task.shape.lengths), "passed": len(task.passed)}
        passed = [np.asarray(value) for value in task.passed]
        try:
            self._say(word, [*passed, *task.arrays], process)
        except MeshwrightError as error:
            self._take(number)
            task.fail(error)

    def lead(self, say: Say) -> None:
        """Begin batches in other processes by these words, and go on by :meth:`answered`."""
        self._say = say

    def answered(self, word: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Another process has computed its stages of a batch, or could not."""
        task = self._take(word["task"])
        if task is None:  # which was given up meanwhile
            return
        if "error" in word:
            task.fail(ModelFailedError(word["error"]))
            return
        task.passed = arrays
        self._begin(task, word["stage"] + 1)

    def lose(self, error: Exception) -> None:
        """Give up the batches that are in other processes."""
        for number in list(self._under_way):
            if (task := self._take(number)) is not None:
                task.fail(error)

    def _take(self, number: int) -> Task | None:
        with self._lock_of_tasks:
            return self._under_way.pop(number, None)

    def follow(
        self,
        word: dict[str, Any],
        arrays: list[np.ndarray],
        states: States,
        reply: Callable[[dict[str, Any], list[np.ndarray]], None],
    ) -> None:
        """Compute the stages of this process from one on, as rank 0 says, and reply."""
        shape, count = Shape(word["rows"], tuple(word["lengths"])), word["passed"]
        task = Task(shape, states, word["version"], arrays[count:], arrays[:count])
        last = self._parts[-1].stage.number

        def finish(future: Future[list[Any]]) -> None:
            answer = {"model": word["model"], "task": word["task"], "stage": last}
            if (error := future.exception()) is not None:
                reply({**answer, "error": f"{type(error).__name__}: {error}"}, [])
            else:
                reply(answer, future.result())

        task.future.add_done_callback(finish)
        try:
            self.compile([shape])
        except Exception as error:
            task.fail(error)
            return
        self._pass_on(task, word["stage"], last)

    def _pass_on(self, task: Task, stage: int, last: int) -> None:
        if stage > last:
            task.future.set_result([np.asarray(value) for value in task.passed])
            return
        part = self._parts[stage - self._parts[0].stage.number]
        part.add(task, lambda: self._pass_on(task, stage + 1, last))


@dataclass(frozen=True, eq=False)
class _Compiled:
    call: Any
    leaves: tuple[int, ...]  # of the batch, that the stage reads
    entering: tuple[Any, ...]  # shapes, with shardings


class _Part:
    """One stage of this process, and its thread."""

    def __init__(self, stage: Stage, forward: Forward, is_first: bool) -> None:
        self.stage = stage
        self._is_first = is_first  # of those in this process
        self.compiled: dict[Shape, _Compiled] = {}
        self._forward = forward
        self._tasks: SimpleQueue[tuple[Task, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, task: Task, then: Callable[[], None]) -> None:
        """Compute a batch after those that were added before, and ``then`` pass it on."""
        self._tasks.put((task, then))
        if self._thread is None:
            name = f"meshwright-stage-{self.stage.number}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, after what was added."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, then = item
            try:
                state = task.states[self.stage.number]
                task.passed = self.computed(state, task.shape, task.arrays, task.passed)
                then()
            except BaseException as error:
                task.fail(error)
            del item, task, then  # while it waits, nothing keeps their arrays

    def computed(
        self, state: Any, shape: Shape, arrays: Sequence[Any], entering: Sequence[Any]
    ) -> list[Any]:
        """What the stage passes on."""
        compiled = self.compiled[shape]
        of_batch = {number: arrays[number] for number in compiled.leaves}
        entering = [
            jax.device_put(value, like.sharding)
            for value, like in zip(entering, compiled.entering, strict=True)
        ]
        # The agents of a group count steps, of one thread in each process.
        step = inside("step") if self._is_first else nullcontext()
        with turn(self._forward.source.mesh), step:
            operands = state.params, state.state, of_batch, entering
            passed = run_compiled(compiled.call, *operands)
            if self._forward.is_on_cpu:
                jax.block_until_ready(passed)
        return passed

    def seconds(self, state: Any, shape: Shape) -> float:
        """What a batch of zeros takes after the first time."""
        return fastest(lambda: self._of_zeros(state, shape))

    def _of_zeros(self, state: Any, shape: Shape) -> None:
        """Compute a batch of zeros."""
        compiled = self.compiled[shape]
        leaves = jax.tree.leaves(self._forward.laid(shape))
        zeros, entering = (
            [np.zeros(like.shape, like.dtype) for like in likes]
            for likes in (leaves, compiled.entering)
        )
        jax.block_until_ready(self.computed(state, shape, zeros, entering))

    def lowered(self, shape: Shape, stages: Stages) -> tuple[Any, tuple[int, ...], tuple[Any, ...]]:
        """The stage for batches of a shape, ready to be compiled."""
        forward, number = self._forward, self.stage.number
        line = line_of(forward, shape)
        segments = Segments(line, stages.begins)
        read = segments.leaves(number)
        state = forward.source.stored
        leaves = jax.tree.leaves(forward.laid(shape))
        of_batch = {number: leaves[number] for number in read}
        enters, leave = segments.boundaries[number : number + 2]
        placement = forward.source.steps.placement

        def crossing(variables: Sequence[Any]) -> list[Any]:
            return [crossing_shape(var.aval, shape.rows, placement) for var in variables]

        entering = crossing(enters)
        is_last = number == len(stages.all) - 1
        leaving = None if is_last else [value.sharding for value in crossing(leave)]
        jitted = jax.jit(segments.function(number), out_shardings=leaving)
        with jax.set_mesh(forward.source.mesh.jax_mesh):
            lowered = jitted.lower(state.params, state.state, of_batch, entering)
        return lowered, read, tuple(entering)
