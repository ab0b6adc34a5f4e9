"""What the OpenAPI schema says of OpenAI's routes, whose bodies are read by `apps.openai_requests`."""

from __future__ import annotations

from typing import Any, TypedDict

from pydantic import BaseModel

from apps.error_body import documented
from apps.openai_requests import (
    HARMLESS_IF_UNKNOWN,
    HARMLESS_IN_MESSAGES,
    IGNORED,
    OPENAI_DEFAULTS,
    BaseRequest,
)
from apps.schema import SamplingParams

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
EVENT: Schema = {
    "type": "object",
    "description": "If `stream` is set: `data` is a chunk or an error as JSON, and `[DONE]` in the last.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


class Documented(TypedDict):
    """Arguments of a route."""

    response_model: None
    responses: dict[int | str, dict[str, Any]]
    openapi_extra: dict[str, Any]


def documented_as(request: type[BaseRequest], answer: type[BaseModel]) -> Documented:
    content = {
        "application/json": {"schema": inlined(answer)},
        "text/event-stream": {"itemSchema": EVENT},
    }
    body = {"required": True, "content": {"application/json": {"schema": body_schema(request)}}}
    return {
        "response_model": None,
        "responses": {
            200: {"content": content},
            **documented(400, 401, 404, 408, 413, 429, 503, 504),
        },
        "openapi_extra": {"requestBody": body},
    }


def body_schema(request: type[BaseRequest]) -> Schema:
    """All that `parse_request` takes: null for what may be missing, and much that changes nothing."""
    own, sampling = inlined(request), inlined(SamplingParams)
    properties: dict[str, Schema] = {
        **{name: {"enum": [*values]} for name, values in request.harmless.items()},
        **sampling["properties"],
        **own["properties"],
    }
    stop = properties["stop"]
    properties["stop"] = {"anyOf": [stop["items"], stop]}
    properties["max_tokens"].pop("default")
    for name, value in OPENAI_DEFAULTS.items():
        properties[name]["default"] = value
    for name in properties.keys() - set(own["required"]):
        properties[name] = {"anyOf": [properties[name], NULL]}
    properties |= {name: {} for name in sorted(IGNORED)}
    if messages := properties.get("messages"):
        messages["items"]["additionalProperties"] = {"enum": [*HARMLESS_IN_MESSAGES]}
    return {**own, "properties": properties, "additionalProperties": {"enum": [*HARMLESS_IF_UNKNOWN]}}


def inlined(model: type[BaseModel]) -> Schema:
    """The model's schema without references, which inside another document would point nowhere."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        reference = node.get("$ref")
        if reference is None:
            return {name: resolve(value) for name, value in node.items() if name != "discriminator"}
        rest = {name: value for name, value in node.items() if name != "$ref"}
        return resolve(definitions[reference.removeprefix("#/$defs/")] | rest)

    resolved: Schema = resolve(schema)
    return resolved
