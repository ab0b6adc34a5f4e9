"""Rows and sampling parameters: what is taken, and that nothing but `PromptError` leaves for the rest."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.errors import PromptError
from apps.schema import (
    Message,
    RawRow,
    Row,
    SamplingParams,
    merge_sampling,
    parse_row,
)
from apps.strict import MAX_ERROR_CHARS
from apps.structured import MAX_SCHEMA_BYTES
from tests.engines import make_row

HUGE = 10**5_000


def nested(depth: int, kind: type = list) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def validate(raw: RawRow) -> SamplingParams:
    return merge_sampling(SamplingParams(), parse_row(raw).sampling)


def refusal(**fields: Any) -> tuple[str, str]:
    """Kind and message of a row that is refused."""
    raw = RawRow.model_validate({"id": "0", **fields})
    with pytest.raises(PromptError) as caught:
        validate(raw)
    return caught.value.kind, str(caught.value)


def test_messages_take_openai_text_parts() -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 2?"}]
    row = parse_row(make_row(prompt=None, messages=[{"role": "critic", "content": parts}]))
    assert row.messages == [Message(role="critic", content="What is\n2 + 2?")]


def test_a_prompt_may_be_token_ids() -> None:
    row = parse_row(make_row(prompt=[1, 2, 3]))
    assert row.prompt == [1, 2, 3]
    assert (row.num_chars, row.is_blank()) == (12, False)
    assert parse_row(make_row(prompt=[])).is_blank()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"prompt": [1, -1]}, "prompt.tokens.1: .*, got -1", id="negative token id"),
        pytest.param({"prompt": [1, True]}, "prompt.tokens.1: .*, got True", id="bool token id"),
        pytest.param({"prompt": [2**31]}, "prompt.tokens.0: .*, got 2147483648", id="large token id"),
        pytest.param({"prompt": nested(100_000)}, "prompt.tokens.0: .*, got a list of 1", id="deep list"),
        pytest.param({"prompt": nested(100_000, dict)}, "prompt: .*, got an object of 1", id="deep object"),
        pytest.param({"prompt": HUGE}, "prompt: .*, got an integer of 16610 bits", id="huge integer"),
        pytest.param({"prompt": float("nan")}, "prompt: .*, got nan", id="NaN"),
        pytest.param({"prompt": "\ud800"}, r"prompt.text: .*, got '\\ud800'", id="lone surrogate"),
        pytest.param(
            {"prompt": "a", "x": nested(100_000)}, "x: Extra inputs are not permitted", id="unknown field"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type: .*, got 'image_url'",
            id="image",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
            "messages.0.content.0.text: Input should be a valid string",
            id="lone surrogate in a part",
        ),
        pytest.param(
            {"messages": [{"role": "user", "\ud800": ""}]}, r"messages.0: unknown field \\ud800", id="key"
        ),
        pytest.param({"messages": nested(100_000)}, "messages.0: ", id="deep messages"),
    ],
)
def test_a_malformed_prompt_is_named(fields: dict[str, Any], message: str) -> None:
    kind, text = refusal(**fields)
    assert kind == "invalid_prompt"
    assert re.match(message, text)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        pytest.param({"n": 2}, "sampling.n: .* send the row n times", id="n"),
        pytest.param({"temperature": 2.1}, "sampling.temperature: .* got 2.1", id="temperature"),
        pytest.param({"temperature": float("nan")}, "sampling.temperature: .* got nan", id="NaN"),
        pytest.param({"seed": HUGE}, "sampling.seed: .* got an integer of 16610 bits", id="huge seed"),
        pytest.param({"presence_penalty": -2.5}, "sampling.presence_penalty: ", id="presence_penalty"),
        pytest.param({"frequency_penalty": 3}, "sampling.frequency_penalty: ", id="frequency_penalty"),
        pytest.param({"repetition_penalty": 0}, "sampling.repetition_penalty: ", id="repetition_penalty"),
        pytest.param(
            {"min_tokens": 600}, "sampling: min_tokens=600 is above max_tokens=512", id="min_tokens"
        ),
        pytest.param({"stop": ["a"] * 65}, "sampling.stop: ", id="many stop strings"),
        pytest.param({"stop": [""]}, "sampling.stop.0: ", id="empty stop string"),
        pytest.param({"stop": ["a" * 257]}, "sampling.stop.0: ", id="long stop string"),
        pytest.param({"stop_token_ids": [1] * 65}, "sampling.stop_token_ids: ", id="many stop token ids"),
        pytest.param({"stop_token_ids": [-1]}, "sampling.stop_token_ids.0: ", id="negative stop token id"),
        pytest.param({"bad_words": ["é" * 256]}, "sampling.bad_words: more than 512 bytes", id="bad_words"),
        pytest.param({"bad_words": [""]}, "sampling.bad_words.0: ", id="empty bad word"),
        pytest.param({"logit_bias": {}}, "sampling.logit_bias: Extra inputs", id="unknown"),
        pytest.param({"\ud800": 1}, r"sampling: unknown field \\ud800", id="lone surrogate"),
        pytest.param(nested(100_000), "sampling: .* got a list of 1", id="deep list"),
    ],
)
def test_wrong_sampling_is_named(sampling: Any, message: str) -> None:
    kind, text = refusal(prompt="a", sampling=sampling)
    assert kind == "invalid_sampling"
    assert re.match(message, text)


@pytest.mark.parametrize(
    "structured",
    [
        pytest.param({}, id="none"),
        pytest.param({"regex": "a", "choice": ["a"]}, id="two"),
        pytest.param({"json": "{"}, id="not JSON"),
        pytest.param({"json": "5"}, id="no object"),
        pytest.param({"json": {"minimum": float("inf")}}, id="infinity"),
        pytest.param({"json": '{"minimum": NaN}'}, id="NaN"),
        pytest.param({"json": {"minimum": HUGE}}, id="huge integer"),
        pytest.param({"json": {"const": "\ud800"}}, id="lone surrogate"),
        pytest.param({"json": '"\ud800"'}, id="lone surrogate in text"),
        pytest.param({"json": nested(65, dict)}, id="65 levels"),
        pytest.param({"json": nested(100_000, dict)}, id="very deep object"),
        pytest.param({"json": "[" * 60_000}, id="very deep text"),
        pytest.param({"json": {"description": "é" * (MAX_SCHEMA_BYTES // 2)}}, id="large schema"),
        pytest.param({"json": "[" * (MAX_SCHEMA_BYTES + 1)}, id="large schema as text"),
        pytest.param({"json": {"const": "x" * 1_001}}, id="long string in a schema"),
        pytest.param({"json": {"properties": {"x" * 1_001: {}}}}, id="long name in a schema"),
        pytest.param({"json": {"type": "array", "maxItems": 10**9}}, id="maxItems"),
        pytest.param({"json": {"anyOf": [{"type": "array", "minItems": 1e5}]}}, id="minItems"),
        pytest.param({"json": {"type": "string", "pattern": "a{100000}"}}, id="pattern"),
        pytest.param({"json": {"patternProperties": {"a{2,1001}": {}}}}, id="patternProperties"),
        pytest.param({"regex": "a" * 1_001}, id="long regex"),
        pytest.param({"regex": "a{1001}"}, id="repeats"),
        pytest.param({"regex": "a{1,999999999999}"}, id="many repeats"),
        pytest.param({"grammar": 'root ::= root root | "a"'}, id="grammar"),
        pytest.param({"regex": ""}, id="empty regex"),
        pytest.param({"choice": []}, id="no choice"),
        pytest.param({"choice": ["a"] * 1_001}, id="many choices"),
        pytest.param({"choice": ["a" * 1_000] * 100}, id="large choices"),
        pytest.param({"choice": ["a" * 1_001]}, id="long choice"),
        pytest.param({"choice": [""]}, id="empty choice"),
        pytest.param({"json_object": False}, id="json_object"),
        pytest.param({"json_object": 1}, id="json_object 1"),
        pytest.param({"structural_tag": "{}"}, id="unknown"),
        pytest.param(nested(100_000), id="deep list"),
    ],
)
def test_malformed_structured_outputs_are_invalid_schema(structured: Any) -> None:
    kind, text = refusal(prompt="a", sampling={"structured_outputs": structured})
    assert kind == "invalid_schema"
    assert text.startswith("sampling.structured_outputs")
    assert len(text) <= MAX_ERROR_CHARS + len(r"\ud800")


@pytest.mark.parametrize(
    "structured",
    [
        pytest.param({"json": {"const": nested(62, dict)}}, id="schema"),
        pytest.param({"json": '{"maximum": 36893488147419103232}'}, id="schema as text"),
        pytest.param({"regex": "a+"}, id="regex"),
        pytest.param({"choice": ["yes", "no"]}, id="choice"),
        pytest.param({"regex": "a{3,1000}b{2,}"}, id="repeats"),
        pytest.param({"json": {"type": "string", "maxLength": 10**9}}, id="maxLength"),
        pytest.param({"json": {"description": "x" * 5_000}}, id="long description"),
        pytest.param({"json_object": True}, id="json_object"),
    ],
)
def test_structured_outputs_survive_the_way_to_the_app(structured: dict[str, Any]) -> None:
    sampling = merge_sampling(SamplingParams(), {"structured_outputs": structured})
    assert sampling.structured_outputs is not None
    assert sampling.structured_outputs.model_dump().keys() >= structured.keys()
    assert SamplingParams.model_validate(sampling.model_dump()) == sampling
    assert SamplingParams.model_validate_json(sampling.model_dump_json()) == sampling


def test_a_row_overrides_field_by_field() -> None:
    base = merge_sampling(SamplingParams(max_tokens=9), {"structured_outputs": {"regex": "a"}})
    merged = merge_sampling(base, {"seed": 3})
    assert merged == base.model_copy(update={"seed": 3})
    assert merge_sampling(base, None) is base


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"prompt": "a"} | {f"k{number}": 1 for number in range(300_000)}, id="unknown fields"),
        pytest.param({"messages": [{"role": 5, "content": 6}] * 300_000}, id="messages"),
        pytest.param({"prompt": ["x"] * 300_000}, id="token ids"),
        pytest.param({"prompt": "a", "sampling": dict.fromkeys(map(str, range(300_000)))}, id="sampling"),
    ],
)
def test_a_million_mistakes_cost_as_much_as_one(fields: dict[str, Any]) -> None:
    raw = RawRow.model_validate({"id": "0", **fields})
    started = time.perf_counter()
    with pytest.raises(PromptError):
        validate(raw)
    assert time.perf_counter() - started < 0.5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
NAMES = st.sampled_from([*Row.model_fields, *SamplingParams.model_fields, "json", "role", "content"])


def test_one_of_many_unknown_fields_is_named() -> None:
    kind, text = refusal(prompt="a", **{f"k{number}": 1 for number in range(100)})
    assert kind == "invalid_prompt"
    assert re.fullmatch(r"row: unknown field k\d+", text)


@given(prompt=JSON, messages=JSON, sampling=JSON | st.dictionaries(NAMES, JSON))
def test_only_prompt_errors_leave(prompt: Any, messages: Any, sampling: Any) -> None:
    raw = RawRow.model_validate({"id": "0", "prompt": prompt, "messages": messages, "sampling": sampling})
    try:
        merged = validate(raw)
    except PromptError as exc:
        str(exc).encode()
    else:
        merged.model_dump_json()
