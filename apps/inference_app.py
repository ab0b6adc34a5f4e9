"""The inference app: one engine and its admission a replica, rows in, results out.

Settings and engine come to life in the lifespan, so importing this module starts nothing and needs no
vLLM. Every row is validated, admitted and answered by itself (`apps.admission`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from flyte.app.extras import FastAPIAppEnvironment
from starlette.exceptions import HTTPException as StarletteHTTPException

from apps import environments
from apps.admission import Admission
from apps.advice import watch_use
from apps.answer import ResultStream, finished_rows
from apps.engines.base import Engine
from apps.engines.simulated import SimulatedEngine
from apps.engines.vllm_engine import VLLMEngine
from apps.error_body import Failure, documented
from apps.errors import EngineOverloaded, EngineUnavailable
from apps.exposition import CONTENT_TYPE, StatsCollector, exposition
from apps.gpu import GpuCollector
from apps.guard import BEARER, Guard
from apps.logs import log_lines
from apps.metrics import Quantiles
from apps.profiling import add_profile_routes
from apps.schema import (
    NDJSON,
    Done,
    GenerateRequest,
    GenerateResponse,
    Heartbeat,
    ModelCard,
    ModelList,
    RowResult,
    as_error,
)
from apps.settings import AppSettings
from apps.shutdown import drain_on_sigterm

logger = logging.getLogger(__name__)

ENGINE_DEAD_EXIT_CODE = 70
"""EX_SOFTWARE: the platform replaces the replica."""
LAST_ANSWERS_S = 1.0
"""Time for the failed rows of a dead engine to reach their callers."""
USE_INTERVAL_S = 60.0
"""Between two lines in the log on how well the engine is used."""
LINE = {"anyOf": [kind.model_json_schema(mode="serialization") for kind in (RowResult, Heartbeat, Done)]}
LINES = {"content": {NDJSON: {"itemSchema": LINE}}}
"""If accepted."""
TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}
Stats = dict[str, int | float | dict[str, int] | Quantiles | None]


def make_engine(settings: AppSettings) -> Engine:
    """Blocks until the engine is ready: a minute or more for vLLM."""
    return SimulatedEngine(settings) if settings.engine == "simulated" else VLLMEngine(settings)


def end_process() -> None:
    """Ends a replica whose engine is dead, once the failed rows have been answered."""
    asyncio.get_running_loop().call_later(LAST_ANSWERS_S, os._exit, ENGINE_DEAD_EXIT_CODE)


def create_app(
    make_engine: Callable[[AppSettings], Engine] = make_engine,
    load_settings: Callable[[], AppSettings] = lambda: AppSettings(),
    on_dead: Callable[[], None] = end_process,
) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.settings = settings = load_settings()
        with log_lines(settings.log_format):
            app.state.engine = engine = make_engine(settings)
            logger.info("engine ready: %s", engine.limits)
            if settings.profiler_dir is not None and isinstance(engine, VLLMEngine):
                add_profile_routes(app, engine)
            try:
                async with _serving(app, engine, settings):
                    yield
            finally:
                await engine.close()

    @asynccontextmanager
    async def _serving(app: FastAPI, engine: Engine, settings: AppSettings) -> AsyncIterator[None]:
        from apps.openai_api import router  # takes two seconds, and drivers import this module

        app.include_router(router)
        async with (
            Admission(engine, settings, on_dead) as admission,
            drain_on_sigterm(admission, settings.drain_s),
        ):
            app.state.admission = admission
            app.state.started = int(time.time())
            app.state.collectors = (StatsCollector(admission.stats), admission.latencies)
            app.state.gpus = GpuCollector()
            use = watch_use(admission.stats, admission.latencies, settings, USE_INTERVAL_S)
            watching = asyncio.create_task(use)
            # What has been imported stays, and is a hundred times what the rows leave to collect.
            gc.collect()
            gc.freeze()
            try:
                yield
            finally:
                gc.unfreeze()
                watching.cancel()

    app = FastAPI(title="Saturate inference", lifespan=lifespan, redirect_slashes=False)
    _add_routes(app)
    app.add_exception_handler(EngineOverloaded, _engine_error)
    app.add_exception_handler(EngineUnavailable, _engine_error)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _our_bug)
    app.add_middleware(Guard)
    return app


def _add_routes(app: FastAPI) -> None:
    app.add_api_route(
        "/generate",
        generate,
        methods=["POST"],
        response_model=GenerateResponse,
        responses={200: LINES, **documented(400, 401, 408, 409, 413, 422, 429, 503)},
        dependencies=[BEARER],
    )
    app.add_api_route("/health", health, responses=documented(503))
    app.add_api_route("/ready", ready, responses=documented(503))
    for path, answer in (("/v1/models", models), ("/stats", stats)):
        app.add_api_route(path, answer, responses=documented(401), dependencies=[BEARER])
    app.add_api_route(
        "/metrics",
        metrics,
        response_class=Response,
        responses={200: TEXT, **documented(401)},
        dependencies=[BEARER],
    )


async def generate(body: GenerateRequest, request: Request) -> Response:
    """One result a row: as lines while the rows finish, or in the order of the request at the end."""
    state = request.app.state
    limits = state.engine.limits
    for asked, served in ((body.model, limits.model), (body.model_revision, limits.model_revision)):
        if asked not in ("", served):
            raise HTTPException(409, as_error(f"asked for {asked!r}, this app serves {served!r}"))
    max_rows = min(state.settings.max_request_rows, state.settings.max_queue_size)
    if len(body.rows) > max_rows:
        raise HTTPException(413, f"{len(body.rows)} rows in one request, at most {max_rows}")
    logger.debug("%d rows of task %s", len(body.rows), body.task_id)
    admission: Admission = state.admission
    if NDJSON in request.headers.get("accept", ""):
        return ResultStream(body, admission)
    results: dict[str, RowResult] = {}
    async with aclosing(finished_rows(body, request.receive, admission)) as finished:
        async for some in finished:
            results.update((result.id, result) for result in some)
    in_order = [results[row.id] for row in body.rows if row.id in results]
    return Response(GenerateResponse(results=in_order).model_dump_json(), media_type="application/json")


async def models(request: Request) -> ModelList:
    limits = request.app.state.engine.limits
    card = ModelCard(
        id=limits.model,
        created=request.app.state.started,
        revision=limits.model_revision,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        engine=limits.engine,
    )
    return ModelList(data=[card])


async def health(request: Request) -> dict[str, str]:
    """200 while the engine and the loops of the batchers live, else 503."""
    await request.app.state.engine.check_health()
    request.app.state.admission.check_alive()
    return {"status": "ok"}


async def ready(request: Request) -> dict[str, str]:
    """200 while rows are taken, 503 once the replica drains or is dead."""
    request.app.state.admission.check_open()
    return {"status": "ready"}


async def stats(request: Request) -> Stats:
    """Counts since the start, and the quantiles of the times of late."""
    admission: Admission = request.app.state.admission
    return {**admission.stats(), **admission.latencies.quantiles()}


async def metrics(request: Request) -> Response:
    """Ours, the GPUs' and vLLM's, for Prometheus."""
    state = request.app.state
    body = await exposition(*state.collectors, gpus=state.gpus)
    return Response(body, media_type=CONTENT_TYPE)


async def _engine_error(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, EngineOverloaded | EngineUnavailable)
    return Failure.of_engine(exc).response()


async def _http_error(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, StarletteHTTPException)
    return Failure(exc.status_code, exc.detail).response(dict(exc.headers or {}))


async def _validation_error(_: Request, exc: Exception) -> Response:
    """The first field that is wrong. FastAPI's own answer repeats the whole input."""
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    wrong = first["msg"].removeprefix("Value error, ")
    return Failure(422, f"{field}: {wrong}", param=as_error(field)).response()


async def _our_bug(_: Request, exc: Exception) -> Response:
    """Starlette raises it again, and uvicorn logs it."""
    return Failure(500, f"unexpected {type(exc).__name__}").response()


app = create_app()
app_env = FastAPIAppEnvironment(
    name=environments.APP_NAME,
    app=app,
    image=environments.image,
    resources=environments.resources,
    scaling=environments.scaling,
    timeouts=environments.timeouts,
    env_vars=environments.env_vars,
    secrets=environments.secrets,
    requires_auth=False,
)
