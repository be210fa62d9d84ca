"""Requests share batches where rows leave each other alone; what fails, fails alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw

PARAMS = {"w": np.random.default_rng(0).normal(size=[3, 2]).astype("float32")}
EXAMPLE = np.zeros([1, 3], "float32")


def linear(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"])


def rows(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=[count, 3]).astype("float32")


def serve(function: Callable[..., Any], example: Any = EXAMPLE, **options: Any) -> mw.Server:
    return mw.Server(function, params=PARAMS, example=example, name="f", **options)


class Gate:
    """A function whose batches wait until the gate is opened; it notes the rows of each."""

    def __init__(self) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        self.is_on = False

    def pass_through(self, x: np.ndarray) -> np.ndarray:
        if self.is_on:
            self.entered.set()
            assert self.opened.wait(20)
        if np.any(x == 13):
            raise RuntimeError("thirteen")
        return x

    def function(self, params: Any, x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return linear(params, jax.pure_callback(self.pass_through, shape, x))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Rows meet in a callback, as far as JAX knows: here they are said not to."""
    from meshwright.serving.forward import Forward

    monkeypatch.setattr(Forward, "why_alone", lambda self, most: None)
    gate = Gate()
    yield gate
    gate.opened.set()


def gather(*calls: Any) -> list[Any]:
    async def together() -> list[Any]:
        return await asyncio.gather(*[call() for call in calls], return_exceptions=True)

    return asyncio.run(together())


def test_a_row_is_answered_alike_wherever_it_stands_in_a_bucket() -> None:
    with serve(linear, buckets=[8]) as server:
        x = rows(8)
        together = server.answer({"input": x}).outputs["output"]
        for n in range(8):
            alone = server.answer({"input": x[n : n + 1]}).outputs["output"]
            np.testing.assert_array_equal(alone[0], together[n])
        turned = server.answer({"input": x[::-1]}).outputs["output"]
        np.testing.assert_array_equal(turned[::-1], together)
        status = server.model("f").status()
    assert status.bucket_batches == {8: 10}
    np.testing.assert_allclose(together, np.tanh(x @ PARAMS["w"]), rtol=1e-6)


def test_what_waits_becomes_one_batch(gate: Gate) -> None:
    # Sizes that are named: those that are not are timed, and slow ones are left out.
    with serve(gate.function, buckets=[1, 2, 4]) as server:
        gate.is_on = True
        model = server.model("f")

        async def run() -> list[Any]:
            first = asyncio.ensure_future(model.predict({"input": rows(1)}))
            await asyncio.to_thread(gate.entered.wait, 20)
            others = [
                asyncio.ensure_future(model.predict({"input": rows(n, n)})) for n in (2, 1, 3, 1)
            ]
            await asyncio.sleep(0.05)
            assert (model.status().queued_rows, model.status().rows_in_flight) == (7, 1)
            gate.opened.set()
            return await asyncio.gather(first, *others)

        answers = asyncio.run(run())
        status = model.status()
    for n, answer in zip((2, 1, 3, 1), answers[1:], strict=True):
        np.testing.assert_allclose(
            answer.outputs["output"], np.tanh(rows(n, n) @ PARAMS["w"]), rtol=1e-5
        )
    assert status.batch_rows == {1: 1, 3: 1, 4: 1}  # 2 + 1 and the last 1 before the 3 that remain
    assert status.answers["answered"] == 5


class Later:
    """An output that an accelerator still computes, until the event is set."""

    def __init__(self, value: Any, computed: threading.Event) -> None:
        self.value, self.computed = value, computed
        self.is_on_its_way = False

    def copy_to_host_async(self) -> None:
        self.is_on_its_way = True

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        assert self.is_on_its_way
        assert self.computed.wait(20)
        return np.asarray(self.value)


def test_an_accelerator_gets_its_next_batch_while_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from meshwright.serving.forward import Forward

    computed, started, real = threading.Event(), list[int](), Forward._started

    def later(self: Forward, weights: Any, shape: Any, arrays: Any) -> list[Any]:
        started.append(shape.rows)
        return [Later(output, computed) for output in real(self, weights, shape, arrays)]

    monkeypatch.setattr(Forward, "is_on_cpu", False)
    with serve(linear, buckets=[1, 2, 4], in_flight=2) as server:
        monkeypatch.setattr(Forward, "_started", later)
        model = server.model("f")

        async def run() -> list[Any]:
            calls = []
            for n in (1, 2, 4):
                calls.append(asyncio.ensure_future(model.predict({"input": rows(n, n)})))
                await asyncio.sleep(0.05)
            assert started == [1, 2]  # the third waits until the first is answered
            assert model.status().queued_rows == 4
            computed.set()
            return await asyncio.gather(*calls)

        answers = asyncio.run(run())
    for n, answer in zip((1, 2, 4), answers, strict=True):
        expected = np.tanh(rows(n, n) @ PARAMS["w"])
        np.testing.assert_allclose(answer.outputs["output"], expected, rtol=1e-5)


def test_more_rows_than_a_batch_has_are_answered_by_one_version() -> None:
    with serve(linear, max_rows=4) as server:
        answer = server.answer({"input": rows(11)})
        status = server.model("f").status()
    np.testing.assert_allclose(answer.outputs["output"], np.tanh(rows(11) @ PARAMS["w"]), rtol=1e-5)
    assert status.batch_rows == {3: 1, 4: 2}


def taken(params: Any, x: Any) -> Any:
    """By indices: JAX traces it in another form where a dim, such as that of rows, is one."""
    order = jax.numpy.argsort(x, axis=1)
    return linear(params, jax.numpy.take_along_axis(x, order, axis=1))


def other_alone(params: Any, x: Any) -> Any:
    return linear(params, x) * (2 if x.shape[0] == 1 else 1)


def test_a_row_by_itself_may_be_traced_in_another_form() -> None:
    with serve(taken, buckets=[1, 4]) as server:
        model = server.model("f")
        assert model.why_alone is None
        answers = [server.answer({"input": rows(n)}).outputs["output"] for n in (1, 3)]
        assert model.status().bucket_batches == {1: 1, 4: 1}
    np.testing.assert_allclose(answers[0], answers[1][:1], rtol=1e-6)


def test_a_row_that_is_answered_by_nan_either_way_is_served() -> None:
    def roots(params: Any, x: Any) -> Any:
        return jnp.sqrt(-1 - taken(params, x))

    with serve(roots, buckets=[1, 4]) as server:
        assert np.isnan(server.answer({"input": rows(1)}).outputs["output"]).all()


def test_a_row_by_itself_with_another_answer_is_refused() -> None:
    with pytest.raises(mw.ModelError, match="one row by itself has another answer than beside"):
        serve(other_alone, buckets=[1, 4]).load()
    with serve(other_alone, buckets=[2, 4]) as server:
        assert server.model("f").why_alone is None


def test_rows_that_meet_are_computed_alone() -> None:
    def centred(params: Any, x: Any) -> Any:
        return linear(params, x - x.mean(0))

    with serve(centred) as server:
        x = rows(3)
        answer = server.answer({"input": x}).outputs["output"]
        model = server.model("f")
        assert "reduce_sum over dim 0" in model.why_alone
        assert model.status().bucket_batches == {3: 1}
    np.testing.assert_allclose(answer, np.tanh((x - x.mean(0)) @ PARAMS["w"]), rtol=1e-5)


def test_others_are_answered_while_a_shape_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.serving.forward import Forward

    def centred(params: Any, x: Any) -> Any:
        return linear(params, x - x.mean(0))

    begun, go_on = threading.Event(), threading.Event()
    compile = Forward.compile

    def slow(self: Forward, shapes: Any) -> None:
        if any(shape.rows in (3, 5) for shape in shapes):
            begun.set()
            assert go_on.wait(20)
        if any(shape.rows == 5 for shape in shapes):
            raise RuntimeError("no such shape")
        compile(self, shapes)

    monkeypatch.setattr(Forward, "compile", slow)
    x = rows(3)
    with serve(centred) as server:
        model = server.model("f")

        async def run() -> tuple[Any, ...]:
            odd = asyncio.ensure_future(model.predict({"input": x}))
            await asyncio.to_thread(begun.wait, 20)
            wrong = asyncio.ensure_future(model.predict({"input": rows(5)}))
            one = await model.predict({"input": x[:1]})
            assert not odd.done()
            go_on.set()
            return one, await odd, *await asyncio.gather(wrong, return_exceptions=True)

        one, odd, wrong = asyncio.run(run())
        assert isinstance(wrong, mw.ModelFailedError), wrong
    np.testing.assert_allclose(one.outputs["output"], np.zeros([1, 2]), atol=1e-6)
    expected = np.tanh((x - x.mean(0)) @ PARAMS["w"])
    np.testing.assert_allclose(odd.outputs["output"], expected, rtol=1e-5)


def test_a_server_that_ends_answers_what_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.serving.compiling import Aside

    def centred(params: Any, x: Any) -> Any:
        return linear(params, x - x.mean(0))

    begun, closing = threading.Event(), threading.Event()
    answer, close = Aside._answer, Aside.close

    def slow(*args: Any) -> None:
        begun.set()
        assert closing.wait(20)
        answer(*args)

    def ends(self: Aside) -> None:
        closing.set()
        close(self)

    monkeypatch.setattr(Aside, "_answer", slow)
    monkeypatch.setattr(Aside, "close", ends)
    answers = []
    with serve(centred) as server:
        asks = threading.Thread(
            target=lambda: answers.append(server.answer({"input": rows(3)}).outputs["output"])
        )
        asks.start()
        assert begun.wait(20)
    asks.join(20)
    assert answers[0].shape == (3, 2)


def test_a_full_queue_late_and_cancelled_requests(gate: Gate) -> None:
    with serve(gate.function, max_rows=2, queue_rows=3) as server:
        gate.is_on = True
        model = server.model("f")

        async def run() -> list[Any]:
            first = asyncio.ensure_future(model.predict({"input": rows(1)}))
            await asyncio.to_thread(gate.entered.wait, 20)
            late = asyncio.ensure_future(model.predict({"input": rows(1)}, timeout_s=0.05))
            gone = asyncio.ensure_future(model.predict({"input": rows(1)}))
            answer = asyncio.ensure_future(model.predict({"input": rows(1)}))
            await asyncio.sleep(0.01)
            with pytest.raises(mw.OverloadedError, match=r"3 row\(s\) wait and 1 more") as full:
                await model.predict({"input": rows(1)})
            assert full.value.retry_after_s > 0
            gone.cancel()
            with pytest.raises(mw.DeadlineError, match="no answer after"):
                await late
            assert model.status().queued_requests == 1
            again = asyncio.ensure_future(model.predict({"input": rows(1)}))
            await asyncio.sleep(0.01)
            gate.opened.set()
            return await asyncio.gather(first, answer, again)

        assert len(asyncio.run(run())) == 3
        status = model.status()
    assert status.batch_rows == {1: 1, 2: 1}
    counted = {name: n for name, n in status.answers.items() if n}
    assert counted == {"answered": 3, "overloaded": 1, "deadline": 1, "cancelled": 1}
    assert not server.ready
    with pytest.raises(mw.NotReadyError):
        server.answer({"input": rows(1)})
    with server:  # begins again, and compiles nothing
        assert server.answer({"input": rows(1)}).version == "1"


def test_an_error_inside_the_model_fails_its_batch_alone(gate: Gate) -> None:
    with serve(gate.function, max_rows=2) as server:
        with pytest.raises(mw.ModelFailedError, match="model 'f' raised"):
            server.answer({"input": np.full([1, 3], 13.0)})
        assert server.answer({"input": rows(1)}).outputs["output"].shape == (1, 2)


def test_answers_that_are_not_finite_are_refused_one_by_one() -> None:
    def root(params: Any, x: Any) -> Any:
        return jnp.sqrt(x[:, 0])

    with serve(root, finite=True, buckets=[2]) as server:
        model = server.model("f")
        good, bad = gather(
            lambda: model.predict({"input": np.ones([1, 3])}),
            lambda: model.predict({"input": -np.ones([1, 3])}),
        )
    assert good.outputs["output"].tolist() == [1.0]
    assert isinstance(bad, mw.ModelFailedError)


def test_a_wrong_request_lists_every_fault() -> None:
    def both(params: Any, x: Any) -> Any:
        return {"out": linear(params, x["a"]) + x["b"][:, None]}

    example = {"a": EXAMPLE, "b": np.zeros([1], "int32")}
    with serve(both, example) as server:
        with pytest.raises(mw.RequestError) as wrong:
            server.answer({"a": np.zeros([2, 4]), "c": [1]})
        with pytest.raises(
            mw.RequestError, match=r"by name, .*received ndarray\. Pass \{'a': rows"
        ):
            server.answer(np.zeros([2, 3]))
        with pytest.raises(mw.RequestError, match="'b' has dtype float64: expected int32"):
            server.answer({"a": rows(1), "b": [1.5]})
        with pytest.raises(mw.RequestError, match="differ in their rows"):
            server.answer({"a": rows(1), "b": [1, 2]})
        with pytest.raises(
            mw.RequestError, match="'b': value 4294967301 is outside the range of int32"
        ):
            server.answer({"a": rows(1), "b": [2**32 + 5]})
        with pytest.raises(
            mw.RequestError, match=r"'a': value 1e\+300 is outside the range of float32"
        ):
            server.answer({"a": [[1.0, np.inf, 1e300]], "b": [1]})
        answer = server.answer({"a": rows(2), "b": [1, 2]})
    assert str(wrong.value).splitlines()[1:] == [
        "  input 'a' has shape (2, 4): expected a float32[rows, 3]",
        "  input 'b' is missing: expected b int32[rows]",
        "  input 'c' is unknown; the inputs are a, b",
    ]
    assert answer.outputs["out"].shape == (2, 2)


@pytest.mark.full
def test_ragged_lengths_are_padded_where_that_changes_nothing() -> None:
    import keras

    ids = keras.Input([None], dtype="int32", name="ids")
    x = keras.layers.Embedding(9, 4, mask_zero=True)(ids)
    per_token = keras.layers.Dense(2, name="per_token")(x)
    mean = keras.layers.GlobalAveragePooling1D(name="mean")(x)
    model = keras.Model(ids, [per_token, mean], name="ragged")
    with mw.Server(model, lengths=[4, 8], buckets=[2]) as server:
        served = server.model("ragged")
        assert [str(spec) for spec in served.outputs] == [
            "per_token float32[rows, ?, 2]",
            "mean float32[rows, 4]",
        ]
        for length in (2, 4, 7):
            sent = np.arange(1, length + 1)[None]
            answer = server.answer({"ids": sent})
            expected = model.predict(sent, verbose=0)
            np.testing.assert_allclose(answer.outputs["per_token"], expected[0], atol=1e-6)
            np.testing.assert_allclose(answer.outputs["mean"], expected[1], atol=1e-6)
        with pytest.raises(mw.RequestError, match="9 long; the longest accepted is 8"):
            server.answer({"ids": np.ones([1, 9], "int32")})

    x = keras.layers.Embedding(9, 4)(ids)
    unmasked = keras.Model(ids, keras.layers.GlobalAveragePooling1D()(x))
    with pytest.raises(mw.ModelError, match="padding a row from 2 to 4 with 0 changes"):
        mw.Server(unmasked, lengths=[4], buckets=[2]).load()
