"""Schemathesis' own check that what the OpenAPI schema allows is accepted, less what no schema can say.

Loaded by Schemathesis itself, in the process that `tests.test_api_schema` starts.
"""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance

REASONS = re.compile(
    "is above max_tokens"
    "|row ids must be unique"
    "|the prompt is empty"
    "|response_format and structured_outputs cannot both be given"
    # Text that is to hold a JSON object.
    "|structured_outputs.json: "
    # JSON Schema counts 1.0 among the integers, the app does not.
    "|should be a valid integer|list of token ids"
    # FastAPI writes bounds as floats, and 2**63 is not sharp as one.
    "|seed: Input should be (less|greater) than"
)
"""For which a request is refused that the schema allows: mostly rules between two fields."""


@schemathesis.check
def what_the_schema_allows_is_accepted(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case[Any]
) -> bool | None:
    if response.status_code in (400, 422) and REASONS.search(response.json()["error"]["message"]):
        return None
    return positive_data_acceptance(ctx, response, case)
