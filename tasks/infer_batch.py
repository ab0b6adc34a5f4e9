"""`infer_batch`: one chunk through the app, every row of it answered or failed for good."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import flyte.errors
from flyte.io import File
from pydantic import BaseModel

from apps.errors import RequestRefused
from apps.schema import MAX_REQUEST_BYTES, RowResult, SamplingParams
from tasks.client import InferenceClient, patiently
from tasks.environments import client_env, infer_retries, infer_timeout
from tasks.render import PromptRow
from tasks.tables import read_chunk, write_answers

PATIENCE_S = 1800.0
"""How long a chunk waits for an app that is starting, full or unreachable: longer than a cold start."""
DEADLINE_S = 3300.0
"""Of one request, below the platform's hour, so that the rows finished by then are answered."""
MAX_PASSES = 3
"""Times that rows with retryable failures are sent before the task itself is retried."""


class InferenceConfig(BaseModel):
    """What changes a completion, beside the chunk itself."""

    model: str
    model_revision: str
    sampling: SamplingParams
    system_prompt: str = ""
    chat: bool = True
    """Prompts are user messages for the model's chat template; else they go to the model as they are."""


class RowsLeft(Exception):
    """Rows of a chunk still have retryable failures; the task is worth another attempt."""


@client_env.task(retries=infer_retries, timeout=infer_timeout)
async def infer_batch(
    chunk: File, endpoint: str, config: InferenceConfig, keep_failures: bool = False
) -> File:
    """The answers to a chunk, row for row.

    Raises `RowsLeft` if rows failed in a way that may pass, unless `keep_failures`: then they are
    written as failed rows. Raises `EngineError` if the app could not be reached for `PATIENCE_S`
    seconds, and `NonRecoverableError` if it refuses the request.
    """
    rows = await read_chunk(chunk)
    async with InferenceClient(endpoint) as client:
        try:
            results = await infer_rows(client, rows, config, chunk.hash or "")
        except RequestRefused as exc:
            raise flyte.errors.NonRecoverableError(str(exc)) from exc
    left = [result for result in results if result.is_retryable()]
    if left and not keep_failures:
        raise RowsLeft(f"{len(left)} of {len(rows)} rows: {left[0].error_kind}: {left[0].error}")
    return await write_answers(results)


async def infer_rows(
    client: InferenceClient, rows: list[PromptRow], config: InferenceConfig, task_id: str
) -> list[RowResult]:
    """One result a row, in order; rows that failed in rendering are passed through, not sent."""
    results: dict[str, RowResult] = {}
    to_send: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.error_kind is not None:
            results[row.id] = RowResult.failed(row.id, row.error_kind, row.error or "")
        else:
            to_send[row.id] = wire_row(row, config)
    for attempt in range(MAX_PASSES):
        await asyncio.sleep(random.uniform(0, 2**attempt) if attempt else 0)
        for batch in split_by_bytes(list(to_send.values()), MAX_REQUEST_BYTES // 2):
            for result in await _send(client, batch, config, task_id):
                results[result.id] = result
        to_send = {row_id: to_send[row_id] for row_id in to_send if results[row_id].is_retryable()}
        if not to_send:
            break
    return [results[row.id] for row in rows]


async def _send(
    client: InferenceClient, batch: list[dict[str, Any]], config: InferenceConfig, task_id: str
) -> list[RowResult]:
    if num_bytes(batch[0]) > MAX_REQUEST_BYTES // 2:
        error = f"the row has {num_bytes(batch[0])} bytes, a request takes {MAX_REQUEST_BYTES // 2}"
        return [RowResult.failed(batch[0]["id"], "too_long", error)]
    body = {
        "rows": batch,
        "task_id": task_id,
        "sampling": config.sampling.model_dump(),
        "model": config.model,
        "deadline_s": DEADLINE_S,
    }
    return await patiently(lambda: client.generate(body), PATIENCE_S)


def wire_row(row: PromptRow, config: InferenceConfig) -> dict[str, Any]:
    """A row as `/generate` takes it; a conversation with a system message of its own keeps that."""
    if row.messages is None and not config.chat:
        return {"id": row.id, "prompt": row.prompt}
    user = [{"role": "user", "content": row.prompt}]
    messages = user if row.messages is None else json.loads(row.messages)
    if config.system_prompt and [message["role"] for message in messages[:1]] != ["system"]:
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return {"id": row.id, "messages": messages}


def split_by_bytes(rows: list[dict[str, Any]], limit: int) -> Iterator[list[dict[str, Any]]]:
    """Consecutive groups of at most `limit` bytes; a row that is larger is a group of its own."""
    group: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        row_bytes = num_bytes(row)
        if group and size + row_bytes > limit:
            yield group
            group, size = [], 0
        group.append(row)
        size += row_bytes
    if group:
        yield group


def num_bytes(row: dict[str, Any]) -> int:
    return len(json.dumps(row).encode())
