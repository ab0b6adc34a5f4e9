"""Rows into prompts: a bad row fails alone, a bad specification fails before the first row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from apps.errors import JobError
from tasks.render import PromptRow, PromptSpec, render_rows


def make_rows(**columns: list[Any]) -> list[dict[str, Any]]:
    """One row for each position of the columns."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def render(rows: list[dict[str, Any]], **spec: str) -> list[PromptRow]:
    return list(render_rows(rows, PromptSpec(**spec)))


def make_messages(**overrides: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", **overrides}]


def test_prompt_column_is_taken_as_is() -> None:
    rows = render(make_rows(text=[" a\n", "{{ b }}", "\u2028"], other=[1, 2, 3]), prompt_column="text")
    assert [row.prompt for row in rows[:2]] == [" a\n", "{{ b }}"]
    assert rows[0] == PromptRow("0", prompt=" a\n")


def test_template_fills_in_columns() -> None:
    rows = make_rows(q=["{{ x }}", "<b>"], n=[7, 1.5])
    rendered = render(rows, template="Q: {{ q }} ({{ n }})\n")
    assert [row.prompt for row in rendered] == ["Q: {{ x }} (7)\n", "Q: <b> (1.5)\n"]


def test_template_goes_before_columns() -> None:
    rows = make_rows(prompt=["column"], chat=[make_messages()])
    assert render(rows, template="{{ prompt }}!", messages_column="chat")[0].prompt == "column!"
    assert render(rows, messages_column="chat")[0].prompt is None


def test_messages_column_becomes_json() -> None:
    messages = make_messages(content="Grüß\u2028Gott")
    (row,) = render(make_rows(chat=[messages]), messages_column="chat")
    assert json.loads(row.messages or "") == messages
    assert (row.prompt, row.error) == (None, None)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, "chat: "),
        ("Hi", "chat: "),
        ([{"role": "user"}], "chat.0.content: "),
        (make_messages(content=7), "chat.1.content: "),
        (make_messages(content="\ud800"), "chat.1.content: "),
        (make_messages(name="Ann"), "chat.1.name: "),
    ],
    ids=["null", "text", "no-content", "number", "surrogate", "unknown-key"],
)
def test_bad_messages_fail_their_row(value: Any, named: str) -> None:
    good = make_messages()
    rows = render(make_rows(chat=[good, value, good]), messages_column="chat")
    assert [row.error_kind for row in rows] == [None, "invalid_prompt", None]
    assert str(rows[1].error).startswith(named)


@pytest.mark.parametrize(
    ("value", "kind", "error"),
    [
        (None, "invalid_prompt", "column 'prompt': expected text, got null"),
        (17, "invalid_prompt", "column 'prompt': expected text, got 17 (int)"),
        (["a"], "invalid_prompt", "column 'prompt': expected text, got ['a'] (list)"),
        ("", "empty", "column 'prompt' is empty"),
        (" \n\t\u2028", "empty", "column 'prompt' is empty"),
        ("\ud800", "invalid_prompt", "column 'prompt': not Unicode text"),
    ],
    ids=["null", "number", "list", "empty", "blank", "surrogate"],
)
def test_bad_value_fails_its_row_alone(value: Any, kind: str, error: str) -> None:
    before, row, after = render(make_rows(prompt=["a", value, "c"]))
    assert (row.id, row.prompt, row.error_kind, row.error) == ("1", None, kind, error)
    assert (before.prompt, after.prompt, after.id) == ("a", "c", "2")


@pytest.mark.parametrize(
    ("template", "value", "kind", "error"),
    [
        ("Q: {{ q }}", None, "invalid_prompt", "prompt_template: column 'q' is null"),
        ("{{ q ~ '!' }}", None, "invalid_prompt", "prompt_template: column 'q' is null"),
        ("{{ q.deep }}", {"deep": None}, "invalid_prompt", "prompt_template: a value is null"),
        ("{{ q + 1 }}", "text", "invalid_prompt", "prompt_template: can only concatenate str"),
        ("{{ q.deep }}", {}, "invalid_prompt", "prompt_template: 'dict object' has no attribute 'deep'"),
        ("{{ 1 // q }}", 0, "invalid_prompt", "prompt_template: integer"),
        (" {{ q }}\n", "", "empty", "prompt_template yields no text"),
        ("{{ q }}", "\udfff", "invalid_prompt", "prompt_template: not Unicode text"),
    ],
    ids=["null", "null-joined", "null-inside", "type", "attribute", "division", "blank", "surrogate"],
)
def test_template_error_fails_its_row_alone(template: str, value: Any, kind: str, error: str) -> None:
    good = {"{{ q + 1 }}": 1, "{{ q.deep }}": {"deep": "d"}, "{{ 1 // q }}": 1}.get(template, "good")
    rows = render(make_rows(q=[good, value, good]), template=template)
    assert [row.error_kind for row in rows] == [None, kind, None]
    assert str(rows[1].error).startswith(error)


def test_template_may_test_for_null() -> None:
    template = "{% if q %}{{ q }}{% else %}none{% endif %}"
    assert [row.prompt for row in render(make_rows(q=["a", None]), template=template)] == ["a", "none"]


def test_template_may_test_for_a_column() -> None:
    template = "{{ q }}{% if hint is defined %}, {{ hint }}{% endif %}"
    rows = render([{"q": "a"}, {"q": "b", "hint": "c"}], template=template)
    assert [row.prompt for row in rows] == ["a", "b, c"]


def test_null_keys_of_messages_are_dropped() -> None:
    message = {"role": "user", "content": "Say a.", "name": None, "tool_calls": None}
    (row,) = render([{"turns": [message]}], messages_column="turns")
    assert json.loads(row.messages or "") == [{"role": "user", "content": "Say a."}]


def test_column_missing_in_one_row_fails_it() -> None:
    rows = [{"q": "a"}, {"other": "b"}, {"q": "c"}]
    for spec in ({"template": "{{ q }}"}, {"prompt_column": "q"}, {"messages_column": "q"}):
        assert render(rows, **spec)[1].error_kind == "invalid_prompt"
    assert render(rows, prompt_column="q")[2].prompt == "c"


@pytest.mark.parametrize(
    "template",
    [
        "{{ x.__class__ }}",
        "{{ x.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}",
        "{{ x['__class__'] }}",
        "{{ x|attr('__class__') }}",
        "{{ range.__globals__ }}",
        "{{ '{0.__class__}'.format(x) }}",
        "{% set _ = seen.append(1) %}{{ seen }}",
        "{% for i in range(10000000) %}a{% endfor %}",
    ],
)
def test_template_cannot_leave_its_sandbox(template: str) -> None:
    (row,) = render([{"x": "text", "seen": []}], template=template)
    assert row.prompt is None
    assert row.error_kind == "invalid_prompt"


@pytest.mark.parametrize(
    ("spec", "field", "named"),
    [
        ({"prompt_column": "text"}, "prompt_column", "'text'"),
        ({"messages_column": "chat"}, "messages_column", "'chat'"),
        ({"id_column": "key"}, "id_column", "'key'"),
        ({"reference_column": "gold"}, "reference_column", "'gold'"),
        ({"template": "{{ question }} {{ a }}"}, "prompt_template", "a, question not among"),
        ({"template": "{{ prompt"}, "prompt_template", "end of template"),
        ({"template": "{{ prompt | shout }}"}, "prompt_template", "'shout'"),
        ({"template": "{% if prompt %}"}, "prompt_template", "endif"),
    ],
    ids=["prompt", "messages", "id", "reference", "variable", "syntax", "filter", "block"],
)
def test_bad_specification_is_a_job_error(spec: dict[str, str], field: str, named: str) -> None:
    with pytest.raises(JobError, match=f"{field}=") as caught:
        render(make_rows(prompt=["a"], answer=["b"]), **spec)
    assert caught.value.field == field
    assert named in str(caught.value)


def test_unused_prompt_column_may_be_missing() -> None:
    rows = make_rows(q=["a"])
    assert render(rows, template="{{ q }}", prompt_column="absent")[0].prompt == "a"


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([3, 1, 2], ["3", "1", "2"]),
        (["b", "a", ""], ["b", "a", ""]),
        ([1.0, True, "é"], ["1.0", "True", "é"]),
    ],
    ids=["ints", "text", "mixed"],
)
def test_ids_come_from_their_column(ids: list[Any], expected: list[str]) -> None:
    rows = make_rows(key=ids, prompt=["x", None, "z"])
    assert [row.id for row in render(rows, id_column="key")] == expected
    assert [row.id for row in render(rows)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (["a", "b", "a"], "id 'a' of row 0 stands again in row 2"),
        ([1, "1", 2], "id '1' of row 0 stands again in row 1"),
        ([1, None, 2], "row 1 has no id"),
        (["a", "b", "\ud800"], "the id of row 2 is not Unicode text"),
    ],
    ids=["twice", "twice-as-text", "null", "surrogate"],
)
def test_bad_id_is_a_job_error(ids: list[Any], reason: str) -> None:
    with pytest.raises(JobError) as caught:
        render(make_rows(key=ids, prompt=["x", "y", "z"]), id_column="key")
    assert str(caught.value) == f"id_column='key': {reason}"


def test_reference_is_kept_as_text() -> None:
    rows = make_rows(prompt=["a", None, "c", "d"], gold=["#### 7", 0, None, "\ud800"])
    rendered = render(rows, reference_column="gold")
    assert [row.reference for row in rendered] == ["#### 7", "0", None, "?"]
    assert [row.error_kind for row in rendered] == [None, "invalid_prompt", None, None]


def test_rows_are_rendered_one_by_one() -> None:
    read: list[int] = []

    def rows() -> Any:
        for number in range(3):
            read.append(number)
            yield {"prompt": f"{number}"}

    rendered = render_rows(rows(), PromptSpec())
    assert (next(rendered).prompt, read) == ("0", [0])
    assert (next(rendered).prompt, read) == ("1", [0, 1])


def test_no_rows_yield_no_prompts() -> None:
    assert render([], prompt_column="absent") == []
