"""Why a plan is as it is: what each choice brings and costs, beside the same plan without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...units import bytes_text, seconds_text
from .choices import Choices, Layouts, remat_text
from .compact import Compact
from .cost import bytes_by_kind, cost_of, masks_of
from .plan import Reason
from .setting import Setting

_SMALL_SHARE = 1e-3  # of the step, or of the peak: what is less is not worth a word


def reasons(problem: Compact, setting: Setting, layouts: Layouts) -> tuple[Reason, ...]:
    """What each choice of an answer brings and costs: the model with it and without it."""
    result = [
        Reason(
            f"{family} over {'+'.join(axes)}",
            _difference(problem, setting, _without(layouts, family), layouts),
        )
        for family, axes in layouts.rules
    ]
    choices = layouts.choices
    others = {
        f"ZeRO {choices.zero}": Choices(0, choices.accumulate, choices.remat),
        f"{choices.accumulate} micro-batches": Choices(choices.zero, 1, choices.remat),
        remat_text(choices.remat): Choices(choices.zero, choices.accumulate),
    }
    for name, other in others.items():
        if other != choices:
            before = Layouts(layouts.axes, layouts.rules, other)
            result.append(Reason(name, _difference(problem, setting, before, layouts)))
    return tuple(result)


def _without(layouts: Layouts, family: str) -> Layouts:
    rules = tuple(pair for pair in layouts.rules if pair[0] != family)
    return Layouts(layouts.axes, rules, layouts.choices)


def _difference(
    problem: Compact, setting: Setting, before: Layouts, after: Layouts
) -> tuple[str, ...]:
    """What changes from one answer to another."""
    old, new = _measured(problem, setting, before), _measured(problem, setting, after)
    return (*_of_bytes(old, new), *_of_time(old, new))


def _measured(problem: Compact, setting: Setting, layouts: Layouts) -> dict[str, Any]:
    masks = masks_of(problem, layouts.axes, dict(layouts.rules))
    cost = cost_of(problem, setting, masks, layouts.choices)
    talk: dict[str, float] = {}
    for term in cost.terms:
        talk[term.collective] = talk.get(term.collective, 0.0) + term.communication_s
    kinds = bytes_by_kind(problem, setting, masks, layouts.choices)
    return {"cost": cost, "talk": talk, "kinds": kinds}


def _of_bytes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    saved = old["cost"].peak_bytes - new["cost"].peak_bytes
    if abs(saved) <= _SMALL_SHARE * old["cost"].peak_bytes:
        return
    kinds = {kind: old["kinds"].get(kind, 0) - new["kinds"].get(kind, 0) for kind in old["kinds"]}
    most = max(kinds, key=lambda kind: kinds[kind] * (1 if saved > 0 else -1))
    named = {"copy": "copies", "state": "state"}.get(most, f"{most}s")
    yield f"{'saves' if saved > 0 else 'takes'} {bytes_text(abs(saved))}, most of it {named}"


def _of_time(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if old["cost"].time_s is None or new["cost"].time_s is None:
        return
    small = _SMALL_SHARE * old["cost"].time_s
    computed = old["cost"].compute_s - new["cost"].compute_s
    if abs(computed) > small:
        yield f"{'saves' if computed > 0 else 'costs'} {seconds_text(abs(computed))} of compute"
    for kind in dict.fromkeys([*new["talk"], *old["talk"]]):
        spent = new["talk"].get(kind, 0.0) - old["talk"].get(kind, 0.0)
        if kind and abs(spent) > small:
            yield f"{'costs' if spent > 0 else 'saves'} {seconds_text(abs(spent))} of {kind}"
