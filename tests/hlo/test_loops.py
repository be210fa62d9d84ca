"""How often loops of compiled programs run, on small programs as XLA writes them."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from meshwright.hlo.costs import read_costs
from meshwright.hlo.loops import rounds, trip_count
from meshwright.hlo.text import parse

TEXT = """HloModule m, is_scheduled=true

%condition (held: (s32[], s32[], f32[8,8])) -> pred[] {{
  %held = (s32[], s32[], f32[8,8]) parameter(0)
  %at = s32[]{{:T(128)}} get-tuple-element(%held), index=0
  %end = s32[] {end}
  ROOT %less = pred[] compare({compared}), direction={direction}
}}

%grow (old: s32[]) -> s32[] {{
  %old = s32[] parameter(0)
  %by = s32[] constant({step})
  ROOT %grown = s32[] {change}(%old, %by)
}}

%body (held.1: (s32[], s32[], f32[8,8])) -> (s32[], s32[], f32[8,8]) {{
  %held.1 = (s32[], s32[], f32[8,8]) parameter(0)
  %at.1 = s32[] get-tuple-element(%held.1), index=0
  %end.1 = s32[] get-tuple-element(%held.1), index=1
  %x = f32[8,8]{{1,0}} get-tuple-element(%held.1), index=2
  %next = s32[] fusion(%at.1), kind=kLoop, calls=%grow
  %copied = s32[] copy(%next)
  %y = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %held.2 = (s32[], s32[], f32[8,8]) tuple(%copied, {kept}, %y)
}}

ENTRY %main (p: f32[8,8], n: s32[]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  %n = s32[] parameter(1)
  %begin = s32[] constant({begin})
  %bound = s32[] constant({bound})
  %whole = (s32[], s32[], f32[8,8]) tuple(%begin, {held}, %p)
  %loop = (s32[], s32[], f32[8,8]) while(%whole), condition=%condition, body=%body
  ROOT %out = f32[8,8]{{1,0}} get-tuple-element(%loop), index=2
}}
"""
WRITTEN = {
    "end": "constant(8)",
    "compared": "%at, %end",
    "direction": "LT",
    "step": 1,
    "change": "add",
    "kept": "%end.1",
    "begin": 0,
    "bound": 8,
    "held": "%bound",
}
IN_THE_TUPLE = {"end": "get-tuple-element(%held), index=1"}


def trips(**other):
    text = TEXT.format(**{**WRITTEN, **other})
    long, short = trip_count_of(text), trip_count_of(in_short(text))
    assert long == short
    return long


def trip_count_of(text):
    module = parse(text)
    inside = module.computations["main"]
    return trip_count(module, inside.by_name["loop"], inside)


def in_short(text):
    """The same program as newer dumps write it: items of tuples have no line of their own."""
    items = re.findall(r"\n  (%[\w.]+) = \S+ get-tuple-element\((%[\w.]+)\), index=(\d+)", text)
    for name, whole, index in items:
        text = re.sub(rf"\n  {name} = .*", "", text)
        text = re.sub(rf"{name}(?![\w.])", f"{whole}#{index}", text)
    assert len(items) >= 4
    return text


@pytest.mark.parametrize(
    ("other", "count"),
    [
        ({}, 8),
        ({"step": 2}, 4),
        ({"step": 3}, 3),
        ({"begin": 5, "step": 2}, 2),
        ({"begin": 8}, 0),
        ({"direction": "LE", "step": 2}, 5),
        ({"direction": "NE", "step": 2}, 4),
        ({"direction": "GT", "begin": 8, "end": "constant(0)", "step": -2}, 4),
        ({"direction": "GE", "begin": 8, "end": "constant(0)", "step": 2, "change": "subtract"}, 5),
        ({"compared": "%end, %at", "direction": "GT", "step": 2}, 4),
        ({**IN_THE_TUPLE, "step": 2}, 4),
        ({**IN_THE_TUPLE, "bound": 7, "step": 2}, 4),
        ({**IN_THE_TUPLE, "compared": "%end, %at", "direction": "GE", "step": 2}, 5),
    ],
)
def test_a_counter_and_its_bound_give_the_rounds(other, count):
    assert trips(**other) == count


@pytest.mark.parametrize(
    "other",
    [
        {"direction": "NE", "step": 3},  # never meets its bound
        {"direction": "GE"},  # grows away from it
        {"step": 0},
        {"change": "multiply"},
        {**IN_THE_TUPLE, "kept": "%at.1"},  # the bound changes in each round
        {**IN_THE_TUPLE, "held": "%n"},  # the bound is an argument of the program
    ],
)
def test_what_the_text_does_not_say_is_not_made_up(other):
    begin = {"begin": 9} if other.get("direction") == "GE" else {}
    assert trips(**other, **begin) is None


def test_rounds_are_those_counted_one_by_one():
    passes = {
        "LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__,
        "GE": int.__ge__, "EQ": int.__eq__, "NE": int.__ne__,
    }  # fmt: skip
    values = range(-4, 5)
    for begin, step, end in itertools.product(values, values, values):
        for direction, holds in passes.items():
            counted = next((k for k in range(50) if not holds(begin + k * step, end)), None)
            assert rounds(begin, step, direction, end) == counted, (begin, step, direction, end)


def test_a_loop_in_a_loop_is_multiplied_out():
    def inner(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x)

    def nested(x):
        return jax.lax.fori_loop(0, 5, lambda _, x: inner(x), x)

    text = jax.jit(nested).lower(jnp.ones((8, 8))).compile().as_text()
    bare = "".join(text.split('"known_trip_count":{"n":"3"}')).replace('"known_trip_count"', '"x"')
    assert "known_trip_count" not in bare
    for program in (text, bare):
        assert read_costs(program).flops == 3 * 5 * 2 * 8**3
