"""Rows of a data set into prompts.

A row that yields no prompt (null, not text, a template error) becomes a `PromptRow` with an error and
goes through the pipeline as a failed row. What is wrong for every row, such as a column that does not
exist, is a `JobError`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jinja2.meta
import jinja2.sandbox
from pydantic import TypeAdapter, ValidationError

from apps.errors import ErrorKind, JobError, PromptError
from apps.schema import Message, is_unicode


@dataclass(frozen=True)
class PromptSpec:
    """Where prompt, id and known answer of a row come from: names of columns, or a Jinja template.

    Of `template`, `messages_column` and `prompt_column` the first that is set is used.
    """

    prompt_column: str = "prompt"
    template: str = ""
    messages_column: str = ""
    id_column: str = ""
    """Empty: the row number, from 0."""
    reference_column: str = ""
    """Column of the known answer; empty if there is none."""


@dataclass(frozen=True)
class PromptRow:
    """A row ready to be sent: exactly one of `prompt`, `messages` (as JSON) and `error` is set."""

    id: str
    prompt: str | None = None
    messages: str | None = None
    reference: str | None = None
    error_kind: ErrorKind | None = None
    error: str | None = None


def render_rows(rows: Iterable[dict[str, Any]], spec: PromptSpec) -> Iterator[PromptRow]:
    """One `PromptRow` a row, in order; raises `JobError` before the first if the spec does not fit it."""
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return
    render = _make_renderer(spec, first)
    seen: dict[bytes, int] = {}
    for number, row in enumerate(chain([first], rows)):
        row_id = str(number)
        if spec.id_column:
            row_id = _read_id(row, spec.id_column, number)
            digest = hashlib.blake2b(row_id.encode(), digest_size=8).digest()
            if seen.setdefault(digest, number) != number:
                reason = f"id {row_id!r} of row {seen[digest]} stands again in row {number}"
                raise JobError("id_column", spec.id_column, reason)
        yield render(row, row_id)


def _make_renderer(spec: PromptSpec, first: dict[str, Any]) -> Callable[[dict[str, Any], str], PromptRow]:
    named = {"id_column": spec.id_column, "reference_column": spec.reference_column}
    if not spec.template:
        field = "messages_column" if spec.messages_column else "prompt_column"
        named = {field: getattr(spec, field), **named}
    for field, column in named.items():
        if column and column not in first:
            raise JobError(field, column, f"the data set has the columns {', '.join(first)}")
    template = _compile(spec.template, first) if spec.template else None

    def render(row: dict[str, Any], row_id: str) -> PromptRow:
        reference = row.get(spec.reference_column) if spec.reference_column else None
        known = None if reference is None else _as_text(reference)
        try:
            if template is not None:
                return PromptRow(row_id, prompt=_fill(template, row), reference=known)
            if spec.messages_column:
                messages = _read_messages(row, spec.messages_column)
                return PromptRow(row_id, messages=messages, reference=known)
            prompt = _read_text(row, spec.prompt_column)
            return PromptRow(row_id, prompt=prompt, reference=known)
        except PromptError as exc:
            return PromptRow(row_id, reference=known, error_kind=exc.kind, error=_as_text(exc))

    return render


def _read_id(row: dict[str, Any], column: str, number: int) -> str:
    if row.get(column) is None:
        raise JobError("id_column", column, f"row {number} has no id")
    row_id = str(row[column])
    if not is_unicode(row_id):
        raise JobError("id_column", column, f"the id of row {number} is not Unicode text")
    return row_id


def _as_text(value: object) -> str:
    """Lone surrogates, which JSON can hold and UTF-8 cannot, become question marks."""
    return str(value).encode(errors="replace").decode()


def _check_text(text: str, where: str) -> str:
    if not is_unicode(text):
        raise PromptError("invalid_prompt", f"{where}: not Unicode text")
    return text


def _read_text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        got = "null" if value is None else f"{value!r:.80} ({type(value).__name__})"
        raise PromptError("invalid_prompt", f"column {column!r}: expected text, got {got}")
    if not value or value.isspace():
        raise PromptError("empty", f"column {column!r} is empty")
    return _check_text(value, f"column {column!r}")


MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])


def _read_messages(row: dict[str, Any], column: str) -> str:
    try:
        messages = MESSAGES.validate_python(_drop_nulls(row.get(column)))
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in (column, *first["loc"]))
        raise PromptError("invalid_prompt", f"{where}: {first['msg']}") from exc
    return json.dumps([message.model_dump() for message in messages], ensure_ascii=False)


def _drop_nulls(messages: Any) -> Any:
    """Without keys whose value is null, as Parquet and other tools' exports have them."""
    if not isinstance(messages, list):
        return messages
    return [
        {key: value for key, value in message.items() if value is not None}
        if isinstance(message, dict)
        else message
        for message in messages
    ]


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise jinja2.TemplateRuntimeError("a value is null")
    return value


def _compile(template: str, first: dict[str, Any]) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, finalize=_refuse_null, keep_trailing_newline=True
    )
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(template))
        compiled = environment.from_string(template)
    except jinja2.TemplateSyntaxError as exc:
        raise JobError("prompt_template", template, str(exc)) from exc
    unknown = sorted(names - first.keys())
    if unknown and not _can_do_without(compiled, first):
        reason = f"{', '.join(unknown)} not among the columns {', '.join(first)}"
        raise JobError("prompt_template", template, reason)
    return compiled


def _can_do_without(template: jinja2.Template, row: dict[str, Any]) -> bool:
    """Whether `row` renders although columns are missing: the template tests for them."""
    try:
        _fill(template, row)
    except PromptError as exc:
        return not isinstance(exc.__cause__, jinja2.UndefinedError)
    return True


class _Null(jinja2.StrictUndefined):
    """A null column: a template may test it, and any other use is an error."""

    def __bool__(self) -> bool:  # type: ignore[override]  # typed as never returning in the base
        return False


def _fill(template: jinja2.Template, row: dict[str, Any]) -> str:
    columns = {
        name: _Null(hint=f"column {name!r} is null") if value is None else value
        for name, value in row.items()
    }
    try:
        text = template.render(columns)
    except Exception as exc:  # a template may raise anything that its expressions do
        raise PromptError("invalid_prompt", f"prompt_template: {exc}") from exc
    if not text or text.isspace():
        raise PromptError("empty", "prompt_template yields no text")
    return _check_text(text, "prompt_template")
