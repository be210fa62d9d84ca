"""Every exception of Meshwright, in one tree; this file imports nothing.

    MeshwrightError                     whatever this library raises on purpose
    ├── MeshError            ValueError    axes, sizes or devices that do not make a mesh
    ├── LayoutError          ValueError    specs that do not make a layout, or do not fit
    │   ├── DivisibilityError              a dim that does not divide over its axes
    │   ├── LayoutTypeError  TypeError     a name that is not a string
    │   └── PlacementError                 variables that a strategy cannot lay out, all at once
    ├── DimError             ValueError    named dims that do not fit each other, or an operation
    ├── ArrayError           ValueError    parts or arrays that do not fit their layout
    ├── BatchError           ValueError    a batch that cannot be split over a mesh
    ├── DataError            ValueError    input data that cannot be found or read
    ├── ModelError           ValueError    a model that is not ready for an operation
    ├── PipelineError        ValueError    a model or a batch that cannot be cut into stages
    ├── CheckpointError      ValueError    a missing checkpoint, or one that does not fit
    ├── TopologyError        RuntimeError  missing devices or processes, or requested too late
    ├── TargetError          ValueError    an unknown target, or one that does not fit
    ├── CompileError         RuntimeError  a step that does not compile for its target
    │   └── DoesNotFitError                because it needs more memory than a device has
    ├── PlanError            RuntimeError  no layout fits, or a plan cannot be searched or read
    ├── ClusterError         ValueError    an invalid description of a cluster or a task
    ├── TaskError            RuntimeError  a task that could not do what it was asked
    │   ├── UnreachableError ConnectionError  it does not answer, or is gone
    │   ├── UnknownVariableError           a variable that a server does not have
    │   ├── ProtocolError                  it speaks another version, or has another key
    │   │   └── FencedError                it was declared dead; others have its work
    │   └── ScheduledError                 a scheduled function raised there
    ├── AgreementError       RuntimeError  processes of a group differ in what they would train
    ├── ProcessError         RuntimeError  another process of a group has failed
    ├── CancelledError       RuntimeError  a scheduled function, cancelled after another's error
    ├── ShippingError        TypeError     a function or value that cannot travel between tasks
    ├── ExhaustedError       DataError     a dataset that has no more elements
    ├── NotFiniteError       FloatingPointError  a loss or a gradient that is infinite or NaN
    ├── RequestError         ValueError    inputs that do not fit a served model, all faults at once
    ├── UnknownModelError    LookupError   a model or version that a server does not have
    ├── OverloadedError      RuntimeError  a server's queue is full; try again later
    ├── DeadlineError        TimeoutError  a request was not answered in its time
    ├── ModelFailedError     RuntimeError  a served model raised, or its answer is not finite
    ├── NotReadyError        RuntimeError  a server is loading, draining or incomplete
    ├── ServingError         ValueError    options of a server, or of its files, that do not fit
    ├── TracingError         RuntimeError  a call that is only valid outside jit
    └── BackendError         RuntimeError  Keras is set to another backend than JAX

    MeshwrightWarning        UserWarning   something works, but probably not as intended

    Preempted                SystemExit    training stopped by SIGTERM, after saving; exit code 75

Every message says what is wrong, with the values, and the way out.
"""


class MeshwrightError(Exception):
    """Base of every error that Meshwright raises on purpose."""


class MeshError(MeshwrightError, ValueError):
    """Axes, sizes or devices do not make a mesh."""


class LayoutError(MeshwrightError, ValueError):
    """Specs do not make a layout, or a layout does not fit an array."""


class DivisibilityError(LayoutError):
    """A dim does not divide over the axes that it is split over."""


class LayoutTypeError(LayoutError, TypeError):
    """The name of a dim or an axis is not a string."""


class PlacementError(LayoutError):
    """A strategy cannot lay out some variables; the message lists every one of them."""


class DimError(MeshwrightError, ValueError):
    """Named dims do not fit each other, or not the operation that takes them."""


class ArrayError(MeshwrightError, ValueError):
    """Parts or arrays do not fit their layout."""


class BatchError(MeshwrightError, ValueError):
    """A batch cannot be split over the mesh, or is not what a step takes."""


class DataError(MeshwrightError, ValueError):
    """Input data cannot be found or read."""


class ModelError(MeshwrightError, ValueError):
    """A model is not ready for an operation: not compiled, not built, without values."""


class PipelineError(MeshwrightError, ValueError):
    """A model, a batch or a schedule does not make a pipeline of stages."""


class CheckpointError(MeshwrightError, ValueError):
    """A checkpoint is missing, cannot be written, or does not fit the model."""


class TopologyError(MeshwrightError, RuntimeError):
    """Devices or processes do not exist, or are requested too late."""


class TargetError(MeshwrightError, ValueError):
    """A target is unknown, or does not fit the mesh."""


class CompileError(MeshwrightError, RuntimeError):
    """A step does not compile for its target; the message holds what the compiler says."""


class DoesNotFitError(CompileError):
    """A step needs more memory than a device of the target has.

    ``needed_bytes`` and ``available_bytes`` are the compiler's figures for one device, where it
    gives any; ``breakdown`` is all that it says.
    """

    def __init__(
        self, message: str, needed_bytes: int | None, available_bytes: int | None, breakdown: str
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.breakdown = breakdown


class PlanError(MeshwrightError, RuntimeError):
    """No layout fits, a plan cannot be searched for, or a file does not hold one.

    ``needed_bytes`` and ``available_bytes`` are those of one device at the closest miss, and
    ``remedies`` the changes that would make it fit, where no layout does.
    """

    def __init__(
        self,
        message: str,
        needed_bytes: int | None = None,
        available_bytes: int | None = None,
        remedies: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.remedies = remedies


class NotFiniteError(MeshwrightError, FloatingPointError):
    """A loss or a gradient became infinite or NaN.

    ``step`` counts the optimizer's steps from 1 and ``epoch`` from 0; ``variables`` are the
    parameters that were not finite, or else those whose gradients were not.
    """

    def __init__(
        self, message: str, step: int = 0, epoch: int = 0, variables: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.step = step
        self.epoch = epoch
        self.variables = variables


class ClusterError(MeshwrightError, ValueError):
    """The description of a cluster or of a task is invalid."""


class TaskError(MeshwrightError, RuntimeError):
    """A task of a cluster could not do what it was asked; ``task`` names it: ``"worker:1"``."""

    def __init__(self, message: str, task: str = "") -> None:
        super().__init__(message)
        self.task = task


class UnreachableError(TaskError, ConnectionError):
    """A task does not answer, or is gone."""


class UnknownVariableError(TaskError):
    """A server does not have a variable of this name."""


class ProtocolError(TaskError):
    """A task speaks another version of the protocol, or has another key."""


class FencedError(ProtocolError):
    """A task was declared dead, and its work given to others: what it sends is refused."""


class ScheduledError(TaskError):
    """A scheduled function raised, in a worker, an error whose class is not known here."""


class AgreementError(MeshwrightError, RuntimeError):
    """The processes of a synchronous group differ in versions, model, data or options."""


class ProcessError(MeshwrightError, RuntimeError):
    """Another process of a synchronous group has failed, and this one cannot go on without it.

    ``rank``, ``host`` and ``pid`` name it; ``section`` (``"input"``, ``"step"``, ...) and ``step``
    are where it was, ``stack`` is its Python stack where it could be read.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        host: str = "",
        pid: int = 0,
        section: str = "",
        step: int = 0,
        stack: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.pid = pid
        self.section = section
        self.step = step
        self.stack = stack


class CancelledError(MeshwrightError, RuntimeError):
    """A scheduled function was cancelled because another one had raised an error."""


class ShippingError(MeshwrightError, TypeError):
    """A function or a value cannot travel from one task to another."""


class ExhaustedError(DataError):
    """A dataset has no more elements."""


class RequestError(MeshwrightError, ValueError):
    """A request does not fit the model: names, shapes, dtypes; the message lists every fault."""


class UnknownModelError(MeshwrightError, LookupError):
    """A server has no model of this name, or no such version of it."""


class OverloadedError(MeshwrightError, RuntimeError):
    """A server's queue is full; ``retry_after_s`` is when it should have room again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(MeshwrightError, TimeoutError):
    """A request was not answered within its time; what was not started is not computed."""


class ModelFailedError(MeshwrightError, RuntimeError):
    """A served model raised an exception, or its answer is not finite; its batch has no answer."""


class NotReadyError(MeshwrightError, RuntimeError):
    """A server is still loading, is draining, or one of its processes is missing."""


class ServingError(MeshwrightError, ValueError):
    """A server, or what is written for a platform, cannot be made with these options."""


class TracingError(MeshwrightError, RuntimeError):
    """A call inside ``jit`` or ``grad`` that is only valid outside."""


class BackendError(MeshwrightError, RuntimeError):
    """Keras is set to another backend than JAX."""


class MeshwrightWarning(UserWarning):
    """Something works, but probably not as intended."""


class Preempted(SystemExit):
    """Training was stopped by SIGTERM after its state was saved; the exit code is 75.

    75 is ``EX_TEMPFAIL`` of ``sysexits.h``: the same command, run again, goes on from there.
    """
