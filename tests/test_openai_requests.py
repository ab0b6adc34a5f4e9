"""Bodies of the OpenAI routes: what is asked of the engine, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.engines.base import EngineLimits
from apps.error_body import Failure
from apps.openai_requests import Asked, BaseRequest, ChatRequest, CompletionRequest, parse_request
from apps.schema import SamplingParams

ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["text", "json_schema"]),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.text(max_size=3)
            | st.sampled_from(["role", "content", "type", "text", "json_schema", "schema", "name"]),
            children,
            max_size=4,
        )
    ),
    max_leaves=8,
)
FIELDS = sorted(ChatRequest.model_fields | CompletionRequest.model_fields | SamplingParams.model_fields)
LIMITS = EngineLimits("sim", "rev", "simulated 1", max_model_len=100, max_num_seqs=4, kv_cache_tokens=1000)
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}}


def chat(**fields: Any) -> Asked:
    return parse(ChatRequest, {"messages": MESSAGES, **fields})


def completion(**fields: Any) -> Asked:
    return parse(CompletionRequest, {"prompt": "2 + 2 =", **fields})


def parse(kind: type[BaseRequest], body: dict[str, Any]) -> Asked:
    return parse_request(kind, json.dumps(body).encode(), LIMITS, max_rows=200)


def failure_of(kind: type[BaseRequest], body: bytes) -> Failure:
    with pytest.raises(Failure) as caught:
        parse_request(kind, body, LIMITS, max_rows=200)
    return caught.value


def test_defaults_are_those_of_openai() -> None:
    assert chat().samplings == [SamplingParams(temperature=1.0, max_tokens=99)]
    assert completion().samplings == [SamplingParams(temperature=1.0, max_tokens=16)]


def test_sampling_parameters_stand_at_the_top_level() -> None:
    wanted: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "max_tokens": 7,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "seed": 11,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "bad_words": ["c"],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "structured_outputs": {"choice": ["yes", "no"]},
    }
    assert wanted.keys() == SamplingParams.model_fields.keys() - {"n"}
    for asked in (chat(**wanted), completion(**wanted)):
        assert asked.samplings == [SamplingParams.model_validate(wanted)]


def test_one_stop_string_is_a_list_of_one() -> None:
    assert chat(stop="\n").samplings[0].stop == ["\n"]


@pytest.mark.parametrize("also", [{}, {"max_tokens": 9}, {"max_tokens": None}], ids=str)
def test_max_completion_tokens_goes_first(also: dict[str, Any]) -> None:
    assert chat(max_completion_tokens=5, **also).samplings[0].max_tokens == 5


def test_seeds_of_n_completions_count_up() -> None:
    assert [sampling.seed for sampling in chat(n=3, seed=7).samplings] == [7, 8, 9]
    assert [sampling.seed for sampling in chat(n=2).samplings] == [None, None]


@pytest.mark.parametrize(
    ("prompt", "rows"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("nul \0", ["nul \0"]),
    ],
    ids=repr,
)
def test_a_prompt_is_text_or_tokens_or_a_list_of_either(prompt: Any, rows: list[Any]) -> None:
    assert [row.prompt for row in completion(prompt=prompt).rows] == rows


def test_an_answer_is_sent_back_as_it_came() -> None:
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "4",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    (row,) = chat(messages=[*MESSAGES, turn]).rows
    assert row.messages is not None
    assert [message.content for message in row.messages] == ["What is 2 + 2?", "4"]


@pytest.mark.parametrize(
    ("response_format", "structured"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, {"json": SCHEMA}),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
            {"json": SCHEMA},
        ),
    ],
)
def test_a_response_format_constrains_the_text(response_format: Any, structured: Any) -> None:
    assert chat(response_format=response_format) == chat(structured_outputs=structured)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "functions": None},
        {"logprobs": False, "top_logprobs": 0, "logit_bias": {}, "echo": False, "suffix": ""},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "priority": 3},
        {"best_of": 1, "length_penalty": 1.0, "use_beam_search": False, "modalities": ["text"]},
        {"temperature": None, "n": None, "stop": None, "stream_options": None, "response_format": None},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": False}},
        {"add_generation_prompt": True, "spaces_between_special_tokens": True, "new": None},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_changes_nothing_is_let_pass(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()
    assert completion(**fields) == completion()


def test_special_tokens_are_added_as_each_route_does() -> None:
    assert chat(add_special_tokens=False) == chat()
    assert completion(add_special_tokens=True) == completion()
    for ask, adds in ((chat, True), (completion, False)):
        with pytest.raises(Failure, match="add_special_tokens"):
            ask(add_special_tokens=adds)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"x" * 500: 1}, "x" * 80),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"seed": 2**63 - 1, "n": 2}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3.5}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream_options": {"continuous_usage_stats": 0}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"a": [[]] * 10**5}},
                }
            },
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for kind, prompt in ((ChatRequest, {"messages": MESSAGES}), (CompletionRequest, {"prompt": "a"})):
        failure = failure_of(kind, json.dumps({**prompt, **fields}).encode())
        assert (failure.status, failure.param) == (400, param)
        assert len(failure.body().error.message) <= 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "name": "me"}]}, "messages"),
        ({"messages": MESSAGES, "prompt": "a"}, "prompt"),
        ({"messages": [{"role": "user", "content": " "}]}, None),
        ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": MESSAGES, "max_completion_tokens": 5, "max_tokens": 0}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_chat_without_usable_messages_is_refused(body: dict[str, Any], param: str | None) -> None:
    failure = failure_of(ChatRequest, json.dumps(body).encode())
    assert (failure.status, failure.param) == (400, param)


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], 7, {"a": 1}, ["a", 1], [1, "a"], [True], [-1], [1.5], ["a", None]], ids=repr
)
def test_a_prompt_of_another_form_is_refused(prompt: Any) -> None:
    failure = failure_of(CompletionRequest, json.dumps({"prompt": prompt}).encode())
    assert (failure.status, failure.param) == (400, "prompt")


def test_prompts_times_n_have_a_limit() -> None:
    assert len(completion(prompt=["a"] * 2, n=100).samplings) == 100
    assert failure_of(CompletionRequest, json.dumps({"prompt": ["a"] * 3, "n": 100}).encode()).param == "n"
    assert failure_of(CompletionRequest, json.dumps({"prompt": ["a"] * 201}).encode()).param == "prompt"


def test_another_model_does_not_exist() -> None:
    failure = failure_of(ChatRequest, json.dumps({"model": "gpt-4o", "messages": MESSAGES}).encode())
    assert (failure.status, failure.param, failure.code) == (404, "model", "model_not_found")
    assert chat(model="sim") == chat()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": "\\ud800"}',
        b'{"messages": "\xed\xa0\x80"}',
        b'{"temperature": NaN}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"messages": ' * 5000,
        b"[" * 1_000_000,
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    failure = failure_of(ChatRequest, body)
    assert (failure.status, failure.code) == (400, "invalid_json")
    assert len(failure.body().error.message) <= 200


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([ChatRequest, CompletionRequest]),
    st.dictionaries(st.sampled_from(FIELDS), ANY_JSON, max_size=3),
)
def test_any_body_is_taken_or_refused(kind: type[BaseRequest], fields: dict[str, Any]) -> None:
    body = json.dumps({"messages": MESSAGES, **fields} if kind is ChatRequest else {"prompt": "a", **fields})
    try:
        assert parse_request(kind, body.encode(), LIMITS, max_rows=200).samplings
    except Failure as failure:
        assert failure.status in (400, 404)  # noqa: PT017  # both outcomes are right
        failure.body().model_dump_json().encode()
