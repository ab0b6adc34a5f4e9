"""`infer_batch`: one chunk through the app, every row of it answered or failed for good."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import flyte
import flyte.errors
from flyte.io import File
from pydantic import BaseModel

from apps.errors import EngineError, RequestRefused, RequestTooLarge, RowsLeft
from apps.schema import MAX_REQUEST_BYTES, RowResult, SamplingParams, as_error
from apps.settings import AppSettings
from tasks.client import LOCAL_PATIENCE_S, PATIENCE_S, InferenceClient, patiently
from tasks.environments import client_env, infer_retries, infer_timeout
from tasks.render import PromptRow
from tasks.tables import read_chunk, write_answers

DEADLINE_S = 3300.0
"""Of one request, below the platform's hour: what is unfinished then is a `timeout`, and asked again."""
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


@client_env.task(retries=infer_retries, timeout=infer_timeout)
async def infer_batch(
    chunk: File, endpoint: str, config: InferenceConfig, keep_failures: bool = False
) -> File:
    """The answers to a chunk, row for row.

    Raises `RowsLeft` if rows failed in a way that may pass, unless `keep_failures`: then they are sent
    once and written as failed rows. Raises `EngineUnavailable` if nothing was heard of the app for all
    the time that it is given, and `NonRecoverableError` if it refuses the request.
    """
    rows = await read_chunk(chunk)
    is_local = flyte.ctx().mode == "local"
    task_id = f"{flyte.ctx().action.run_name}/{chunk.hash}"
    sender = Sender(config, task_id, LOCAL_PATIENCE_S if is_local else PATIENCE_S)
    async with InferenceClient(endpoint, AppSettings().api_token) as client:
        try:
            results = await sender.infer_rows(client, rows, 1 if keep_failures else MAX_PASSES)
        except RequestRefused as exc:
            raise flyte.errors.NonRecoverableError(str(exc)) from exc
    left = [result for result in results if result.is_retryable()]
    if left and not keep_failures:
        raise RowsLeft(f"{len(left)} of {len(rows)} rows: {left[0].error_kind}: {left[0].error}")
    return await write_answers(results)


@dataclass(frozen=True)
class Sender:
    """Sends the rows of one chunk. `patience_s` as in `tasks.client.patiently`.

    `task_id` is one for all attempts of one run, so that these join, and another run's do not.
    """

    config: InferenceConfig
    task_id: str
    patience_s: float

    async def infer_rows(
        self, client: InferenceClient, rows: list[PromptRow], max_passes: int
    ) -> list[RowResult]:
        """One result a row, in order; rows that failed in rendering are passed through, not sent."""
        results: dict[str, RowResult] = {}
        to_send: dict[str, dict[str, Any]] = {}
        for row in rows:
            if row.error_kind is not None:
                results[row.id] = RowResult.failed(row.id, row.error_kind, row.error or "")
            else:
                to_send[row.id] = wire_row(row, self.config)
        for attempt in range(max_passes):
            await asyncio.sleep(random.uniform(0, 2**attempt) if attempt else 0)
            for batch in split_by_bytes(list(to_send.values()), MAX_REQUEST_BYTES // 2):
                results |= await self._send(client, batch)
            to_send = {row_id: to_send[row_id] for row_id in to_send if results[row_id].is_retryable()}
            if not to_send:
                break
        return [results[row.id] for row in rows]

    async def _send(self, client: InferenceClient, rows: list[dict[str, Any]]) -> dict[str, RowResult]:
        """Results by id. Halves what the app finds too large, down to the row that is."""
        if num_bytes(rows[0]) > MAX_REQUEST_BYTES // 2:
            return _too_long(rows[0], f"the row has {num_bytes(rows[0])} bytes")
        try:
            return await self._collect(client, rows)
        except RequestTooLarge as exc:
            if len(rows) == 1:
                return _too_long(rows[0], as_error(str(exc)))
            middle = len(rows) // 2
            return await self._send(client, rows[:middle]) | await self._send(client, rows[middle:])

    async def _collect(self, client: InferenceClient, rows: list[dict[str, Any]]) -> dict[str, RowResult]:
        """Asks until every row is answered; after a broken connection only for those that are not.

        Patience begins anew whenever the app has been heard of, by an answer or a heartbeat.
        """
        results: dict[str, RowResult] = {}

        async def ask() -> None:
            left = [row for row in rows if row["id"] not in results]
            if not left:
                return
            async with aclosing(client.generate(self._body(left))) as answers:
                async for result in answers:
                    results[result.id] = result

        while len(results) < len(rows):
            num_before = client.num_lines
            try:
                await patiently(ask, self.patience_s)
            except EngineError:
                if client.num_lines == num_before:
                    raise
        return results

    def _body(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "rows": rows,
            "task_id": self.task_id,
            "sampling": self.config.sampling.model_dump(),
            "model": self.config.model,
            "model_revision": self.config.model_revision,
            "deadline_s": DEADLINE_S,
        }


def _too_long(row: dict[str, Any], error: str) -> dict[str, RowResult]:
    return {row["id"]: RowResult.failed(row["id"], "too_long", error)}


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
    """As httpx sends it."""
    return len(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode())
