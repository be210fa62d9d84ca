"""Every exception of Meshwright, in one tree; this file imports nothing.

    MeshwrightError                     whatever this library raises on purpose
    ├── MeshError            ValueError    axes, sizes or devices that make no mesh
    ├── LayoutError          ValueError    specs that make no layout, or do not fit a shape
    │   ├── DivisibilityError              a dim that does not divide over its axes
    │   └── PlacementError                 variables that a strategy cannot lay out, all at once
    ├── ArrayError           ValueError    parts or arrays that do not fit their layout
    ├── BatchError           ValueError    a batch that a mesh cannot share out
    ├── DataError            ValueError    input data that cannot be found or read
    ├── ModelError           ValueError    a model that is not ready for what was asked
    ├── TopologyError        RuntimeError  devices or processes that are not there, or come too late
    ├── TracingError         RuntimeError  something that has no meaning inside jit
    └── BackendError         RuntimeError  Keras is set to another backend than JAX

    MeshwrightWarning        UserWarning   something that works, but hardly as meant

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


class PlacementError(LayoutError):
    """Variables that a strategy cannot lay out; lists every one of them."""


class ArrayError(MeshwrightError, ValueError):
    """Parts or arrays do not fit the layout that they are given."""


class BatchError(MeshwrightError, ValueError):
    """A batch cannot be shared out over the mesh."""


class DataError(MeshwrightError, ValueError):
    """Input data cannot be found or read."""


class ModelError(MeshwrightError, ValueError):
    """A model is not ready for what was asked of it."""


class TopologyError(MeshwrightError, RuntimeError):
    """Devices or processes are not there, or are asked for too late."""


class TracingError(MeshwrightError, RuntimeError):
    """Something was asked inside ``jit`` or ``grad`` that only has a meaning outside."""


class BackendError(MeshwrightError, RuntimeError):
    """Keras is set to another backend than JAX."""


class MeshwrightWarning(UserWarning):
    """Something works, but hardly as it was meant."""
