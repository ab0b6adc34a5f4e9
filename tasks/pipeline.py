"""A job from data set to manifest: load, render, chunk, fan out, collect, account.

Inputs are checked before anything is written or started. Loading overlaps inference: a chunk is
rendered and written when there is room for it among those in flight.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any

import flyte
import flyte.errors
from flyte.io import Dir, File
from rich.console import Console

from apps.errors import EngineUnavailable, JobError, PromptError, RequestRefused
from apps.schema import ModelCard, RowResult, SamplingParams, as_error, is_unicode, merge_sampling
from apps.settings import ROWS_IN_FLIGHT_PER_SEQ
from tasks.client import is_endpoint
from tasks.collect import AnsweredChunk, Totals, collect
from tasks.fan_out import fan_out
from tasks.infer_batch import InferenceConfig, infer_batch
from tasks.load import Source, load_rows
from tasks.manifest import Manifest, fingerprint, versions
from tasks.output import RunFolder, as_dir, check_output, open_run_folder
from tasks.progress import Progress, say
from tasks.render import PromptRow, PromptSpec, render_rows
from tasks.score import wilson_interval
from tasks.serving import ServingApp, app_of_our_own, deployed_app
from tasks.tables import read_chunk, read_table, write_answers, write_chunk

logger = logging.getLogger(__name__)

FINAL_CODES = ("NonRecoverableError",)
"""Flyte's error codes of a task that no attempt can save."""

CONSOLE = Console(stderr=True)


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
    prompts: Any = field(default_factory=hashlib.sha256)
    """Digest of every prompt handed out, in order."""
    answered: dict[int, AnsweredChunk] = field(default_factory=dict)
    elapsed_s: float = 0.0
    lost_app: bool = False

    def add(self, rows: Sequence[PromptRow]) -> None:
        self.rows_in += len(rows)
        for row in rows:
            self.prompts.update(f"{row.prompt}\0{row.messages}\0".encode())


async def run_job(job: Job) -> tuple[Manifest, Dir[Any]]:
    """The manifest and the folder of a finished run.

    Raises `NonRecoverableError` with one line for an input that cannot be used, and, with results and
    manifest written, for a run that lost the app or answered no row. Raises `EngineUnavailable` if an
    app that was started for the job ends.
    """
    try:
        is_local = flyte.ctx().mode == "local"
        sampling = check_inputs(job, is_local)
        rows = await asyncio.to_thread(open_rows, job)
        with open_run_folder(job.output) as folder:
            tally = Tally()
            async with serving_app(job, is_local, folder) as app:
                warn_if_starved(job, app.card)
                config = InferenceConfig(
                    model=app.card.id,
                    model_revision=app.card.revision,
                    sampling=sampling,
                    system_prompt=job.system_prompt,
                    chat=job.chat,
                )
                await app.during(infer(job, rows, app.endpoint, config, tally))
            manifest = await asyncio.to_thread(write_run, job, config, app.card.engine, tally, folder)
            directory = await as_dir(folder, job.output)
            fail_if_lost(manifest, tally, directory.path)
            return manifest, directory
    except (JobError, PromptError, RequestRefused) as exc:
        raise flyte.errors.NonRecoverableError(str(exc)) from None


def serving_app(job: Job, is_local: bool, folder: RunFolder) -> AbstractAsyncContextManager[ServingApp]:
    if is_local and not job.endpoint:
        return app_of_our_own(job.model, folder.app_log, CONSOLE)
    return deployed_app(job.endpoint, job.model, is_local, CONSOLE)


def check_inputs(job: Job, is_local: bool) -> SamplingParams:
    """Raises `JobError` or `PromptError` for a value out of range or an output that cannot be written."""
    for name, least in (("chunk_size", 1), ("max_concurrency", 1), ("limit", 0)):
        value = getattr(job, name)
        if value < least:
            raise JobError(name, value, f"must be at least {least}")
    if job.endpoint and not is_endpoint(job.endpoint):
        raise JobError("endpoint", job.endpoint, "is no http:// or https:// address")
    if not is_unicode(job.system_prompt):
        raise JobError("system_prompt", job.system_prompt, "is not Unicode text")
    check_output(job.output, job.source.dataset, is_local)
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
    job: Job, rows: Iterator[PromptRow], endpoint: str, config: InferenceConfig, tally: Tally
) -> None:
    """Sends every row, a bounded number of chunks at a time, and notes in `tally` what came back."""

    async def chunks() -> AsyncIterator[Chunk]:
        for number in itertools.count():
            batch = await asyncio.to_thread(lambda: list(itertools.islice(rows, job.chunk_size)))
            if not batch:
                progress.set_total(tally.rows_in)
                return
            tally.add(batch)
            yield Chunk(number, len(batch), await write_chunk(batch))

    async def answer(chunk: Chunk) -> File[Any]:
        return await infer_or_fail(chunk, endpoint, config, tally)

    with Progress(CONSOLE, job.limit or None) as progress:
        async with aclosing(fan_out(chunks(), answer, job.max_concurrency)) as finished:
            async for chunk, answers in finished:
                tally.answered[chunk.number] = AnsweredChunk(chunk.file, answers)
                tokens = (await read_table(answers))["completion_tokens"].to_pylist()
                progress.advance(chunk.num_rows, sum(tokens))
        tally.elapsed_s = progress.elapsed_s


async def infer_or_fail(chunk: Chunk, endpoint: str, config: InferenceConfig, tally: Tally) -> File[Any]:
    """A chunk that keeps failing costs the job its unfinished rows, never the other chunks.

    When the task's retries are spent, one last call keeps what is answered. Where the app could not be
    reached and answered no other chunk meanwhile, no further call is made for this or any other chunk.
    """
    failure = "the app cannot be reached"
    num_answered = len(tally.answered)
    for attempt in (infer_batch, last_call):
        if tally.lost_app:
            break
        try:
            return await attempt(chunk.file, endpoint, config)
        except (flyte.errors.BaseRuntimeError, asyncio.CancelledError) as exc:
            _raise_if_final(exc)
            failure = str(exc)
            logger.warning("chunk %d: %s", chunk.number, failure)
            others_answered = len(tally.answered) > num_answered
            tally.lost_app |= getattr(exc, "code", "") == EngineUnavailable.__name__ and not others_answered
    return await write_answers(
        [
            RowResult.failed(row.id, row.error_kind or "engine_error", row.error or as_error(failure))
            for row in await read_chunk(chunk.file)
        ]
    )


async def last_call(chunk: File[Any], endpoint: str, config: InferenceConfig) -> File[Any]:
    answers: File[Any] = await infer_batch.override(retries=0)(chunk, endpoint, config, keep_failures=True)
    return answers


def _raise_if_final(exc: BaseException) -> None:
    """A cancellation of this task goes on; one of the child alone is a failure like any other."""
    task = asyncio.current_task()
    if isinstance(exc, asyncio.CancelledError):
        if task is not None and task.cancelling():
            raise exc
    elif getattr(exc, "code", "") in FINAL_CODES:
        raise RequestRefused(str(exc)) from exc


def write_run(job: Job, config: InferenceConfig, engine: str, tally: Tally, folder: RunFolder) -> Manifest:
    """Collects, accounts and commits; blocks."""
    chunks = [tally.answered[number] for number in sorted(tally.answered)]
    totals = collect(chunks, folder.staging, tally.rows_in, bool(job.spec.reference_column))
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
        config_fingerprint=fingerprint(config.model_dump(), tally.prompts.hexdigest()),
        versions=versions(engine),
        parts=totals.parts,
        output=job.output or str(folder.path),
        **(accuracy(totals) if job.spec.reference_column else {}),
    )
    folder.commit(manifest)
    say(CONSOLE, f"{manifest.rows_in} rows: {manifest.rows_ok} ok, {manifest.rows_failed} failed")
    return manifest


def accuracy(totals: Totals) -> dict[str, Any]:
    scored = totals.rows_scored
    return {
        "rows_scored": scored,
        "accuracy_strict": totals.correct_strict / scored if scored else None,
        "accuracy_strict_95": wilson_interval(totals.correct_strict, scored),
        "accuracy_flexible": totals.correct_flexible / scored if scored else None,
        "accuracy_flexible_95": wilson_interval(totals.correct_flexible, scored),
    }


def fail_if_lost(manifest: Manifest, tally: Tally, where: str) -> None:
    """A run without its app, or without a single answer, is no success, though its files are in place."""
    outcome = f"{manifest.rows_failed} of {manifest.rows_in} rows failed, see {where}"
    if tally.lost_app:
        raise flyte.errors.NonRecoverableError(f"the app could not be reached any more: {outcome}")
    if not manifest.rows_ok:
        raise flyte.errors.NonRecoverableError(outcome)
