"""Errors of JAX, Keras and XLA, which say by their words what no class or code of them says."""

from __future__ import annotations

import re


def lies_on_other_devices(error: ValueError) -> bool:
    """Whether a jitted function was refused for the devices that its arguments lie on.

    JAX 0.10.2 raises a ValueError in the place of a class of its own, which stays its context.
    """
    from jax._src.stages import DeviceAssignmentMismatchError

    return isinstance(error.__context__, DeviceAssignmentMismatchError)


def own_error(error: BaseException) -> BaseException:
    """The error that Keras tells in words of its own, with the arguments of the call around it.

    Keras 3.15 marks what it raises in place of another error (``utils/traceback_utils.py``); that
    stays its context. For some of JAX' classes its words are no more than a ``repr``.
    """
    while getattr(error, "_keras_call_info_injected", False):
        cause = error.__cause__ or error.__context__
        if cause is None:
            break
        error = cause
    return error


def is_about_frames(note: str) -> bool:
    """Whether a note of an error is JAX' own, on the frames that a traceback leaves out.

    JAX 0.10.2 adds it to what a traced function raises.
    """
    from jax._src.traceback_util import _simplified_tb_msg

    return note.endswith(_simplified_tb_msg)


def ran_out_of_memory(words: str) -> bool:
    """Whether a compiler's error, as text, says that the program does not fit into a device.

    jaxlib 0.10: the status code of a ``JaxRuntimeError`` is nowhere but in front of its text.
    """
    return "RESOURCE_EXHAUSTED" in words


def refuses_libtpu(words: str) -> bool:
    """Whether JAX, as text, says that it does not take the libtpu that is installed.

    jaxlib 0.10: a ``RuntimeError`` of no class of its own.
    """
    return "TPU support not installed" in words


def memory_in(words: str) -> tuple[int | None, int | None]:
    """Bytes needed and available, as XLA (jaxlib 0.10) words them for TPUs and in no other way.

    >>> memory_in("Used 2.00G of 1.50G hbm.")
    (2147483648, 1610612736)
    """
    patterns = (
        r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
        r"temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
    )
    for pattern in patterns:
        if sizes := re.search(pattern, words):
            used, unit, there, its_unit = sizes.groups()
            return _bytes(used, unit), _bytes(there, its_unit)
    return None, None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** " KMGT".index(unit or " "))
