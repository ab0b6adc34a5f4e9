"""The app over HTTP, on the simulated engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

import apps.answer
from apps.engines.base import Engine
from apps.engines.simulated import SimulatedEngine
from apps.inference_app import create_app
from apps.schema import NDJSON
from apps.settings import AppSettings
from tasks.client import InferenceClient
from tests.engines import HeldEngine, make_body, make_settings, until
from tests.loopback import serve

JSON = {"Content-Type": "application/json"}
"""With `json.dumps`, which writes lone surrogates where httpx refuses to."""


@asynccontextmanager
async def client_of(
    make_engine: Callable[[AppSettings], Engine] = SimulatedEngine, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(make_engine, lambda: make_settings(**settings), on_dead=lambda: None)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://app") as client,
    ):
        yield client


async def settled(client: httpx.AsyncClient) -> dict[str, Any]:
    """`/stats`, once nothing is queued or in the engine."""
    while True:
        stats: dict[str, Any] = (await client.get("/stats")).json()
        if not stats["queued"] and not stats["in_flight"]:
            return stats
        await asyncio.sleep(0.001)


async def read_lines(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post("/generate", json=body, headers={"Accept": NDJSON})
    assert response.headers["Content-Type"].startswith(NDJSON)
    assert response.content.endswith(b"\n")
    return [json.loads(line) for line in response.content.removesuffix(b"\n").split(b"\n")]


async def test_results_come_in_the_order_of_the_rows() -> None:
    async with client_of() as client:
        response = await client.post("/generate", json=make_body(50))
    results = response.json()["results"]
    assert [result["id"] for result in results] == [str(n) for n in range(50)]
    assert len({result["text"] for result in results}) == 50


async def test_bad_rows_of_a_request_leave_the_others_answered() -> None:
    body = make_body(2)
    body["rows"] += [
        {"id": "null", "prompt": None},
        {"id": "number", "prompt": 17},
        {"id": "empty", "prompt": ""},
        {"id": "long", "prompt": "x" * 1_000_000},
        {"id": "both", "prompt": "a", "messages": []},
        {"id": "misspelt", "promt": "a"},
        {"id": "surrogate", "prompt": "a\ud800"},
        {"id": "long key", "prompt": "a", "k" * 10**6: 1},
        {"id": "huge seed", "prompt": "a", "sampling": {"seed": 2**80}},
        {"id": "huge max_tokens", "prompt": "a", "sampling": {"max_tokens": 10**40}},
    ]
    async with client_of() as client:
        response = await client.post("/generate", content=json.dumps(body), headers=JSON)
        results = response.json()["results"]
    kinds = {result["id"]: result["error_kind"] for result in results}
    assert kinds == {
        "0": None,
        "1": None,
        "null": "invalid_prompt",
        "number": "invalid_prompt",
        "empty": "empty",
        "long": "too_long",
        "both": "invalid_prompt",
        "misspelt": "invalid_prompt",
        "surrogate": "invalid_prompt",
        "long key": "invalid_prompt",
        "huge seed": "invalid_sampling",
        "huge max_tokens": "invalid_sampling",
    }
    assert all(0 < len(result["error"]) < 300 for result in results if result["error_kind"])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param({"rows": []}, 422, id="no rows"),
        pytest.param({"rows": [{"prompt": "a"}]}, 422, id="no id"),
        pytest.param({"rows": [{"id": "a", "prompt": "a"}] * 2}, 422, id="same id twice"),
        pytest.param({**make_body(), "sampling": {"temperature": -1}}, 422, id="bad sampling"),
        pytest.param({**make_body(), "model": "another"}, 409, id="another model"),
        pytest.param({**make_body(), "model_revision": "seed-1"}, 409, id="another revision"),
        pytest.param({"rows": [{"id": "\ud800", "prompt": "a"}]}, 422, id="id that is no text"),
        pytest.param({"rows": [{"id": "a", "\ud800": "a"}]}, 422, id="key that is no text"),
        pytest.param({"rows": [{"id": "a" * 10**6}] * 2}, 422, id="long ids twice"),
        pytest.param({**make_body(), "modle": "sim"}, 422, id="misspelt field"),
        pytest.param({**make_body(), "deadline_s": "5"}, 422, id="deadline as text"),
        pytest.param({**make_body(), "deadline_s": True}, 422, id="deadline as truth"),
        pytest.param({**make_body(), "deadline_s": float("inf")}, 422, id="endless deadline"),
        pytest.param(make_body(11), 413, id="more rows than the queue holds"),
    ],
)
async def test_a_request_at_fault_is_refused(body: object, status: int) -> None:
    async with client_of(max_queue_size=10) as client:
        response = await client.post("/generate", content=json.dumps(body), headers=JSON)
    assert response.status_code == status
    assert 0 < len(response.text) < 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/generate", 405),
        ("TRACE", "/v1/models", 405),
        ("GET", "/nope", 404),
        ("POST", "/generate/", 404),
    ],
)
async def test_what_no_route_takes_is_an_error_in_the_common_form(
    method: str, path: str, status: int
) -> None:
    async with client_of() as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert ("Allow" in response.headers) == (status == 405)


async def test_a_body_beyond_the_limit_is_refused() -> None:
    async with client_of(max_request_bytes=1000) as client:
        response = await client.post("/generate", json=make_body(1, task_id="x" * 1000))
        accepted = await client.post("/generate", json=make_body(1))
    assert (response.status_code, accepted.status_code) == (413, 200)


async def test_a_full_queue_answers_429_with_retry_after() -> None:
    engines: list[HeldEngine] = []

    def make_engine(settings: AppSettings) -> Engine:
        engines.append(HeldEngine(settings))
        return engines[0]

    async with client_of(make_engine, max_num_seqs=1, max_queue_size=4) as client:
        first = asyncio.create_task(client.post("/generate", json=make_body(4)))
        await until(lambda: engines[0].held == 2)
        refused = await client.post("/generate", json=make_body(3))
        engines[0].release.set()
        answered = await first
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) >= 1
    assert all(result["error_kind"] is None for result in answered.json()["results"])


async def test_rows_past_the_deadline_time_out_alone() -> None:
    slow = {"time_scale": 1.0, "step_overhead_s": 0.02, "mean_completion_tokens": 2000.0}
    async with client_of(simulated=slow) as client:
        body = make_body(2, deadline_s=1.0)
        body["rows"][0]["sampling"] = {"max_tokens": 1}
        results = (await client.post("/generate", json=body)).json()["results"]
        stats = await settled(client)
    assert [result["error_kind"] for result in results] == [None, "timeout"]
    assert stats["aborted"] == 1


async def test_a_dead_engine_answers_503_and_fails_health() -> None:
    async with client_of(simulated={"die_after": 0}) as client:
        rows = (await client.post("/generate", json=make_body(2))).json()["results"]
        refused = await client.post("/generate", json=make_body(1))
        health = await client.get("/health")
    assert {row["error_kind"] for row in rows} == {"engine_error"}
    assert (refused.status_code, health.status_code) == (503, 503)
    assert "Retry-After" in refused.headers


async def test_models_names_what_is_served_and_its_limits() -> None:
    async with client_of(max_num_seqs=7, max_model_len=123) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["revision"]) == ("sim", "seed-0")
    assert (card["max_num_seqs"], card["max_model_len"]) == (7, 123)


async def test_stats_has_every_batch_field_and_ours() -> None:
    async with client_of() as client:
        await client.post("/generate", json=make_body(5))
        stats = (await client.get("/stats")).json()
    assert {
        "utilization",
        "total_submitted",
        "total_completed",
        "total_batches",
        "avg_batch_size",
        "avg_batch_cost",
        "busy_time_s",
        "idle_time_s",
        "busy_fraction",
        "saturated_fraction",
    } <= stats.keys()
    assert (stats["completed"], stats["queued"], stats["in_flight"]) == (5, 0, 0)


async def test_a_client_that_left_costs_the_engine_nothing() -> None:
    engines: list[HeldEngine] = []

    def make_engine(settings: AppSettings) -> Engine:
        engines.append(HeldEngine(settings))
        return engines[0]

    app = create_app(make_engine, lambda: make_settings(max_num_seqs=2), on_dead=lambda: None)
    async with serve(app) as endpoint, httpx.AsyncClient(base_url=endpoint) as client:
        request = asyncio.create_task(client.post("/generate", json=make_body(20)))
        await until(lambda: engines[0].held == 4)
        request.cancel()
        stats = await settled(client)
    assert (stats["aborted"], engines[0].aborted) == (20, 4)


async def test_chunks_in_flight_share_the_engine() -> None:
    engines: list[HeldEngine] = []

    def make_engine(settings: AppSettings) -> Engine:
        engines.append(HeldEngine(settings))
        return engines[0]

    app = create_app(make_engine, lambda: make_settings(max_num_seqs=8), on_dead=lambda: None)
    async with serve(app) as endpoint, httpx.AsyncClient(base_url=endpoint) as client:
        chunks = [asyncio.create_task(client.post("/generate", json=make_body(5))) for _ in range(2)]
        await until(lambda: engines[0].held == 10)
        engines[0].release.set()
        answers = await asyncio.gather(*chunks)
    assert [len(answer.json()["results"]) for answer in answers] == [5, 5]


async def test_lines_hold_every_row_once_and_end_with_the_count() -> None:
    body = make_body(30)
    body["rows"][4]["prompt"] = None
    async with client_of() as client:
        *lines, last = await read_lines(client, body)
        plain = (await client.post("/generate", json=body)).json()["results"]
    assert last == {"done": True, "rows": 30}
    assert sorted(line["id"] for line in lines) == sorted(str(n) for n in range(30))
    texts = {line["id"]: (line["text"], line["error_kind"]) for line in lines}
    assert texts == {result["id"]: (result["text"], result["error_kind"]) for result in plain}


async def test_a_row_is_sent_as_soon_as_it_is_finished() -> None:
    slow = {"time_scale": 1.0, "step_overhead_s": 0.02, "mean_completion_tokens": 100_000.0}
    app = create_app(SimulatedEngine, lambda: make_settings(simulated=slow), on_dead=lambda: None)
    body = make_body(2, sampling={"max_tokens": 4000})
    body["rows"][1]["sampling"] = {"max_tokens": 1}
    async with serve(app) as endpoint, httpx.AsyncClient(base_url=endpoint) as client:
        async with client.stream("POST", "/generate", json=body, headers={"Accept": NDJSON}) as response:
            first = await anext(response.aiter_raw())
        stats = await settled(client)
    assert json.loads(first)["id"] == "1"
    assert (stats["completed"], stats["aborted"]) == (1, 1)


async def test_every_row_is_answered_at_the_deadline() -> None:
    """Rows that finish just then are neither lost nor doubled."""
    slow = {"time_scale": 1.0, "step_overhead_s": 0.001, "weights_gb": 0.0, "mean_completion_tokens": 30.0}
    async with client_of(simulated=slow, max_num_seqs=64) as client:
        for _ in range(10):
            body = make_body(60, deadline_s=0.04)
            results = (await client.post("/generate", json=body)).json()["results"]
            lines = await read_lines(client, body)
            assert [result["id"] for result in results] == [row["id"] for row in body["rows"]]
            assert lines[-1] == {"done": True, "rows": 60}


async def test_a_connection_serves_many_chunks() -> None:
    app = create_app(SimulatedEngine, make_settings, on_dead=lambda: None)
    ports = set()

    async def note_port(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            ports.add(scope["client"])
        await app(scope, receive, send)

    async with serve(note_port) as endpoint, InferenceClient(endpoint) as client:
        for _ in range(5):
            assert len([result async for result in client.generate(make_body(3))]) == 3
    assert len(ports) == 1


async def test_silence_is_broken_by_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps.answer, "HEARTBEAT_S", 0.01)
    slow = {"time_scale": 1.0, "mean_completion_tokens": 100_000.0}
    async with client_of(simulated=slow) as client:
        lines = await read_lines(client, make_body(1, sampling={"max_tokens": 3}))
    assert lines[0] == {"heartbeat": True}
    assert [line.get("id") for line in lines[-2:]] == ["0", None]


async def test_a_full_queue_refuses_a_stream_too() -> None:
    async with client_of(max_queue_size=3) as client:
        response = await client.post("/generate", json=make_body(2), headers={"Accept": NDJSON})
        too_many = await client.post("/generate", json=make_body(4), headers={"Accept": NDJSON})
    assert (response.status_code, too_many.status_code) == (200, 413)


async def test_rows_sent_again_join_what_ran_or_runs() -> None:
    engines: list[HeldEngine] = []

    def make_engine(settings: AppSettings) -> Engine:
        engines.append(HeldEngine(settings))
        return engines[0]

    app = create_app(make_engine, lambda: make_settings(max_num_seqs=8), on_dead=lambda: None)
    body = make_body(3, task_id="chunk")
    async with serve(app) as endpoint, httpx.AsyncClient(base_url=endpoint) as client:
        first = asyncio.create_task(client.post("/generate", json=body))
        await until(lambda: engines[0].held == 3)
        second = asyncio.create_task(client.post("/generate", json=body))
        await until_stat(client, "joined", 3)
        first.cancel()
        await asyncio.sleep(0.05)
        assert (engines[0].held, engines[0].aborted) == (3, 0)
        engines[0].release.set()
        joined = (await second).json()["results"]
        again = (await client.post("/generate", json=body)).json()["results"]
        other = (await client.post("/generate", json={**body, "task_id": "another"})).json()["results"]
        stats = await settled(client)
    assert joined == again
    assert (stats["completed"], stats["joined"]) == (6, 6)
    assert [result["text"] for result in other] == [result["text"] for result in again]


async def until_stat(client: httpx.AsyncClient, name: str, value: int) -> None:
    while (await client.get("/stats")).json()[name] != value:  # noqa: ASYNC110  # over HTTP, no event
        await asyncio.sleep(0.001)
