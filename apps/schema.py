"""The nouns that every part shares: the row, its sampling parameters, its result, the bodies of requests.

Rows of a request are validated one at a time with `parse_row`, so that a malformed row is a failed
row and its neighbours are answered.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from apps.errors import PERMANENT_KINDS, ErrorKind, PromptError

NDJSON = "application/x-ndjson"
"""Media type of a stream of `/generate`: a JSON object a line, lines ended by newline bytes alone."""

MAX_REQUEST_BYTES = 8_000_000
"""Default limit of a body of `/generate`, and what a client keeps to."""

FinishReason = Literal["stop", "length"]

MAX_ERROR_CHARS = 200


def as_error(text: str) -> str:
    """`text` for an answer or a log: short, and without what UTF-8 cannot encode."""
    return text[:MAX_ERROR_CHARS].encode(errors="backslashreplace").decode()


def is_unicode(text: str) -> bool:
    """False for lone surrogates, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_unicode(text: str) -> str:
    if not is_unicode(text):
        raise ValueError("not Unicode text")
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]


class Strict(BaseModel):
    """Rejects unknown fields and does not coerce: `"0.5"` is no float, `true` is no int."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Message(Strict):
    """One turn of a conversation; the model's own chat template turns a list of them into a prompt."""

    role: Text
    content: Text


class SamplingParams(Strict):
    """What changes a completion, under vLLM's names; greedy unless asked otherwise."""

    temperature: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, lt=2**31)
    """0 and -1 consider every token."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    max_tokens: int = Field(512, ge=1, lt=2**31)
    """Completion tokens at most; a completion that reaches it has `finish_reason="length"`."""
    stop: list[Text] = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)


class Row(Strict):
    """One prompt: plain text as `prompt`, or a conversation as `messages`; exactly one of the two."""

    id: Text
    prompt: Text | None = None
    messages: list[Message] | None = None
    sampling: dict[str, Any] | None = None
    """Overrides of the request's sampling parameters, validated when merged."""

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages must be given, and not null")
        return self

    @property
    def num_chars(self) -> int:
        """Characters of all prompt text, before any chat template."""
        if self.prompt is not None:
            return len(self.prompt)
        return sum(len(message.content) for message in self.messages or [])

    def is_blank(self) -> bool:
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


class GenerateRequest(BaseModel):
    """Body of `POST /generate`."""

    model_config = ConfigDict(extra="forbid")

    rows: Annotated[list[RawRow], Field(min_length=1)]
    task_id: Text = ""
    """Run and content hash of the chunk: under it, rows that are sent again join what runs or ran."""
    sampling: SamplingParams = SamplingParams()
    model: str = ""
    """What the caller believes is served; another model answers 409. Empty accepts any."""
    model_revision: str = ""
    """As `model`, of its revision."""
    deadline_s: float | None = Field(None, gt=0)
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
    """Raises `PromptError` naming the first field that is wrong, and its value."""
    try:
        return Row.model_validate(raw.model_dump())
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "row"
        kind: ErrorKind = "invalid_sampling" if field.startswith("sampling") else "invalid_prompt"
        got = "" if field == "row" else f", got {first['input']!r:.80}"
        raise PromptError(kind, as_error(f"{field:.80}: {first['msg']}{got}")) from exc


def merge_sampling(base: SamplingParams, overrides: dict[str, Any] | None) -> SamplingParams:
    """The request's parameters with a row's own on top; raises `PromptError` if they are invalid."""
    if not overrides:
        return base
    try:
        return SamplingParams.model_validate({**base.model_dump(), **overrides})
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        message = f"sampling.{field:.80}: {first['msg']}, got {first['input']!r:.80}"
        raise PromptError("invalid_sampling", as_error(message)) from exc
