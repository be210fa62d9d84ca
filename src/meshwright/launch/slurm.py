"""What Slurm's variables say of the tasks of a step: texts in, values out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from ..errors import ClusterError
from .variables import Environment, need

_NEEDS = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodes(text: str) -> list[str]:
    """The hosts of a node list, in its order.

    Raises :class:`~meshwright.errors.ClusterError` for an invalid node list.

    >>> expand_nodes("n[01-02,07],gpu3")
    ['n01', 'n02', 'n07', 'gpu3']
    """
    if not re.fullmatch(r"(?:[^\[\],\s]|,(?!,|$)|\[[^\[\]]+\])+", text) or text.startswith(","):
        raise _no_node_list(text)
    entries = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text)
    return [host for entry in entries for host in _expand_entry(entry, text)]


def _expand_entry(entry: str, text: str) -> list[str]:
    pieces = re.split(r"(\[[^\]]*\])", entry)
    choices = [
        _numbers(piece[1:-1], text) if piece.startswith("[") else [piece] for piece in pieces
    ]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _numbers(ranges: str, text: str) -> list[str]:
    matches = [_RANGE.fullmatch(part) for part in ranges.split(",")]
    numbers = []
    for match in matches:
        if match is None:
            raise _no_node_list(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _no_node_list(text)
        # As many digits as the first has: [08-10] is 08, 09, 10.
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def tasks_per_node(text: str) -> list[int]:
    """How many tasks each node has, in order of the nodes.

    Raises :class:`~meshwright.errors.ClusterError` for any other text.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    matches = [_COUNT.fullmatch(part.strip()) for part in text.split(",")]
    counts: list[int] = []
    for match in matches:
        if match is None:
            raise ClusterError(
                "SLURM_STEP_TASKS_PER_NODE must be a list of counts such as '2(x3),1'; "
                f"received {text!r}."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def parse_jobs(text: str) -> dict[str, int]:
    """How many tasks each job has, in the order in which ranks are given out.

    Raises :class:`~meshwright.errors.ClusterError` for any other text.

    >>> parse_jobs("chief=1,ps=2,worker=4")
    {'chief': 1, 'ps': 2, 'worker': 4}
    """
    matches = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part) for part in text.split(",")]
    jobs = [(match[1], int(match[2])) for match in matches if match is not None]
    if len(jobs) != len(matches) or len(dict(jobs)) != len(jobs):
        raise ClusterError(
            f"MESHWRIGHT_JOBS={text!r} does not say how many tasks each job has. "
            "It reads 'chief=1,ps=2,worker=4'."
        )
    return dict(jobs)


def in_step(variables: Environment) -> bool:
    """Whether these are the variables of a step with more than one task."""
    # A job of one process, such as an interactive shell, is no cluster.
    return bool(variables.get("SLURM_PROCID")) and (
        variables.get("SLURM_STEP_NUM_TASKS", "1") not in ("", "0", "1")
    )


def places(variables: Environment) -> list[tuple[str, int]]:
    """For each rank its host, and which of that host's tasks it is.

    Raises :class:`ClusterError` where variables are missing or do not agree.
    """
    need(variables, _NEEDS, "a step of Slurm (what srun starts)")
    hosts = expand_nodes(variables["SLURM_STEP_NODELIST"])
    counts = tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"])
    if len(hosts) != len(counts):
        raise ClusterError(
            f"SLURM_STEP_NODELIST names {len(hosts)} nodes ({', '.join(hosts)}), and "
            f"SLURM_STEP_TASKS_PER_NODE counts the tasks of {len(counts)}: {counts}."
        )
    placed = [(h, i) for h, count in zip(hosts, counts, strict=True) for i in range(count)]
    num_tasks, rank = variables["SLURM_STEP_NUM_TASKS"], variables["SLURM_PROCID"]
    if num_tasks != str(len(placed)):
        raise ClusterError(
            f"SLURM_STEP_NUM_TASKS is {num_tasks}, and SLURM_STEP_TASKS_PER_NODE adds up to "
            f"{len(placed)}."
        )
    if not rank.isdecimal() or int(rank) >= len(placed):
        raise ClusterError(f"SLURM_PROCID is {rank}: ranks go from 0 to {len(placed) - 1}.")
    return placed


def first_ranks(counts: Mapping[str, int], num_tasks: int) -> dict[str, int]:
    """The first rank of each job; :class:`ClusterError` unless there are as many as tasks."""
    if sum(counts.values()) != num_tasks:
        jobs_text = ", ".join(f"{job}={n}" for job, n in counts.items())
        raise ClusterError(
            f"the jobs ({jobs_text}) have {sum(counts.values())} tasks together, and the step has "
            f"{num_tasks}. Change MESHWRIGHT_JOBS (or jobs=), or `srun --ntasks`."
        )
    firsts = [0, *itertools.accumulate(counts.values())]
    return dict(zip(counts, firsts, strict=False))


def check_place(rank: int, place: tuple[str, int], variables: Environment) -> None:
    """Raise :class:`ClusterError` if Slurm has put this rank elsewhere."""
    host, local = place
    seen_host = variables.get("SLURMD_NODENAME", host)
    seen_local = variables.get("SLURM_LOCALID", str(local))
    if (seen_host, seen_local) != (host, str(local)):
        raise ClusterError(
            f"rank {rank} is task {seen_local} of {seen_host}, where ranks given out block by "
            f"block make it task {local} of {host}. Use `srun --distribution=block`."
        )


def _no_node_list(text: str) -> ClusterError:
    return ClusterError(
        f"SLURM_STEP_NODELIST must be a list of nodes such as 'n[01-04],m7'; received {text!r}."
    )
