"""Every exception of Meshwright, in one tree; this file imports nothing.

    MeshwrightError                     whatever this library raises on purpose
    ├── MeshError            ValueError    axes, sizes or devices that make no mesh
    ├── LayoutError          ValueError    specs that make no layout, or do not fit a shape
    │   ├── DivisibilityError              a dim that does not divide over its axes
    │   ├── LayoutTypeError  TypeError     an axis that is not a text
    │   └── PlacementError                 variables that a strategy cannot lay out, all at once
    ├── DimError             ValueError    named dims that do not fit each other, or an operation
    ├── ArrayError           ValueError    parts or arrays that do not fit their layout
    ├── BatchError           ValueError    a batch that cannot be split over a mesh
    ├── DataError            ValueError    input data that cannot be found or read
    ├── ModelError           ValueError    a model that is not ready for what was asked
    ├── CheckpointError      ValueError    a missing checkpoint, or one that does not fit
    ├── TopologyError        RuntimeError  missing devices or processes, or requested too late
    ├── TargetError          ValueError    a text that names no target, or one that does not fit
    ├── CompileError         RuntimeError  a step that does not compile for its target
    │   └── DoesNotFitError                because it needs more memory than a device has
    ├── PlanError            RuntimeError  no layout fits, or none can be searched for or read
    ├── ClusterError         ValueError    a cluster or a task that is not described rightly
    ├── TaskError            RuntimeError  a task that could not do what it was asked
    │   ├── UnreachableError ConnectionError  it does not answer, or is gone
    │   ├── UnknownVariableError           a server holds no variable of this name
    │   ├── ProtocolError                  it speaks another version, or has another key
    │   │   └── FencedError                it was declared dead, and its work given to others
    │   └── ScheduledError                 a scheduled function raised there
    ├── ProcessError         RuntimeError  another process of a group has failed
    ├── CancelledError       RuntimeError  a scheduled function that another's error has cancelled
    ├── ShippingError        TypeError     a function or value that cannot travel between tasks
    ├── ExhaustedError       DataError     a dataset that has no more elements
    ├── NotFiniteError       FloatingPointError  a loss or a gradient that is infinite or NaN
    ├── TracingError         RuntimeError  something that has no meaning inside jit
    └── BackendError         RuntimeError  Keras is set to another backend than JAX

    MeshwrightWarning        UserWarning   something that works, but hardly as meant

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
    """A dim does not divide over the axes that it lies on."""


class LayoutTypeError(LayoutError, TypeError):
    """The name of a dim or an axis is not a text."""


class PlacementError(LayoutError):
    """Variables that a strategy cannot lay out; lists every one of them."""


class DimError(MeshwrightError, ValueError):
    """Named dims do not fit each other, or not the operation that they are given to."""


class ArrayError(MeshwrightError, ValueError):
    """Parts or arrays do not fit the layout that they are given."""


class BatchError(MeshwrightError, ValueError):
    """A batch cannot be shared out over the mesh."""


class DataError(MeshwrightError, ValueError):
    """Input data cannot be found or read."""


class ModelError(MeshwrightError, ValueError):
    """A model is not ready for what was asked of it."""


class CheckpointError(MeshwrightError, ValueError):
    """A checkpoint is not there, cannot be written, or does not fit what it is restored into."""


class TopologyError(MeshwrightError, RuntimeError):
    """Devices or processes are not there, or are asked for too late."""


class TargetError(MeshwrightError, ValueError):
    """A text names no target, or a target does not fit the mesh."""


class CompileError(MeshwrightError, RuntimeError):
    """A step does not compile for its target; holds the compiler's own words."""


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
    """No layout fits, a plan cannot be searched for, or a file holds none.

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
    """A cluster, or a task of one, is not described rightly."""


class TaskError(MeshwrightError, RuntimeError):
    """A task of a cluster could not do what it was asked; ``task`` names it: ``"worker:1"``."""

    def __init__(self, message: str, task: str = "") -> None:
        super().__init__(message)
        self.task = task


class UnreachableError(TaskError, ConnectionError):
    """A task does not answer, or is gone."""


class UnknownVariableError(TaskError):
    """A server holds no variable of this name."""


class ProtocolError(TaskError):
    """A task speaks another version of the protocol, or has another key."""


class FencedError(ProtocolError):
    """A task was declared dead, and its work given to others: nothing of it is taken any more."""


class ScheduledError(TaskError):
    """A scheduled function raised, in a worker, an error that has no class here."""


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
    """A scheduled function was cancelled, as another one had raised an error."""


class ShippingError(MeshwrightError, TypeError):
    """A function or a value cannot travel from one task to another."""


class ExhaustedError(DataError):
    """A dataset has no more elements."""


class TracingError(MeshwrightError, RuntimeError):
    """Something was asked inside ``jit`` or ``grad`` that only has a meaning outside."""


class BackendError(MeshwrightError, RuntimeError):
    """Keras is set to another backend than JAX."""


class MeshwrightWarning(UserWarning):
    """Something works, but hardly as it was meant."""


class Preempted(SystemExit):
    """Training was stopped by SIGTERM after its state was saved; the exit code is 75.

    75 is ``EX_TEMPFAIL`` of ``sysexits.h``: the same command, run again, goes on from there.
    """
