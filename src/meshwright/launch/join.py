"""``mw.join()``: this process takes part in a synchronous group, before JAX's devices exist."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import importlib.metadata
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from .. import _compat
from ..errors import ClusterError, ProcessError, TopologyError
from ..topology import settle_cpu_pool
from . import neighbors, progress, standby
from .addresses import listener_at, to_listen
from .coordinator import HOSTED
from .failure import Failure
from .limits import SCRIPT_S, seconds_faults
from .membership import COORDINATOR, Membership, membership
from .relay import RELAY
from .signals import PREEMPTED

if TYPE_CHECKING:
    from .agreement import Attendance, Facts, Meeting
    from .keys import Keys
    from .private_folder import PrivateFolder

JOIN = "MESHWRIGHT_JOIN"  # set by the launcher: join when the package is imported
AGENT = "MESHWRIGHT_AGENT"  # the folder in which an agent and its ranks meet
AGREE = "MESHWRIGHT_AGREE"  # "0": nothing is compared
WATCH = "MESHWRIGHT_WATCH"  # "0": no agent is started
STALL = "MESHWRIGHT_STALL_TIMEOUT"  # seconds that a step or a batch may take
SCRIPT = "MESHWRIGHT_SCRIPT_TIMEOUT"  # and that a rank may do nothing while others wait for it
MEETING = "MESHWRIGHT_MEETING"  # where an agent compares
_BASE = getattr(signal, "SIGRTMIN", None)
DUMP = signal.SIGUSR1 if _BASE is None else _BASE + 5  # "write your stack down"
TELL = signal.SIGUSR2 if _BASE is None else _BASE + 6  # "another process has failed"
_UNUSED = "127.0.0.1:0"
_ASK_EVERY_S = 0.5
_TAKEN_S = 5.0  # another rank 0 would answer at once
_WORD_S = 1.0  # for an agent to say why a collective has failed
_WORD_OF_HOSTS_S = 15.0  # where the host of rank 0 may be lost, which agents see by its silence

_joined: Membership | None = None
_attendance: Attendance | None = None
_agent: Path | None = None
_folder: PrivateFolder | None = None  # that of a companion, held while this process is there


def join(
    rank: int | None = None,
    processes: int | None = None,
    coordinator: str | None = None,
    *,
    wait_s: float = 60.0,
    agree: bool = True,
    watch: bool = True,
) -> Membership | None:
    """Take part in a group of processes that train together; the place of this process in it.

    ``rank``, ``processes`` (how many there are) and ``coordinator``, the ``host:port`` of rank 0,
    describe the group. Without them the environment is read: that of ``meshwright launch``,
    ``srun``, ``mpirun``, ``torchrun``, Kubeflow Trainer, JobSet, TPU pods, or ``TF_CONFIG``. Where
    it describes no group, nothing happens and the result is ``None``, so a program may call it in
    any case. A second call returns what the first one did. Under ``meshwright launch`` the call is
    made by ``import meshwright``.

    All processes first compare their versions, over a connection of their own (the port after
    the coordinator's), and later, before the first step, what they are about to train;
    ``agree=False`` leaves that out. A process that has not come after ``wait_s`` is named.
    Python's and NumPy's random numbers begin alike in all of them.

    Beside each process an agent is started, unless ``watch=False`` in rank 0, or ``meshwright
    launch`` already is one: when a process dies, stops or holds the others up, they raise a
    :class:`~meshwright.ProcessError` that names it.

    Call it before JAX is first used. Raises :class:`~meshwright.AgreementError` where processes
    differ, :class:`~meshwright.ProcessError` for one that does not come,
    :class:`~meshwright.TopologyError` if that is too late, and :class:`~meshwright.ClusterError`
    where the environment describes only half of a group.

    >>> join() is None  # this program runs alone
    True
    """
    global _joined
    if _joined is not None:
        return _joined
    if (rank, processes, coordinator) == (None, None, None):
        member = membership()
    elif rank is None or processes is None or coordinator is None:
        raise TopologyError(
            f"join(rank={rank}, processes={processes}, coordinator={coordinator!r}): expected all "
            "three, or none of them to read the environment."
        )
    else:
        member = Membership(rank, processes, coordinator)
    if member is None:
        return None
    if _compat.jax_is_running():
        raise TopologyError(
            "join() comes too late: JAX has already created its devices, and they cannot be shared "
            "with other processes any more. Put `import meshwright as mw; mw.join()` at the top of "
            "the program."
        )
    folder = os.environ.pop(AGENT, "")
    if folder:
        _follow_agent(member, Path(folder))
    progress.entering("join")
    is_hosted = bool(os.environ.pop(HOSTED, "")) and bool(folder)
    _check_coordinator(member, wait_s, is_hosted)
    agree = agree and os.environ.get(AGREE) != "0"
    watch = watch and os.environ.get(WATCH) != "0" and not folder
    if watch:
        _agent_limits_s()  # what is wrong with them is said before anything waits
    if member.processes > 1 and (agree or watch):
        _meet(member, wait_s, agree, watch)
    _initialize(member, wait_s, is_hosted or _folder is not None)
    if _agent is not None:
        atexit.register(_leave_after_failure, member.rank)
    atexit.register(progress.entering, "exit")  # after JAX's own: so before JAX waits for others
    progress.follow_compiler()
    progress.entering("script")
    if _agent is not None:
        standby.note_joined()
    _joined = member
    return member


def join_if_launched() -> None:
    """Join if ``meshwright launch`` has started this process; its own children do not."""
    if os.environ.pop(JOIN, "") and threading.current_thread() is threading.main_thread():
        standby.wait_for_place()
        join()


_HUB = "hub"  # in what the meeting tells: where the agents of all ranks meet
_meeting: Meeting | None = None  # of a group that nothing has started together, in its rank 0


def _meet(member: Membership, wait_s: float, agree: bool, watch: bool) -> None:
    """Compare versions, before JAX of one could wait for JAX of another; begin alike."""
    global _attendance, _meeting
    import numpy as np
    import zmq

    from .agreement import Attendance, Meeting, Party, clock_note
    from .doors import group_keys

    address = os.environ.pop(MEETING, "")
    host, port = member.address
    address, by_rank_0 = address or f"tcp://{host}:{port + 1}", not address
    keys = group_keys(address)
    is_taken, listener = False, None
    if by_rank_0 and member.rank == 0:
        listens_at = to_listen(host)
        if watch:  # holds the port until the companion listens on it
            listener = listener_at(listens_at)
        tells = {} if listener is None else {_HUB: f"{host}:{listener.getsockname()[1]}"}
        at = f"tcp://{listens_at or '*'}:{port + 1}"
        try:
            _meeting = Meeting(at, member.processes, wait_s, keys, tells)
        except zmq.ZMQError:  # by another rank 0, which then says so, or by something else
            is_taken = True
        else:
            _warn_without_keys(address, keys)
    party = Party(member.rank, socket.gethostname(), os.getpid(), {})
    patience_s = min(wait_s, _TAKEN_S) if is_taken else wait_s
    attendance = Attendance(address, party, member.processes, patience_s, keys)
    try:
        answer = attendance.agree(_versions() if agree else {})
    except (ProcessError, ClusterError) as error:
        if is_taken:
            raise _port_is_taken(member, port + 1) from error
        raise
    if note := clock_note(party, time.time() - answer["clock_s"]):
        print(f"meshwright: {note}", file=sys.stderr, flush=True)
    if agree:
        random.seed(answer["seed"])
        np.random.seed(answer["seed"])
        _attendance = attendance
    else:
        attendance.close()
    if _HUB in answer:
        _start_agent(member, answer[_HUB], listener)


def _warn_without_keys(address: str, keys: Keys | None) -> None:
    from .doors import NO_KEYS

    if keys is None and not address.startswith("ipc://"):
        at = address.removeprefix("tcp://")
        print(f"meshwright: the group meets at {at}: {NO_KEYS}", file=sys.stderr, flush=True)


def _check_coordinator(member: Membership, wait_s: float, is_hosted: bool) -> None:
    """Raise :class:`ClusterError` for an unknown host, and in rank 0 for a port that is taken.

    Where an agent listens there already, the port is not looked at.
    """
    host, port = member.address
    until_s = time.monotonic() + wait_s
    while True:  # names of pods appear some time after the pods
        try:
            socket.getaddrinfo(host.strip("[]"), port)
            break
        except OSError as error:
            if time.monotonic() > until_s:
                raise ClusterError(
                    f"rank {member.rank} (host {socket.gethostname()}): unknown host {host!r} in "
                    f"the coordinator's address {member.coordinator} ({member.source}): {error}. "
                    f"Set {COORDINATOR}=host:port to an address of rank 0 that all hosts reach."
                ) from error
            time.sleep(_ASK_EVERY_S)
    if member.rank == 0 and member.processes > 1 and not is_hosted:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                raise _port_is_taken(member, port) from error


def _port_is_taken(member: Membership, port: int) -> ClusterError:
    return ClusterError(
        f"rank {member.rank} (host {socket.gethostname()}): port {port} is taken by another "
        f"program. The group needs {member.coordinator} ({member.source}) and the port after it: "
        f"end that program, or choose another port ({COORDINATOR}=host:port for all processes)."
    )


def _versions() -> Facts:
    names = ("jax", "jaxlib", "keras", "meshwright")
    return {"Python": sys.version.split()[0], **{name: _version(name) for name in names}}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def agree(call: str, facts: Callable[[], Facts]) -> None:
    """Compare what all processes of the group are about to do; alone, nothing is computed.

    Every process must make the same calls in the same order. Raises
    :class:`~meshwright.AgreementError` in all of them where they differ.
    """
    if _agent is not None and _joined is not None:
        standby.note_loaded(loaded_path(_agent, _joined.rank))
    if _attendance is not None:
        with progress.inside("barrier"):
            _attendance.agree({"call": call, **facts()})


def compared_member() -> Membership | None:
    """The place of this process in its group, if the group compares what it does."""
    return None if _attendance is None else _joined


def _initialize(member: Membership, wait_s: float, is_hosted: bool) -> None:
    import jax

    settle_cpu_pool()
    _choose_collectives()
    # JAX gives rank 0 a service in any case: where an agent has the real one, nothing meets there.
    with _compat.leaving_sigterm():
        jax.distributed.initialize(
            os.environ.pop(RELAY, "") or member.coordinator,
            num_processes=member.processes,
            process_id=member.rank,
            initialization_timeout=max(1, round(wait_s)),
            coordinator_bind_address=_UNUSED if is_hosted else None,
        )
    neighbors.meet(member, wait_s)


def _choose_collectives() -> None:
    """Gloo on CPUs, unless the user has chosen others, such as MPI."""
    import jax

    name = "jax_cpu_collectives_implementation"
    if getattr(jax.config, name, None) in (None, "none"):
        jax.config.update(name, "gloo")


# The agent: the launcher of this host, or a companion of this process


def _start_agent(member: Membership, hub: str, listener: socket.socket | None) -> None:
    """Start a companion, where something else than Meshwright has started this process.

    That of rank 0 takes the ``listener`` over, at which the others meet it.
    """
    from . import companion
    from .private_folder import PrivateFolder

    global _folder
    _folder = PrivateFolder()
    progress.new_board(board_path(_folder.path, member.rank))
    _follow_agent(member, _folder.path)
    place = (member.rank, member.processes, os.getpid(), str(_folder.path))
    charge = companion.Charge(*place, hub, member.coordinator, *_agent_limits_s())
    if listener is not None:
        with listener:
            companion.start(dataclasses.replace(charge, listener=listener.fileno()))
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        companion.start(dataclasses.replace(charge, relay=listener.fileno()))
        os.environ[RELAY] = f"127.0.0.1:{listener.getsockname()[1]}"


def _agent_limits_s() -> tuple[float, float]:
    """How long a step may take, and a rank do nothing: from the environment."""
    values: dict[str, object] = {}
    for name, otherwise in ((STALL, 10.0), (SCRIPT, SCRIPT_S)):
        text = os.environ.get(name) or otherwise
        try:
            values[name] = float(text)
        except ValueError:
            values[name] = text
    if faults := seconds_faults(**values):
        raise ClusterError("\n".join(faults))
    return cast("tuple[float, float]", tuple(values.values()))


def _leave_after_failure(rank: int) -> None:
    """After a failure JAX would wait for those that are gone until it is killed: so leave now."""
    if _agent is None:
        return
    failed = error_path(_agent, rank).exists()
    if _own_exit is not None:  # it is not caught: the program ends
        code, text = _own_exit
        error_path(_agent, rank).write_text(text)
        _leave(code)
    if failed:
        _failure_soon()  # the agents of the others hear of it
    if failed or Failure.read(failure_path(_agent)) is not None:
        _leave(1)


def _leave(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _follow_agent(member: Membership, folder: Path) -> None:
    """Write progress for the agent, and do as it says."""
    global _agent
    _agent = folder
    progress.report_to(progress.Board(board_path(_agent, member.rank)))
    stack = stack_path(_agent, member.rank).open("w")
    faulthandler.register(DUMP, stack, all_threads=True)
    if threading.current_thread() is threading.main_thread():
        signal.signal(TELL, _raise_process_error)
        sys.unraisablehook = functools.partial(_raise_again, sys.unraisablehook)
    sys.excepthook = functools.partial(_note_error, sys.excepthook, member.rank, folder)


def _note_error(
    before: Callable[..., Any],
    rank: int,
    folder: Path,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Report an error that ends the program; one because of another process with its name."""
    before(kind, error, trace)
    sys.stderr.flush()
    text = "".join(traceback.format_exception(kind, error, trace))
    error_path(folder, rank).write_text(text)
    progress.entering("failed")
    failure = _failure_soon() if _is_lost_sum(error) else None
    if failure is not None and failure.rank != rank:
        # In place of what raises it elsewhere: here it would only stop this report.
        print(f"{ProcessError.__module__}.ProcessError: {failure.error()}", file=sys.stderr)
        sys.stderr.flush()


def board_path(folder: Path, rank: int) -> Path:
    """The file to which a rank writes its progress."""
    return folder / f"rank{rank}.board"


def loaded_path(folder: Path, rank: int) -> Path:
    """The file in which a rank says what it has imported."""
    return folder / f"rank{rank}.loaded"


def stack_path(folder: Path, rank: int) -> Path:
    """The file to which a rank writes its stacks when it is asked to."""
    return folder / f"rank{rank}.stack"


def error_path(folder: Path, rank: int) -> Path:
    """The file to which a rank writes the traceback that ended it."""
    return folder / f"rank{rank}.error"


def failure_path(folder: Path) -> Path:
    """The file in which the agent says which process has failed."""
    return folder / "failure.json"


def lost_path(folder: Path) -> Path:
    """The file that is there once the connection to JAX's service is lost."""
    return folder / "lost"


_is_raised = False


def _raise_process_error(_number: int, frame: FrameType | None) -> None:
    """Raise it, once, unless the same failure is being handled: ``finally`` blocks run to the end.

    A report of an error that ends the program is not interrupted either.
    """
    global _is_raised
    failure = None if _agent is None else Failure.read(failure_path(_agent))
    if failure is None or _is_raised or progress.is_over():
        return
    if _is_lost_sum(sys.exception()) or _is_reporting(frame):
        return
    _is_raised = True
    raise failure.error()


def _is_lost_sum(error: BaseException | None) -> bool:
    """Whether an error may be one of JAX because another process is gone."""
    if isinstance(error, ValueError):
        return "Gloo" in str(error)
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError)


def _is_reporting(frame: FrameType | None) -> bool:
    """Whether the frame, or one around it, is in :func:`_note_error`."""
    while frame is not None and frame.f_code is not _note_error.__code__:
        frame = frame.f_back
    return frame is not None


def _raise_again(before: Any, unraisable: Any) -> None:
    """What was raised during a collection of garbage is lost: raise it once more."""
    global _is_raised
    if isinstance(unraisable.exc_value, ProcessError):
        _is_raised = False
        signal.raise_signal(TELL)
    else:
        before(unraisable)


_own_exit: tuple[int, str] | None = None  # what sys.exit left training with, and its traceback


@contextlib.contextmanager
def naming_failures() -> Iterator[None]:
    """An error of JAX because another process is gone becomes one that names the process.

    A program that leaves by ``sys.exit`` with an error code is a failure, too: the others would
    wait for it.
    """
    import jax

    global _own_exit
    _own_exit = None
    try:
        yield
    except SystemExit as error:
        if (code := _exit_code(error)) not in (0, PREEMPTED):
            _own_exit = code, traceback.format_exc()
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # gloo's are of either kind
        failure = _failure_soon()
        if failure is None or _joined is None or failure.rank == _joined.rank:
            raise
        raise failure.error() from error


def _exit_code(error: SystemExit) -> int:
    """What Python ends with: text, as of ``sys.exit("no rows")``, is printed and means 1.

    >>> [_exit_code(SystemExit(code)) for code in (None, 3, "no rows")]
    [0, 3, 1]
    """
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _failure_soon() -> Failure | None:
    if _agent is None:
        return None
    began_s = time.monotonic()
    while (failure := Failure.read(failure_path(_agent))) is None:
        patience_s = _WORD_OF_HOSTS_S if lost_path(_agent).exists() else _WORD_S
        if time.monotonic() > began_s + patience_s:
            return None
        time.sleep(0.02)
    return failure
