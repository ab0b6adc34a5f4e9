"""What every model of untrusted JSON is made of: text that UTF-8 can encode, and no unknown fields."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_ERROR_CHARS = 200

MAX_FIELDS = 64
"""Of an object that names unknown ones; no model here has as many."""


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


def check_unicode(text: str) -> str:
    if not is_unicode(text):
        raise ValueError("not Unicode text")
    return text


Text = Annotated[str, Field(min_length=0)]
"""Without lone surrogates: pydantic refuses them where a string has any constraint."""
SomeText = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """Rejects unknown fields and does not coerce: `"0.5"` is no float, `true` is no int."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, fields: Any) -> Any:
        """Pydantic would list all unknown ones, be they a million, and breaks at lone surrogates."""
        if isinstance(fields, dict) and not fields.keys() <= _field_names(cls):
            for name in fields.keys() - _field_names(cls):
                if len(fields) > MAX_FIELDS or not is_unicode(str(name)):
                    raise ValueError(f"unknown field {as_error(str(name))}")
        return fields


@cache
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(info.alias or name for name, info in model.model_fields.items())


def _check_bool(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("true or false is expected")
    return value


OnlyBool = BeforeValidator(_check_bool)
"""For a literal, which takes 1 for true, however strict the model."""
