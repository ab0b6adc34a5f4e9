"""A job from data set to manifest: load, render, chunk, fan out, collect, account.

Inputs are checked before anything is written or started. Loading overlaps inference: a chunk is
rendered and written when there is room for it among those in flight.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

import flyte
import flyte.errors
from flyte.io import Dir, File
from rich.console import Console

from apps.errors import JobError, PromptError, RequestRefused
from apps.schema import ModelCard, RowResult, SamplingParams, merge_sampling
from apps.settings import ROWS_IN_FLIGHT_PER_SEQ
from tasks.collect import AnsweredChunk, Totals, collect
from tasks.fan_out import fan_out
from tasks.infer_batch import InferenceConfig, infer_batch
from tasks.load import Source, load_rows
from tasks.manifest import Manifest, fingerprint, versions
from tasks.output import as_dir, check_output, open_run_folder
from tasks.progress import Progress, say
from tasks.render import PromptRow, PromptSpec, render_rows
from tasks.score import wilson_interval
from tasks.serving import app_of_our_own, deployed_app
from tasks.tables import read_chunk, read_table, write_answers, write_chunk

logger = logging.getLogger(__name__)

FINAL_CODES = ("NonRecoverableError",)
"""Flyte's error codes of a task that no attempt can save."""


@dataclass(frozen=True)
class Job:
    """Everything that a driver asks for."""

    source: Source
    spec: PromptSpec
    sampling: dict[str, Any]
    """As `SamplingParams`; what is left out has its default there."""
    system_prompt: str = ""
    chat: bool = True
    limit: int = 0
    """Rows at most, from the start of the data set; 0 takes all."""
    chunk_size: int = 50
    max_concurrency: int = 10
    """Chunks in flight at once."""
    model: str = ""
    """Empty: what the app serves. Under `--local`: what the app that is started loads."""
    endpoint: str = ""
    """Empty: the deployed app. Under `--local`: an app started for this job."""
    output: str = ""


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows, written and ready to be sent."""

    number: int
    num_rows: int
    file: File[Any]


@dataclass
class Tally:
    """What has been handed out, and what has come back."""

    rows_in: int = 0
    answered: dict[int, AnsweredChunk] = field(default_factory=dict)
    elapsed_s: float = 0.0


async def run_job(job: Job) -> tuple[Manifest, Dir[Any]]:
    """The manifest and the folder of a finished run.

    Raises `NonRecoverableError` with one line for an input that cannot be used, before anything is
    written; `EngineUnavailable` if an app that was started for the job ends.
    """
    try:
        is_local = flyte.ctx().mode == "local"
        sampling = check_inputs(job, is_local)
        rows = await asyncio.to_thread(open_rows, job)
        with open_run_folder(job.output) as folder:
            console = Console(stderr=True)
            if is_local and not job.endpoint:
                serving = app_of_our_own(job.model, folder.app_log, console)
            else:
                serving = deployed_app(job.endpoint, job.model, is_local, console)
            async with serving as app:
                warn_if_starved(job, app.card)
                config = InferenceConfig(
                    model=app.card.id,
                    model_revision=app.card.revision,
                    sampling=sampling,
                    system_prompt=job.system_prompt,
                    chat=job.chat,
                )
                with Progress(console, job.limit or None) as progress:
                    tally = await app.during(infer(job, rows, app.endpoint, config, progress))
            chunks = [tally.answered[number] for number in sorted(tally.answered)]
            scored = bool(job.spec.reference_column)
            totals = await asyncio.to_thread(collect, chunks, folder.staging, tally.rows_in, scored)
            output = job.output or str(folder.path)
            manifest = make_manifest(job, config, app.card.engine, totals, tally, output)
            folder.commit(manifest)
            say(console, f"{tally.rows_in} rows: {totals.rows_ok} ok, {totals.rows_failed} failed")
            return manifest, await as_dir(folder, job.output)
    except (JobError, PromptError, RequestRefused) as exc:
        raise flyte.errors.NonRecoverableError(str(exc)) from None


def check_inputs(job: Job, is_local: bool) -> SamplingParams:
    """Raises `JobError` or `PromptError` for a value out of range or an output that cannot be written."""
    for name, least in (("chunk_size", 1), ("max_concurrency", 1), ("limit", 0)):
        value = getattr(job, name)
        if value < least:
            raise JobError(name, value, f"must be at least {least}")
    if job.endpoint and not job.endpoint.startswith(("http://", "https://")):
        raise JobError("endpoint", job.endpoint, "must start with http:// or https://")
    check_output(job.output, is_local)
    return merge_sampling(SamplingParams(), job.sampling)


def open_rows(job: Job) -> Iterator[PromptRow]:
    """Rendered rows; the first one is read now, so that a bad source or spec shows at once."""
    rows = load_rows(job.source)
    if job.limit:
        rows = itertools.islice(rows, job.limit)
    rendered = render_rows(rows, job.spec)
    first = next(rendered, None)
    if first is None:
        raise JobError("dataset", job.source.dataset, "has no rows")
    return itertools.chain([first], rendered)


def warn_if_starved(job: Job, card: ModelCard) -> None:
    """Says so when a large job is throttled below what keeps one replica fed."""
    in_flight = job.chunk_size * job.max_concurrency
    wanted = ROWS_IN_FLIGHT_PER_SEQ * card.max_num_seqs
    if in_flight < wanted and (not job.limit or job.limit > in_flight):
        logger.warning(
            "chunk_size=%d x max_concurrency=%d keeps %d rows in flight; a replica that runs %d at "
            "once wants %d",
            job.chunk_size,
            job.max_concurrency,
            in_flight,
            card.max_num_seqs,
            wanted,
        )


async def infer(
    job: Job, rows: Iterator[PromptRow], endpoint: str, config: InferenceConfig, progress: Progress
) -> Tally:
    """Sends every row, a bounded number of chunks at a time."""
    tally = Tally()

    async def chunks() -> AsyncIterator[Chunk]:
        for number in itertools.count():
            batch = await asyncio.to_thread(lambda: list(itertools.islice(rows, job.chunk_size)))
            if not batch:
                progress.set_total(tally.rows_in)
                return
            tally.rows_in += len(batch)
            yield Chunk(number, len(batch), await write_chunk(batch))

    async def answer(chunk: Chunk) -> File[Any]:
        return await infer_or_fail(chunk, endpoint, config)

    async with aclosing(fan_out(chunks(), answer, job.max_concurrency)) as finished:
        async for chunk, answers in finished:
            tally.answered[chunk.number] = AnsweredChunk(chunk.file, answers)
            tokens = (await read_table(answers))["completion_tokens"].to_pylist()
            progress.advance(chunk.num_rows, sum(tokens))
    tally.elapsed_s = progress.elapsed_s
    return tally


async def infer_or_fail(chunk: Chunk, endpoint: str, config: InferenceConfig) -> File[Any]:
    """A chunk that keeps failing costs the job its unfinished rows, never the other chunks.

    When the task's retries are spent, one last call keeps what can be answered; if that fails as a
    whole, every row of the chunk is written as failed.
    """
    try:
        return await infer_batch(chunk.file, endpoint, config)
    except (flyte.errors.BaseRuntimeError, asyncio.CancelledError) as exc:
        _raise_if_final(exc)
        logger.warning("chunk %d: no attempt is left: %s", chunk.number, exc)
    try:
        last_call = infer_batch.override(retries=0)
        answers: File[Any] = await last_call(chunk.file, endpoint, config, keep_failures=True)
        return answers
    except (flyte.errors.BaseRuntimeError, asyncio.CancelledError) as exc:
        _raise_if_final(exc)
        rows = await read_chunk(chunk.file)
        return await write_answers(
            [
                RowResult.failed(row.id, row.error_kind or "engine_error", row.error or str(exc))
                for row in rows
            ]
        )


def _raise_if_final(exc: BaseException) -> None:
    """A cancellation of this task goes on; one of the child alone is a failure like any other."""
    task = asyncio.current_task()
    if isinstance(exc, asyncio.CancelledError):
        if task is not None and task.cancelling():
            raise exc
    elif getattr(exc, "code", "") in FINAL_CODES:
        raise RequestRefused(str(exc)) from exc


def make_manifest(
    job: Job, config: InferenceConfig, engine: str, totals: Totals, tally: Tally, output: str
) -> Manifest:
    changes_completions = {
        "source": asdict(job.source),
        "spec": asdict(job.spec),
        "limit": job.limit,
        **config.model_dump(),
    }
    manifest = Manifest(
        rows_in=tally.rows_in,
        rows_ok=totals.rows_ok,
        rows_failed=totals.rows_failed,
        rows_truncated=totals.rows_truncated,
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
        elapsed_s=round(tally.elapsed_s, 3),
        tokens_per_s=round(totals.completion_tokens / max(tally.elapsed_s, 1e-9), 1),
        model=config.model,
        model_revision=config.model_revision,
        config_fingerprint=fingerprint(changes_completions),
        versions=versions(engine),
        parts=totals.parts,
        output=output,
    )
    return with_accuracy(manifest, totals) if job.spec.reference_column else manifest


def with_accuracy(manifest: Manifest, totals: Totals) -> Manifest:
    scored = totals.rows_scored
    return manifest.model_copy(
        update={
            "rows_scored": scored,
            "accuracy_strict": totals.correct_strict / scored if scored else None,
            "accuracy_strict_95": wilson_interval(totals.correct_strict, scored),
            "accuracy_flexible": totals.correct_flexible / scored if scored else None,
            "accuracy_flexible_95": wilson_interval(totals.correct_flexible, scored),
        }
    )
