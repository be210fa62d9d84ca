"""Sums over the processes of one host as an operation of a compiled program.

The operation is a call through XLA's foreign function interface, whose C layout is public and
stable; it is read with ``ctypes``, so nothing is compiled, and arrays are summed where XLA has put
them. A program names the operation, so JAX's compilation cache keeps it as any other. The call is
asynchronous: while a thread of its own waits for other processes, XLA's threads go on, and a
collective of XLA can never be behind one of ours in one process and before it in another.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import platform
import queue
import threading
from collections.abc import Sequence
from typing import Any

from ..launch.neighbors import Neighbors, Span, neighbors

_TARGET = "meshwright_host_sum"


def sums_on_host(mesh: Any, axes: Sequence[str]) -> bool:
    """Whether sums over these axes of a JAX mesh are sums over all processes of this host.

    That is where each process has one device, a CPU, and the axes cover the mesh.
    """
    import jax

    group = neighbors()
    if group is None or not isinstance(mesh, jax.sharding.Mesh):  # one may be abstract
        return False
    if math.prod(mesh.shape[axis] for axis in axes) != mesh.size or mesh.size != group.count:
        return False
    devices = list(mesh.devices.flat)
    places = sorted(device.process_index for device in devices)
    return devices[0].platform == "cpu" and places == list(range(group.count))


def sum_on_host(arrays: Sequence[Any]) -> list[Any] | None:
    """The sums of arrays over all processes, for use in ``shard_map``.

    ``None`` where there is none, or a dtype or this release of JAX is not supported.
    """
    import jax

    if not arrays or any(a.dtype.name != "float32" for a in arrays) or not _is_registered():
        return None
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    in_place = {i: i for i in range(len(arrays))}
    return list(jax.ffi.ffi_call(_TARGET, results, input_output_aliases=in_place)(*arrays))


@functools.cache
def _is_registered() -> bool:
    import jax

    group = neighbors()
    if group is None:
        return False
    try:
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_Calls(group).handler), "cpu")
    except Exception:  # another version of the interface: XLA refuses the handler
        return False
    return True


# The interface, as xla/ffi/api/c_api.h declares it

_VERSION = (0, 3)
_EXECUTE, _METADATA, _ABORTED = 3, 1, 10
_P, _I64 = ctypes.c_void_p, ctypes.c_int64


def _struct(name: str, **fields: Any) -> Any:
    """A structure that begins as all of them do."""
    own = [("struct_size", ctypes.c_size_t), ("extension", _P), *fields.items()]
    return type(name, (ctypes.Structure,), {"_fields_": own})


_Version = _struct("Version", major=ctypes.c_int, minor=ctypes.c_int)
_Buffer = _struct("Buffer", dtype=ctypes.c_int, data=_P, rank=_I64, dims=ctypes.POINTER(_I64))
_List = _struct("List", size=_I64, types=_P, items=ctypes.POINTER(ctypes.POINTER(_Buffer)))
_Attributes = _struct("Attributes", size=_I64, types=_P, names=_P, items=_P)
_ErrorArgs = _struct("ErrorArgs", message=ctypes.c_char_p, code=ctypes.c_int)
_FutureArgs = _struct("FutureArgs", future=_P)
_FailedArgs = _struct("FailedArgs", future=_P, error=_P)
_FUNCTION = ctypes.CFUNCTYPE(_P, _P)
_Api = _struct(
    "Api",
    version=_Version,
    internal=_P,
    create_error=_FUNCTION,
    between=_P * 12,
    create_future=_FUNCTION,
    set_available=_FUNCTION,
    set_error=_FUNCTION,
)
_Frame = _struct(
    "Frame",
    api=ctypes.POINTER(_Api),
    context=_P,
    stage=ctypes.c_int,
    arguments=_List,
    results=_List,
    attributes=_Attributes,
    future=_P,
)


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version", _Version),
        ("traits", ctypes.c_uint32),
        ("state_type", _I64),
    )


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", _P),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _Calls:
    """Takes calls from XLA's threads, and answers them from one of its own, in their order."""

    def __init__(self, group: Neighbors) -> None:
        self._group = group
        self._calls = queue.SimpleQueue[tuple[Any, int, list[Span], list[Span]]]()
        self.handler = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_Frame))(self._take)
        threading.Thread(target=self._answer, name="meshwright-sums", daemon=True).start()

    def _take(self, pointer: Any) -> int | None:
        """Note a call; XLA keeps its buffers until the future is set."""
        frame = pointer.contents
        if frame.extension:
            extension = _Extension.from_address(frame.extension)
            if extension.type == _METADATA:
                version = extension.metadata.contents.version
                version.major, version.minor = _VERSION
                return None
        api = frame.api.contents
        args = _FutureArgs(struct_size=ctypes.sizeof(_FutureArgs))
        if error := api.create_future(ctypes.addressof(args)):
            return error
        frame.future = args.future
        self._calls.put((api, args.future, _spans(frame.arguments), _spans(frame.results)))
        return None

    def _answer(self) -> None:
        _flush_denormals()
        while True:
            api, future, sources, targets = self._calls.get()
            try:
                self._group.sum(sources, targets)
            except Exception as error:  # XLA raises it where the program was called
                _fail(api, future, f"{type(error).__name__}: {error}")
            else:
                args = _FutureArgs(struct_size=ctypes.sizeof(_FutureArgs), future=future)
                api.set_available(ctypes.addressof(args))  # the program goes on in this thread


def _fail(api: Any, future: int, message: str) -> None:
    args = _ErrorArgs(ctypes.sizeof(_ErrorArgs), None, message.encode(), _ABORTED)
    error = api.create_error(ctypes.addressof(args))
    failed = _FailedArgs(ctypes.sizeof(_FailedArgs), None, future, error)
    api.set_error(ctypes.addressof(failed))


def _spans(buffers: Any) -> list[Span]:
    """Where the arrays of a list of buffers lie."""
    return [_span(buffers.items[i].contents) for i in range(buffers.size)]


def _span(buffer: Any) -> Span:
    return Span(buffer.data or 0, 4 * math.prod(buffer.dims[: buffer.rank]))


def _flush_denormals() -> None:
    """Let this thread compute as XLA's do: the rest of a program may run in it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    state = (ctypes.c_uint32 * 8)()  # fenv_t: seven words of the x87, then MXCSR
    with contextlib.suppress(AttributeError):  # a C library without it
        libc = ctypes.CDLL(None)
        if libc.fegetenv(state) == 0:
            state[7] |= 0x8040  # flush to zero, and denormals are zeros
            libc.fesetenv(state)
