"""The app: routes, every error with its status, limits, keys, and clients that leave."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib
from typing import Any

import pytest
from http_calls import Call, call, running
from http_models import FAULTS, Linear, Pair, Shelf
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

import meshwright as mw
from meshwright.errors import ServingError
from meshwright.serving.http import app as app_module
from meshwright.serving.http.app import serving_app
from meshwright.serving.http.keys import read_keys
from meshwright.serving.http.limits import Limits
from meshwright.serving.http.log import LOGGER, JsonLines

ROW = {"instances": [[1, 2, 3, 4]]}
KEY = "k" * 32


def app_of(*models: Linear, **how: Any) -> Starlette:
    return serving_app(Shelf(*(models or (Linear(),))), **how)


class Failing(Shelf):
    """Starts the second time."""

    fails = True

    async def start(self) -> None:
        if self.fails:
            raise mw.CheckpointError("there is no checkpoint.")
        await super().start()


class Swapping(Shelf):
    """Its versions have just been swapped, the first time that they are asked for."""

    swaps = 1

    def versions(self, name: str) -> tuple[str, ...]:
        self.swaps -= 1
        return ("0",) if self.swaps >= 0 else super().versions(name)

    def model(self, name: str, version: str | None = None) -> Linear:
        assert version is not None, "who looks at a model takes a share of its traffic"
        return super().model(name, version)


# Answers


def test_several_inputs_and_outputs_pass_through_open_inference():
    inputs = [
        {"name": "tokens", "datatype": "INT32", "shape": [1, 3], "data": [1, 2, 3]},
        {"name": "scale", "datatype": "BF16", "shape": [1], "data": [0.5]},
    ]
    answered = call(app_of(Pair()), "POST", "/v2/models/pair/infer", {"inputs": inputs})
    assert [output["data"] for output in answered.json["outputs"]] == [[3.0], [2, 4, 6]]


def test_descriptions_and_health():
    app = app_of(Linear(), Linear(version="2"), Pair())
    assert call(app, "GET", "/v2/models/linear").json["versions"] == ["1", "2"]
    assert call(app, "GET", "/v2/models/pair").json["inputs"][0]["shape"] == [-1, -1]
    states = call(app, "GET", "/v1/models/linear").json["model_version_status"]
    assert [state["state"] for state in states] == ["AVAILABLE"] * 2
    meta = call(app, "GET", "/v1/models/pair/metadata").json["metadata"]["signature_def"]
    assert "serving_default" in meta["signature_def"]
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/pair/ready",
        "/ping",
        "/health",
    ):
        assert call(app, "GET", path).status == 200, path
    paths = call(app, "GET", "/openapi.json").json["paths"]
    assert {"/v2/models/pair/infer", "/v1/models/linear:predict", "/invocations"} <= set(paths)


def test_the_page_shows_models_layouts_and_how_to_call_them():
    page = call(app_of(Linear(), Pair("<evil>")), "GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    text = page.body.decode()
    assert "dense/" in text
    assert "curl http://127.0.0.1:8000/v1/models/linear:predict" in text
    assert "<evil>" not in text
    assert "&lt;evil&gt;" in text


def test_prometheus_reads_the_figures_of_the_engine_and_of_http():
    async def scenario() -> bytes:
        async with running(app_of()) as app:
            path = "/v1/models/linear:predict"
            await Call("POST", path, json.dumps(ROW).encode()).to(app)
            await Call("POST", path, b"{").to(app)
            return (await Call("GET", "/metrics").to(app)).body

    families = text_string_to_metric_families(asyncio.run(scenario()).decode())
    samples = {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}

    def value(name: str, **labels: str) -> float:
        return samples[f"meshwright_{name}", frozenset(labels.items())]

    model = {"model": "linear", "first_version": "1"}  # which a swap of weights does not change
    assert value("latency_seconds_count", **model) == 8
    assert value("latency_seconds_bucket", le="0.01", **model) == 7
    assert value("batches_total", bucket_rows="8", **model) == 5
    assert value("version", **model, version="1") == 1
    for status in ("200", "400"):
        assert value("http_requests_total", contract="tf_serving", status=status) == 1


def test_a_mounted_app_starts_with_its_first_request():
    inner = app_of()
    outer = Starlette(routes=[Mount("/models", inner)])

    async def scenario() -> list[int]:
        results = []
        for _ in range(3):
            answered = await Call("GET", "/models/v2/health/ready").to(outer)
            results.append(answered.status)
            await asyncio.sleep(0)
        return results

    assert asyncio.run(scenario())[-1] == 200


# Faults


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_each_fault_of_a_model_has_its_status(fault):
    model = Linear()
    model.fault = fault
    answered = call(app_of(model), "POST", "/v1/models/linear:predict", ROW)
    assert answered.status == FAULTS[fault]
    assert ("a bug" in answered.json["error"]) is False
    assert answered.json["request_id"] == answered.headers["x-request-id"]
    if answered.status == 429:
        assert answered.headers["retry-after"] == "3"


WRONG = {
    ("POST", "/v1/models/none:predict"): (404, "unknown_model"),
    ("POST", "/v1/models/linear/versions/9:predict"): (404, "unknown_model"),
    ("GET", "/v2/models/none"): (404, "unknown_model"),
    ("GET", "/etc/passwd"): (404, "not_found"),
    ("GET", "/v1/models/../../etc/passwd:predict"): (404, "not_found"),
    ("GET", "/v1/models/linear:predict"): (405, "method_not_allowed"),
    ("POST", "/v1/models/linear:classify"): (404, "not_found"),
    ("DELETE", "/v2/models/linear"): (405, "method_not_allowed"),
    ("POST", "/invocations?model=none"): (404, "unknown_model"),
}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: " ".join(case))
def test_unknown_paths_models_and_methods(case):
    answered = call(app_of(), *case, ROW)
    assert (answered.status, answered.json["error_code"]) == WRONG[case]


def test_invocations_of_several_models_must_say_which():
    answered = call(app_of(Linear(), Pair()), "POST", "/invocations", ROW)
    assert answered.status == 400
    assert "'linear', 'pair'" in answered.json["error"]


PATH = "/v1/models/linear:predict"
BODY = json.dumps(ROW).encode()


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_compressed_bodies_are_read(pack):
    name = "gzip" if pack is gzip.compress else "deflate"
    twice = pack(BODY[:7]) + pack(BODY[7:])
    assert call(app_of(), "POST", PATH, twice, content_encoding=name).status == 200


def test_a_bomb_stops_at_the_limit():
    limits = Limits(body_bytes=1 << 20)
    bomb = gzip.compress(bytes(64 << 20))
    answered = call(app_of(limits=limits), "POST", PATH, bomb, content_encoding="gzip")
    assert (answered.status, answered.json["error_code"]) == (413, "body_too_large")


BROKEN = {  # body and its encoding -> status
    (gzip.compress(BODY)[:-9], "gzip"): 400,
    (b"no gzip", "gzip"): 400,
    (gzip.compress(b"") * 300, "gzip"): 400,
    (BODY, "br"): 415,
}


@pytest.mark.parametrize("case", BROKEN, ids=["cut short", "not gzip", "many members", "br"])
def test_broken_compression_is_refused(case):
    body, encoding = case
    answered = call(app_of(), "POST", PATH, body, content_encoding=encoding)
    assert answered.status == BROKEN[case]


def test_a_body_that_is_too_large_is_refused_before_and_while_it_is_read():
    app = app_of(limits=Limits(body_bytes=100))
    assert call(app, "POST", PATH, bytes(10), content_length="101").status == 413
    assert call(app, "POST", PATH, bytes(101)).status == 413


def test_a_body_that_stalls_times_out():
    async def scenario() -> int:
        async with running(app_of(limits=Limits(read_s=0.01))) as app:
            return (await Call("POST", PATH, b"{", stalls=True).to(app)).status

    assert asyncio.run(scenario()) == 408


def test_a_body_that_stalls_while_the_server_ends_gets_the_answer_of_one_that_is_not_ready():
    async def scenario() -> tuple[int, str]:
        async with running(app_of()) as app:
            request = asyncio.ensure_future(Call("POST", PATH, b"{", stalls=True).to(app))
            await asyncio.sleep(0.05)
            app.state.draining = True
            request.cancel()  # as uvicorn does once its time to end is over
            answered = await request
            return answered.status, answered.json["error_code"]

    assert asyncio.run(scenario()) == (503, "not_ready")


def test_all_bodies_together_have_a_limit_and_give_their_share_back():
    model = Linear()

    async def scenario() -> list[int]:
        model.gate = asyncio.Event()
        limits = Limits(body_bytes=len(BODY), pending_bytes=len(BODY) + 5)
        async with running(app_of(model, limits=limits)) as app:
            first = asyncio.ensure_future(Call("POST", PATH, BODY).to(app))
            while not model.timeouts:
                await asyncio.sleep(0)
            second = await Call("POST", PATH, BODY).to(app)
            model.gate.set()
            third = await first
            return [second.status, third.status, (await Call("POST", PATH, BODY).to(app)).status]

    assert asyncio.run(scenario()) == [429, 200, 200]


def test_what_is_read_in_one_turn_of_the_loop_waits_together():
    """Else the first of many requests would be a batch by itself, while the others are read."""
    seen = []

    class Noted(Linear):
        def __getattribute__(self, name):
            if name in ("inputs", "predict"):
                seen.append(name)
            return super().__getattribute__(name)

    async def scenario() -> list[int]:
        async with running(app_of(Noted())) as app:
            seen.clear()
            calls = [Call("POST", PATH, BODY).to(app) for _ in range(3)]
            return [answered.status for answered in await asyncio.gather(*calls)]

    assert asyncio.run(scenario()) == [200] * 3
    assert "inputs" not in seen[seen.index("predict") :]


def test_nothing_stays_behind_of_the_watch_for_a_client_that_leaves():
    model = Linear()

    async def scenario() -> int:
        async with running(app_of(model)) as app:
            leaves = asyncio.Event()
            leaves.set()
            model.gate = asyncio.Event()
            model.gate.set()
            request = asyncio.ensure_future(Call("POST", PATH, BODY, leaves=leaves).to(app))
            status = (await request).status
            assert request.cancelling() == 0  # nothing of the watch is left behind
            return status

    assert asyncio.run(scenario()) in (200, 499)
    assert sum(model.outcomes.values()) == 1


def test_a_request_that_is_cancelled_from_outside_is_not_one_whose_client_has_left():
    model = Linear()

    async def scenario() -> bool:
        model.gate = asyncio.Event()
        async with running(app_of(model)) as app:
            request = asyncio.ensure_future(Call("POST", PATH, BODY).to(app))
            while not model.timeouts:
                await asyncio.sleep(0)
            request.cancel()
            await asyncio.wait([request])
            return request.cancelled()

    assert asyncio.run(scenario())
    assert model.outcomes == {"cancelled": 1}


def test_a_client_that_leaves_takes_its_request_out_of_the_queue():
    model = Linear()

    async def scenario() -> int:
        model.gate = asyncio.Event()
        async with running(app_of(model)) as app:
            leaves = asyncio.Event()
            request = asyncio.ensure_future(Call("POST", PATH, BODY, leaves=leaves).to(app))
            while not model.timeouts:
                await asyncio.sleep(0)
            leaves.set()
            return (await request).status

    assert asyncio.run(scenario()) == 499
    assert model.outcomes == {"cancelled": 1}


def test_a_request_may_shorten_its_time():
    model = Linear()
    app = app_of(model, limits=Limits(request_s=9))
    for seconds in ("2", "100"):
        assert call(app, "POST", PATH, ROW, x_request_timeout=seconds).status == 200
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    body = {"inputs": [tensor], "parameters": {"timeout": 500_000}}
    assert call(app, "POST", "/v2/models/linear/infer", body).status == 200
    assert model.timeouts == [2, 9, 0.5]
    for wrong in ("-1", "nan", "soon"):
        assert call(app, "POST", PATH, ROW, x_request_timeout=wrong).status == 400


def test_a_deadline_that_passes_is_a_504():
    model = Linear()

    async def scenario() -> int:
        model.gate = asyncio.Event()
        async with running(app_of(model, limits=Limits(request_s=0.01))) as app:
            return (await Call("POST", PATH, BODY).to(app)).status

    assert asyncio.run(scenario()) == 504


def test_a_name_that_no_url_leads_to_is_refused():
    with pytest.raises(ServingError, match="whose name has a slash: 'runs/sums'"):
        app_of(Linear("runs/sums"))


def test_limits_must_fit_each_other():
    with pytest.raises(ServingError, match="tensors=0"):
        Limits(tensors=0)
    with pytest.raises(ServingError, match="smaller than body_bytes"):
        Limits(body_bytes=100, pending_bytes=10)


# Keys and logs


def test_requests_need_a_key_where_there_are_keys_and_health_does_not():
    app = app_of(keys=["other" * 8, KEY])
    refused = call(app, "POST", PATH, ROW)
    assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert call(app, "POST", PATH, ROW, authorization=f"Bearer {KEY}").status == 200
    assert call(app, "POST", PATH, ROW, x_api_key=KEY).status == 200
    for wrong in (f"Bearer {KEY}x", f"Basic {KEY}", "Bearer", ""):
        assert call(app, "POST", PATH, ROW, authorization=wrong).status == 401
    assert call(app, "GET", "/metrics").status == 401
    assert call(app, "GET", "/v2/health/ready").status == 200


def test_the_body_of_a_request_without_a_key_is_not_read():
    async def scenario() -> int:
        async with running(app_of(keys=[KEY])) as app:
            return (await Call("POST", PATH, [], stalls=True).to(app)).status

    assert asyncio.run(scenario()) == 401


def test_files_of_keys_are_checked(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEY}\n")
    file.chmod(0o600)
    assert read_keys(file) == (KEY,)
    file.chmod(0o644)
    with pytest.raises(ServingError, match="chmod 600"):
        read_keys(file)
    for text, message in (("\n", "has no API key"), ("short\n", "at least 16")):
        file.chmod(0o600)
        file.write_text(text)
        with pytest.raises(ServingError, match=message):
            read_keys(file)
    with pytest.raises(ServingError, match="cannot read"):
        read_keys(tmp_path / "missing")


def test_each_request_is_a_line_of_json_without_secrets():
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(JsonLines().format(record))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        app = app_of(keys=[KEY])
        path = f"{PATH}?token=hidden"
        answered = call(
            app, "POST", path, ROW, authorization=f"Bearer {KEY}", x_request_id="mine-1"
        )
        call(app, "POST", PATH, b"{", x_api_key=KEY, x_request_id="evil\n{}")
        call(app, "POST", PATH, ROW, x_api_key=KEY + "wrong")
    finally:
        LOGGER.removeHandler(handler)
    first, second, third = map(json.loads, lines)
    assert answered.headers["x-request-id"] == first["request_id"] == "mine-1"
    assert (first["status"], first["rows"], first["model"]) == (200, 1, "linear")
    assert (second["status"], second["error_code"]) == (400, "bad_request")
    assert second["request_id"].isalnum()
    assert third["status"] == 401
    assert not any(secret in line for line in lines for secret in (KEY, "hidden"))


def test_an_unexpected_error_is_logged_with_its_traceback():
    model = Linear()
    model.fault = ZeroDivisionError("inside")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(JsonLines().format(record))
    LOGGER.addHandler(handler)
    try:
        call(app_of(model), "POST", PATH, ROW)
    finally:
        LOGGER.removeHandler(handler)
    assert "ZeroDivisionError: inside" in json.loads(lines[0])["traceback"]


def test_the_public_name():
    assert mw.serving_app is serving_app
    assert mw.Limits is Limits


def test_a_mounted_app_says_that_its_models_did_not_start_and_tries_again(monkeypatch, caplog):
    monkeypatch.setattr(app_module, "_AGAIN_S", 0.5)
    monkeypatch.setattr(LOGGER, "propagate", True)
    models = Failing(Linear())
    app = serving_app(models)

    async def ping() -> Any:
        response = await Call("GET", "/ping").to(app)
        await asyncio.sleep(0.01)
        return response

    async def scenario() -> list[int]:
        first, refused = await ping(), await ping()
        assert "did not start" in refused.json["error"]
        models.fails = False
        await asyncio.sleep(0.55)
        await ping()
        return [first.status, refused.status, (await ping()).status]

    assert asyncio.run(scenario()) == [503, 503, 200]
    (line,) = [r for r in caplog.records if r.message == "the models did not start"]
    assert line.__dict__["fields"]["error"] == "there is no checkpoint."


def test_the_paths_are_a_page_without_scripts_of_others():
    answered = call(app_of(), "GET", "/docs")
    assert answered.status == 200
    text = answered.body.decode()
    for word in ("/v1/models/linear:predict", "POST /v2/models/linear/infer gives", "429"):
        assert word in text
    assert "src=" not in text


@pytest.mark.parametrize("path", ["/metrics", "/", "/docs", "/v2/models/linear", "/openapi.json"])
def test_looking_at_a_model_takes_no_share_and_bears_a_swap(path):
    app = serving_app(Swapping(Linear()))
    assert call(app, "GET", path).status == 200


def test_a_version_that_is_swapped_under_its_request_does_not_answer_for_it():
    class Swapped(Linear):
        async def predict(self, inputs: Any, *, timeout_s: float | None = None) -> Any:
            self.version = "2"
            return await super().predict(inputs, timeout_s=timeout_s)

    answered = call(app_of(Swapped()), "POST", "/v1/models/linear/versions/1:predict", ROW)
    assert answered.status == 404
    assert "just been replaced by 2" in answered.json["error"]
    assert call(app_of(Swapped()), "POST", "/v1/models/linear:predict", ROW).status == 200


def test_json_counts_for_what_it_takes_while_it_is_read():
    """Two such bodies would fit, and not what their numbers take as objects of Python."""
    model = Linear()
    app = app_of(model, limits=Limits(body_bytes=60_000, text_bytes=60_000, pending_bytes=600_000))
    path, body = "/v1/models/linear:predict", json.dumps({"instances": [[1, 2, 3, 4]] * 3000})

    async def scenario() -> tuple[int, int]:
        model.gate = asyncio.Event()
        first = asyncio.ensure_future(Call("POST", path, body.encode()).to(app))
        await asyncio.sleep(0.05)
        second = await Call("POST", path, body.encode()).to(app)
        model.gate.set()
        return (await first).status, second.status

    assert asyncio.run(scenario()) == (200, 429)
