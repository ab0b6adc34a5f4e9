"""The nouns that every part shares: the row, its sampling parameters, its result, the bodies of requests.

Rows of a request are validated one at a time with `parse_row`, so that a malformed row is a failed
row and its neighbours are answered.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    StrictInt,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import CoreSchema

from apps.errors import PERMANENT_KINDS, ErrorKind, PromptError
from apps.strict import MAX_ERROR_CHARS as MAX_ERROR_CHARS
from apps.strict import SomeText, Strict, Text
from apps.strict import as_error as as_error
from apps.strict import is_unicode as is_unicode
from apps.structured import StructuredOutputs

NDJSON = "application/x-ndjson"
"""Media type of a stream of `/generate`: a JSON object a line, lines ended by newline bytes alone."""

MAX_REQUEST_BYTES = 8_000_000
"""Default limit of a body of `/generate`, and what a client keeps to."""

FinishReason = Literal["stop", "length"]

CHARS_PER_TOKEN = 4
"""Where tokens are estimated: what English text has in the usual vocabularies."""


class TextPart(Strict):
    """A part of a message in OpenAI's list form."""

    type: Literal["text"]
    text: Text


_TEXT_PARTS = TypeAdapter(Annotated[list[TextPart], Field(fail_fast=True)])


def _join_parts(content: Any) -> Any:
    """Parts become one string as in vLLM: joined by newlines."""
    if isinstance(content, list):
        return "\n".join(part.text for part in _TEXT_PARTS.validate_python(content))
    return content


class Message(Strict):
    """One turn of a conversation; the model's own chat template turns a list of them into a prompt."""

    role: Text
    content: Annotated[
        Text,
        BeforeValidator(
            _join_parts, json_schema_input_type=str | Annotated[list[TextPart], Field(min_length=1)]
        ),
    ]
    """Text, or a list of `{"type": "text", "text": …}`, which becomes text."""


def _check_single(n: int) -> int:
    if n != 1:
        raise ValueError(
            "only 1 is possible: for more completions send the row n times, under ids of its own"
        )
    return n


MAX_BAD_WORDS_BYTES = 512
"""With one byte added for each word. vLLM has room for 1,024 tokens of them, with and without a
leading space, and on a GPU finds that out in the worker, where it ends the engine."""


def _check_bad_words(words: list[str]) -> list[str]:
    if sum(len(word.encode()) + 1 for word in words) > MAX_BAD_WORDS_BYTES:
        raise ValueError(f"more than {MAX_BAD_WORDS_BYTES} bytes, with one added for each word")
    return words


StopString = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]


class SamplingParams(Strict):
    """What changes a completion, under vLLM's names and within its bounds; greedy unless asked otherwise."""

    n: Annotated[int, AfterValidator(_check_single), Field(json_schema_extra={"const": 1})] = 1
    """A row has one completion."""
    temperature: float = Field(0.0, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, lt=2**31)
    """0 and -1 consider every token."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    max_tokens: int = Field(512, ge=1, lt=2**31)
    """Completion tokens at most; a completion that reaches it has `finish_reason="length"`."""
    min_tokens: int = Field(0, ge=0, lt=2**31)
    """Completion tokens before the model's end or one of `stop_token_ids` counts."""
    stop: list[StopString] = Field([], max_length=64, fail_fast=True)
    stop_token_ids: list[TokenId] = Field([], max_length=64, fail_fast=True)
    """vLLM has room for 128 with the model's own, and on a GPU finds that out in the worker."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0)
    """vLLM takes any positive number; logits divided by a far smaller one are not finite."""
    ignore_eos: bool = False
    bad_words: Annotated[list[SomeText], AfterValidator(_check_bad_words)] = Field(
        [], max_length=64, fail_fast=True
    )
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _min_is_within_max(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        return self


MAX_PROMPT_TOKENS = 10_000_000
"""Of a prompt given as token ids: above any context."""


def _kind_of_prompt(prompt: Any) -> str | None:
    return "text" if isinstance(prompt, str) else "tokens" if isinstance(prompt, list) else None


Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True), Tag("tokens")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="neither text nor a list of token ids",
    ),
]


class Row(Strict):
    """One prompt: text or token ids as `prompt`, or a conversation as `messages`; exactly one of the two."""

    id: Text
    prompt: Prompt | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    sampling: dict[str, Any] | None = None
    """Overrides of the request's sampling parameters, validated when merged."""

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages must be given, and not null")
        return self

    @property
    def num_chars(self) -> int:
        """Characters of all prompt text, before any chat template; a token id counts as `CHARS_PER_TOKEN`."""
        if isinstance(self.prompt, list):
            return CHARS_PER_TOKEN * len(self.prompt)
        if self.prompt is not None:
            return len(self.prompt)
        return sum(len(message.content) for message in self.messages or [])

    def is_blank(self) -> bool:
        if isinstance(self.prompt, list):
            return not self.prompt
        texts = [self.prompt] if self.prompt is not None else [m.content for m in self.messages or []]
        return not any(text and not text.isspace() for text in texts)


class RowResult(BaseModel):
    """One completion, or why there is none (`error_kind` set, `text` null)."""

    id: str
    text: str | None = None
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error_kind: ErrorKind | None = None
    error: str | None = None
    queued_s: float | None = None
    """Seconds between arrival in the app and the hand-over to the engine."""
    ttft_s: float | None = None
    """Seconds between arrival in the app and the first token."""
    e2e_s: float | None = None
    """Seconds between arrival in the app and the last token."""

    @classmethod
    def failed(cls, row_id: str, kind: ErrorKind, error: str) -> RowResult:
        return cls(id=row_id, error_kind=kind, error=error)

    def is_retryable(self) -> bool:
        return self.error_kind is not None and self.error_kind not in PERMANENT_KINDS


class RawRow(BaseModel):
    """A row before validation: only its id is certain, so that a failure can be attributed."""

    model_config = ConfigDict(extra="allow")

    id: Annotated[Text, Field(strict=True)]

    @classmethod
    def __get_pydantic_json_schema__(cls, raw: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """What a row should be, and what is answered all the same."""
        return {"anyOf": [handler(Row.__pydantic_core_schema__), handler(raw)]}


EXAMPLE: JsonDict = {
    "rows": [
        {"id": "0", "prompt": "Is 17 prime?"},
        {"id": "1", "messages": [{"role": "user", "content": "Is 18?"}], "sampling": {"max_tokens": 4}},
    ],
    "sampling": {"temperature": 0.7, "structured_outputs": {"choice": ["yes", "no"]}},
    "deadline_s": 60.0,
}


class GenerateRequest(BaseModel):
    """Body of `POST /generate`."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [EXAMPLE]})

    rows: Annotated[list[RawRow], Field(min_length=1)]
    task_id: Text = ""
    """Run and content hash of the chunk: under it, rows that are sent again join what runs or ran."""
    sampling: SamplingParams = SamplingParams()
    model: str = ""
    """What the caller believes is served; another model answers 409. Empty accepts any."""
    model_revision: str = ""
    """As `model`, of its revision."""
    deadline_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds after which unfinished rows are aborted and answered with `timeout`."""

    @model_validator(mode="after")
    def _ids_are_unique(self) -> Self:
        if len({row.id for row in self.rows}) != len(self.rows):
            raise ValueError("row ids must be unique within a request")
        return self


class GenerateResponse(BaseModel):
    """Body of the answer: one result a row, in the order of the request."""

    results: list[RowResult]


class Heartbeat(BaseModel):
    """A line of a stream while no row finishes."""

    heartbeat: Literal[True]


class Done(BaseModel):
    """The last line of a stream in which every row was answered."""

    done: Literal[True]
    rows: int


class ModelCard(BaseModel):
    """One entry of `/v1/models`: OpenAI's fields, the revision served, and the engine's limits."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "saturate"
    revision: str
    max_model_len: int
    max_num_seqs: int
    engine: str
    """Name and version of the engine, as `vllm 0.32.0`."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def parse_row(raw: RawRow) -> Row:
    """Raises `PromptError` naming the first field that is wrong, and its value; nothing else."""
    try:
        return Row.model_validate({"id": raw.id, **(raw.model_extra or {})})
    except ValidationError as exc:
        field, message = _first_error(exc)
        kind: ErrorKind = "invalid_sampling" if field.startswith("sampling") else "invalid_prompt"
        raise PromptError(kind, as_error(f"{field or 'row'}: {message}")) from exc


def merge_sampling(base: SamplingParams, overrides: dict[str, Any] | None) -> SamplingParams:
    """The request's parameters with a row's own on top; raises `PromptError` if they are invalid."""
    if not overrides:
        return base
    try:
        return SamplingParams.model_validate({**base.__dict__, **overrides})
    except ValidationError as exc:
        field, message = _first_error(exc)
        kind: ErrorKind = "invalid_schema" if field.startswith("structured_outputs") else "invalid_sampling"
        name = f"sampling.{field}" if field else "sampling"
        raise PromptError(kind, as_error(f"{name}: {message}")) from exc


def _first_error(exc: ValidationError) -> tuple[str, str]:
    """Path of the first field that is wrong, empty for the whole, and what is wrong with which value."""
    first = exc.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"])[:80]
    message = first["msg"].removeprefix("Value error, ")
    return field, message + (f", got {_shown(first['input'])}" if field else "")


def _shown(value: Any) -> str:
    """`value` in a few words, without a walk through what it holds."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return repr(value[:80] if isinstance(value, str) else value)
