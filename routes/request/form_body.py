"""Parses a form: a body of application/x-www-form-urlencoded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from urllib.parse import parse_qs

from rwkv_batch.errors import ErrorKind, ServiceError

URLENCODED = "application/x-www-form-urlencoded"
MAX_FORM_FIELDS = 10_000


def parse_form(body: bytes, lists: Collection[str]) -> dict[str, str | list[str]]:
    """Return a form's fields. Of a repeated field that is not in `lists`, the last one counts. Raises ServiceError."""
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FORM_FIELDS)
    except ValueError as error:
        message = f"the body is not a form of at most {MAX_FORM_FIELDS} fields in UTF-8: {error}"
        raise ServiceError(ErrorKind.NOT_JSON, message) from None
    return fields_of_form(fields, lists)


def fields_of_form(fields: Mapping[str, str | list[str]], lists: Collection[str]) -> dict[str, str | list[str]]:
    """Return each field as a text, or a list if in `lists`."""
    given = {name: [value] if isinstance(value, str) else value for name, value in fields.items()}
    return {name: values if name in lists else values[-1] for name, values in given.items()}
