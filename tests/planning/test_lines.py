"""The lines of the user's code that collectives come from; a line that moves changes no program."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import optax
import pytest
from keras import layers
from models import shapes

import meshwright as mw
from meshwright.frontends.keras.abstract import abstract
from meshwright.jaxprs.lines import Lines, SourceLine, number_in
from meshwright.planning import Target, compiler_process
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.ahead import _exported

MESH = mw.Mesh({"batch": 4, "model": 2})
SPLIT = {"up": [None, "model"], "down": ["model", None]}
MODEL = """
import jax
import jax.numpy as jnp


def dense(x, kernel):
    return x @ kernel  # line 7


def loss(params, x):
    x = jax.nn.silu(dense(x, params["up"]))  # line 11
    x = jax.nn.silu(dense(x, params["down"]))  # line 12
    return jnp.mean(x * x)  # line 13
"""


def loss_in(file: Any, above: str = "") -> Callable[..., Any]:
    """The loss of a module with so much text above it."""
    room: dict[str, Any] = {}
    exec(compile(above + MODEL, str(file), "exec"), room)
    return room["loss"]


def program_of(loss: Callable[..., Any], params: Any = None) -> mw.Program:
    return mw.jax_program(
        loss, params or {"up": shapes(16, 32), "down": shapes(32, 16)}, optax.sgd(0.1)
    )


def lines_of(program: mw.Program, layouts: Any = SPLIT) -> tuple[bytes, tuple[SourceLine, ...]]:
    """The step that is compiled, and the lines of it."""
    placement = mw.Placement.of(MESH, layouts)
    described = abstract_step(program, shapes(8, 16), placement)
    step, _, lines = _exported(
        described.train, (described.state, described.batch), Target.of("cpu:8")
    )
    return step, lines


def test_a_collective_knows_its_line_and_one_that_moves_is_not_compiled_again(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    compiled = []
    run = compiler_process._ask
    monkeypatch.setattr(compiler_process, "_ask", lambda *args: compiled.append(args) or run(*args))

    def report(file: str, above: str) -> mw.DryRun:
        program = program_of(loss_in(tmp_path / file, above))
        placement = mw.Placement.of(MESH, SPLIT)
        return mw.dry_run(program, shapes(8, 16), strategy=placement, target="cpu:8")

    first = report("model.py", "")
    (forward,) = (e for e in first.collectives if e.axes == ("model",) and "forward" in e.phases)
    assert forward.lines == ("model.py:7",)
    (gradients,) = (e for e in first.collectives if e.axes == ("batch",))
    assert set(gradients.lines) <= {"model.py:7", "model.py:13"}
    assert "model.py:7" in gradients.lines
    assert "written in" in str(first)
    assert "model.py:7" in first.to_html()
    assert str(tmp_path) not in first.to_html()
    second = report("other.py", "# a\n# comment\n")
    assert len(compiled) == 1
    assert {line for e in second.collectives for line in e.lines} >= {"other.py:9"}
    assert not any("model.py" in line for e in second.collectives for line in e.lines)


def test_where_lines_and_files_move_the_step_is_the_same_to_the_byte(tmp_path):
    step, lines = lines_of(program_of(loss_in(tmp_path / "a.py")))
    moved, others = lines_of(program_of(loss_in(tmp_path / "b.py", "\n" * 40)))
    assert step == moved
    assert [line.line + 40 for line in lines] == [other.line for other in others]
    assert b"a.py" not in step
    assert [line.function for line in lines][:1] == ["dense"]


def test_a_library_function_that_is_compiled_once_has_the_line_of_each_call(tmp_path):
    _, lines = lines_of(program_of(loss_in(tmp_path / "a.py")))
    assert [line.line for line in lines] == [7, 11, 12, 13]


def test_inside_loops_and_functions_of_the_users_own_their_lines_are_meant():
    @jax.jit
    def own(x):
        return x * 2.0  # inside own

    def loss(params, x):
        def body(x, kernel):
            return x @ kernel, None  # inside body

        x = own(x)
        return jnp.sum(jax.lax.scan(body, x, params["kernels"])[0])

    source, begin = inspect.getsourcelines(
        test_inside_loops_and_functions_of_the_users_own_their_lines_are_meant
    )
    _, lines = lines_of(
        program_of(loss, {"kernels": shapes(3, 16, 16)}), {"kernels": [None, None, "model"]}
    )
    here = {line.line - begin for line in lines if line.file == __file__}
    for words in ("# inside own", "# inside body"):
        assert next(n for n, text in enumerate(source) if words in text) in here


class Twice(layers.Layer):
    """A layer of the user's, whose call has lines."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = layers.Dense(16, name="inner")

    def call(self, x: Any) -> Any:
        return x + self.inner(x)


def test_of_keras_models_the_lines_of_the_users_own_layers_are_known():
    with abstract():
        model = keras.Sequential([keras.Input([16]), Twice(), layers.Dense(4, name="last")])
        model.compile("adam", "mse")
    strategy = mw.Sharded(MESH, {"last/kernel": [None, "model"]})
    described = strategy.abstract_step(model, (shapes(8, 16), shapes(8, 4)))
    _, _, lines = _exported(described.train, (described.state, described.batch), Target.of("cpu:8"))
    assert {line.function for line in lines} == {"Twice.call"}
    assert all(line.file == __file__ for line in lines)


def test_a_step_that_was_traced_before_keeps_its_lines(tmp_path):
    described = abstract_step(
        program_of(loss_in(tmp_path / "a.py")), shapes(8, 16), mw.Placement.of(MESH, SPLIT)
    )
    args = described.train, (described.state, described.batch), Target.of("cpu:8")
    first, again = _exported(*args), _exported(*args)
    assert first[2]
    assert again[2] == first[2]
    assert again[0] == first[0]


def test_training_and_checks_see_no_scopes_of_lines(tmp_path):
    trainer = mw.Trainer(
        program_of(
            loss_in(tmp_path / "a.py"), {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
        ),
        mw.Placement.of(mw.create_mesh({"batch": 4, "model": 2}), SPLIT),
    )
    text = trainer.step.lower(trainer.init(), trainer.put(jnp.ones((8, 16)))).as_text(
        debug_info=True
    )
    assert number_in(text) is None


@pytest.mark.parametrize(
    ("file", "shown_path"),
    [
        ("sub/model.py", "sub/model.py:3"),
        ("/elsewhere/deep/down/model.py", "down/model.py:3"),
        ("<stdin>", "<stdin>:3"),
    ],
)
def test_a_line_is_told_from_here_and_gives_no_machine_away(
    file, shown_path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert str(SourceLine(file, 3, "f")) == shown_path
    assert str(SourceLine(str(tmp_path / "sub" / "model.py"), 3, "f")) == "sub/model.py:3"


def test_numbers_go_by_order_of_appearance():
    lines = Lines()
    one, two = SourceLine("a", 9, "f"), SourceLine("a", 2, "f")
    assert [lines.number(line) for line in (one, two, one)] == [0, 1, 0]
    assert lines.all() == (one, two)
