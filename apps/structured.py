"""Structured outputs: what a row may ask its text to match, within bounds that the engine can bear."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from apps.strict import OnlyBool, SomeText, Strict, check_unicode

MAX_SCHEMA_BYTES = 65_536
MAX_SCHEMA_DEPTH = 64
"""Levels of objects and arrays in a JSON schema: vLLM's own limit."""
MAX_ITEMS = 10_000
"""Largest `minItems` and `maxItems`: the engine writes out every one of them when it compiles."""
MAX_LITERAL_CHARS = 1_000
"""Of one choice, one string of a schema, and one regular expression: a step costs time in proportion."""
MAX_REPEATS = 1_000
"""Largest `{n,m}` of a regular expression, for the same reason."""
MAX_CHOICES = 1_000
"""The engine gives up above 2,000 ways to go on."""

_REPEATS = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def _check_repeats(pattern: str) -> str:
    for lowest, highest in _REPEATS.findall(pattern):
        if len(lowest) > 4 or len(highest) > 4 or max(int(lowest), int(highest or 0)) > MAX_REPEATS:
            raise ValueError(f"repeats more than {MAX_REPEATS} times")
    return pattern


def _canonical_schema(schema: Any) -> Any:
    """A JSON schema as text. vLLM's transport takes no integer beyond 64 bits in any other form."""
    if schema is None or (isinstance(schema, str) and len(schema) > MAX_SCHEMA_BYTES):
        return schema
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, dict):
            raise ValueError("a schema is a JSON object")
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_SCHEMA_DEPTH} levels") from None
    if len(text) <= MAX_SCHEMA_BYTES:
        _check_schema(parsed)
    return text


def _check_schema(schema: dict[str, Any]) -> None:
    """Raises `ValueError` for what would hold up the engine; whether it is a schema at all, vLLM says."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for node in level:
            for key, value in node.items() if isinstance(node, dict) else enumerate(node):
                if isinstance(value, dict | list):
                    below.append(value)
                elif isinstance(value, str):
                    _check_string(key, value)
                elif key in ("minItems", "maxItems") and value is not None and value > MAX_ITEMS:
                    raise ValueError(f"{key} is above {MAX_ITEMS}")
            if isinstance(node, dict):
                for name in node:
                    _check_string("pattern", name)
        level = below
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_SCHEMA_DEPTH} levels")


def _check_string(key: Any, text: str) -> None:
    if key not in ("description", "title", "$comment") and len(text) > MAX_LITERAL_CHARS:
        raise ValueError(f"a string of more than {MAX_LITERAL_CHARS} characters")
    if key == "pattern":
        _check_repeats(text)


def _check_schema_bytes(text: str) -> str:
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise ValueError(f"more than {MAX_SCHEMA_BYTES} bytes")
    return text


Choice = Annotated[str, Field(min_length=1, max_length=MAX_LITERAL_CHARS), AfterValidator(check_unicode)]


ONE_GIVEN: list[JsonValue] = [
    {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
    for name in ("json", "regex", "choice", "json_object")
]
"""In JSON schema."""


class StructuredOutputs(Strict):
    """What the text must match, under vLLM's names: exactly one of the fields.

    Of vLLM's kinds `grammar` is missing: a general grammar of one line can keep the engine busy with a
    single token for good. The bounds above keep the others to milliseconds.
    """

    model_config = ConfigDict(serialize_by_alias=True, json_schema_extra={"oneOf": ONE_GIVEN})

    json_schema: Annotated[
        str | None,
        BeforeValidator(_canonical_schema, json_schema_input_type=dict[str, Any] | SomeText | None),
        AfterValidator(lambda text: text and _check_schema_bytes(check_unicode(text))),
    ] = Field(None, alias="json")
    """A JSON schema, as an object or as text."""
    regex: (
        Annotated[
            str,
            Field(min_length=1, max_length=MAX_LITERAL_CHARS),
            AfterValidator(check_unicode),
            AfterValidator(_check_repeats),
        ]
        | None
    ) = None
    choice: Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    json_object: Annotated[Literal[True], OnlyBool] | None = None
    """Any JSON object."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if sum(value is not None for value in self.__dict__.values()) != 1:
            raise ValueError("exactly one of json, regex, choice and json_object must be given")
        _check_schema_bytes("".join(self.choice or ()))
        return self
