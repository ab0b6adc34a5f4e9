"""Bodies of `/v1/chat/completions` and `/v1/completions`, turned into rows and sampling parameters.

Sampling parameters are those of a row, at the top level of the body as vLLM's own server takes them.
A parameter that would change the answer and is not supported is refused by name; one that says what
happens anyway, as null or the default, is let pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic.config import JsonDict
from pydantic_core import from_json

from apps.engines.base import EngineLimits
from apps.error_body import Failure
from apps.schema import Message, Row, SamplingParams, TokenId
from apps.strict import OnlyBool, Strict, Text

MAX_N = 128
"""Completions of one prompt: OpenAI's own limit."""
COMPLETION_TOKENS = 16
"""`max_tokens` of a text completion that names none: OpenAI's own default."""
OPENAI_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
"""Where they differ from those of a row, or might come to."""
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "stream_interval",
        "user",
    }
)
"""They say who asks, or how fast and from where the answer may come, and leave the answer as it is."""
Harmless = Mapping[str, tuple[object, ...]]
HARMLESS: Harmless = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "include_reasoning": (True, False),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
}
"""Values of unsupported parameters that ask for what happens anyway."""
HARMLESS_IF_UNKNOWN: tuple[object, ...] = (None, False, "", [], {})
"""Values of parameters that nothing here names."""
HARMLESS_IN_MESSAGES: tuple[object, ...] = (None, [])
"""Clients send an assistant's turn back as it came, with these for what it has not."""
SENT_AS = {"max_tokens": "max_completion_tokens", "structured_outputs": "response_format"}
"""How a client may have sent a sampling parameter."""


class JsonSchema(Strict):
    """`strict` changes nothing: the text always follows the schema."""

    name: Text
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]

    def constraint(self) -> dict[str, Any]:
        return {}


class JsonObjectFormat(Strict):
    type: Literal["json_object"]

    def constraint(self) -> dict[str, Any]:
        return {"structured_outputs": {"json_object": True}}


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    def constraint(self) -> dict[str, Any]:
        return {"structured_outputs": {"json": self.json_schema.schema_}}


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Annotated[Literal[False], OnlyBool] = False
    continuous_usage_stats: Annotated[Literal[False], OnlyBool] = False


TURN: JsonDict = {"role": "user", "content": "Is 17 prime?"}
EXAMPLE: JsonDict = {
    "max_tokens": 4,
    "response_format": {"type": "text"},
    "structured_outputs": {"choice": ["yes", "no"]},
}


class BaseRequest(Strict):
    """What both routes take besides sampling parameters."""

    harmless: ClassVar[Harmless]

    model: Text = ""
    """Empty accepts what is served, as in `/generate`."""
    n: int = Field(1, ge=1, le=MAX_N)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = TextFormat(type="text")

    def prompts(self) -> list[dict[str, Any]]:
        """The fields of a row, for each prompt."""
        raise NotImplementedError

    def default_max_tokens(self, limits: EngineLimits) -> int:
        raise NotImplementedError

    def implied(self) -> dict[str, Any]:
        """Sampling parameters under other names."""
        return self.response_format.constraint()


def _without_empty(messages: Any) -> Any:
    if not isinstance(messages, list):
        return messages
    return [
        {name: value for name, value in message.items() if value not in HARMLESS_IN_MESSAGES}
        if isinstance(message, dict)
        else message
        for message in messages
    ]


class ChatRequest(BaseRequest):
    model_config = ConfigDict(json_schema_extra={"examples": [{**EXAMPLE, "messages": [TURN]}]})
    harmless: ClassVar[Harmless] = {**HARMLESS, "add_special_tokens": (False,)}

    messages: Annotated[
        list[Message],
        FailFast(),
        BeforeValidator(_without_empty, json_schema_input_type=list[Message]),
        Field(min_length=1),
    ]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)

    def prompts(self) -> list[dict[str, Any]]:
        return [{"messages": self.messages}]

    def default_max_tokens(self, limits: EngineLimits) -> int:
        """What a context has beside the shortest prompt: the engine stops where it ends."""
        return limits.max_model_len - 1

    def implied(self) -> dict[str, Any]:
        limit = self.max_completion_tokens
        return super().implied() | ({} if limit is None else {"max_tokens": limit})


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _as_prompts(prompt: Any) -> Any:
    """A single prompt becomes a list of one."""
    prompts = prompt if isinstance(prompt, list) and not _is_token_ids(prompt) else [prompt]
    if not prompts or not all(isinstance(one, str) or _is_token_ids(one) for one in prompts):
        raise ValueError("a string, a list of token ids, or a list of either is expected")
    return prompts


Tokens = Annotated[list[TokenId], Field(min_length=1)]
Prompts = Annotated[list[Text | Tokens], Field(min_length=1)]


class CompletionRequest(BaseRequest):
    model_config = ConfigDict(json_schema_extra={"examples": [{**EXAMPLE, "prompt": TURN["content"]}]})
    harmless: ClassVar[Harmless] = {**HARMLESS, "add_special_tokens": (True,)}

    prompt: Annotated[
        list[Any],
        BeforeValidator(_as_prompts, json_schema_input_type=Text | Tokens | Prompts),
    ]

    def prompts(self) -> list[dict[str, Any]]:
        return [{"prompt": prompt} for prompt in self.prompt]

    def default_max_tokens(self, limits: EngineLimits) -> int:
        return COMPLETION_TOKENS


@dataclass(frozen=True)
class Asked:
    """What to compute: each of `rows`, with each of `samplings`."""

    rows: list[Row]
    samplings: list[SamplingParams]
    stream: bool
    include_usage: bool


def parse_request(kind: type[BaseRequest], body: bytes, limits: EngineLimits, max_rows: int) -> Asked:
    """Raises `Failure`, which names the first parameter that is wrong."""
    fields = _parse_fields(kind, body)
    sampling = {
        name: fields[name]
        for name in fields.keys() - kind.model_fields
        if name in SamplingParams.model_fields
    }
    own = {name: fields[name] for name in fields.keys() - sampling}
    if unknown := sorted(own.keys() - kind.model_fields):
        message = f"{unknown[0]!r} is not supported"
        raise Failure(400, message, param=unknown[0][:80], code="unsupported_parameter")
    try:
        request = kind.model_validate(own)
        _check_model(request, limits)
        prompts = request.prompts()
        if len(prompts) * request.n > max_rows:
            message = f"{len(prompts)} prompts, {request.n} times each, are more than {max_rows}"
            raise Failure(400, message, param="n" if request.n > 1 else "prompt")
        rows = [Row.model_validate({"id": str(n), **prompt}) for n, prompt in enumerate(prompts)]
        samplings = _samplings(request, sampling, limits)
    except ValidationError as exc:
        raise _name_parameter(exc, fields) from exc
    if any(row.is_blank() for row in rows):
        raise Failure(400, "the prompt is empty", code="empty")
    return Asked(rows, samplings, request.stream, request.stream_options.include_usage)


def _parse_fields(kind: type[BaseRequest], body: bytes) -> dict[str, Any]:
    """What is left of the body once all is gone that changes nothing.

    `from_json` refuses lone surrogates, bytes that are not UTF-8, and nesting of more than 200 levels.
    """
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as exc:
        raise Failure(400, f"the body is not JSON: {exc}", code="invalid_json") from exc
    if not isinstance(fields, dict):
        raise Failure(400, "the body is not a JSON object", code="invalid_json")
    return {name: value for name, value in fields.items() if not _is_harmless(kind, name, value)}


def _is_harmless(kind: type[BaseRequest], name: str, value: Any) -> bool:
    if value is None or name in IGNORED:
        return True
    if name in kind.model_fields or name in SamplingParams.model_fields:
        return False
    if name in kind.harmless:
        return _is_among(value, kind.harmless[name])
    return _is_among(value, HARMLESS_IF_UNKNOWN)


def _is_among(value: Any, values: tuple[object, ...]) -> bool:
    """As JSON has it, where 1 is 1.0 but not true."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def _check_model(request: BaseRequest, limits: EngineLimits) -> None:
    if request.model not in ("", limits.model):
        message = f"the model {request.model!r} does not exist, this app serves {limits.model!r}"
        raise Failure(404, message, param="model", code="model_not_found")


def _samplings(request: BaseRequest, sent: dict[str, Any], limits: EngineLimits) -> list[SamplingParams]:
    """One for each of the `n` completions of a prompt; as in vLLM, their seeds count up."""
    implied = request.implied()
    if "structured_outputs" in implied and "structured_outputs" in sent:
        message = "response_format and structured_outputs cannot both be given"
        raise Failure(400, message, param="structured_outputs")
    SamplingParams.model_validate({name: sent[name] for name in sent.keys() & implied.keys()})
    fields = {**OPENAI_DEFAULTS, "max_tokens": request.default_max_tokens(limits), **sent, **implied}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    first = SamplingParams.model_validate(fields)
    if first.seed is None:
        return [first] * request.n
    return [SamplingParams.model_validate({**fields, "seed": first.seed + n}) for n in range(request.n)]


def _name_parameter(exc: ValidationError, fields: dict[str, Any]) -> Failure:
    first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in first["loc"]]
    if path and path[0] not in fields:
        path[0] = SENT_AS.get(path[0], path[0])
    wrong = first["msg"].removeprefix("Value error, ")
    message = f"{'.'.join(path):.80}: {wrong}" if path else wrong
    return Failure(400, message, param=path[0][:80] if path else None, code="invalid_value")
