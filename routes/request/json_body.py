"""A body's bytes as plain data: JSON, byte order mark or not, with no more values than a request can mean."""

from __future__ import annotations

import codecs
import json
import re

import pydantic_core

from routes.request.error_value import error_field_name, error_value
from rwkv_batch.errors import ErrorKind, ServiceError

MAX_VALUES = 2_000_000
"""Entries of all lists together: prompts may be token ids."""
MAX_NAMES = 200_000
"""Lists, objects and names in them; as Python objects, they are some thirty times as large as in the body."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def parse_json(body: bytes) -> object:
    """The body as plain data. Raises ServiceError: 400 if it is not JSON, 413 if it has too many values, 422 if its
    text has no UTF-8 form."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise ServiceError(ErrorKind.NOT_JSON, "the body is empty; a JSON object is wanted, if only {}")
    _check_size(body)
    try:
        # Not the values: pydantic would keep thousands of clients' short texts, passwords too, for as long as it runs.
        return pydantic_core.from_json(body, allow_inf_nan=True, cache_strings="keys")
    except ValueError as error:
        reason = str(error)
    found = _field_with_surrogate(body) if b"\\u" in body else None
    if found is not None:
        field, given = found
        message = f"{field}: must be text with a UTF-8 form, but has a lone surrogate ({reason})"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field=field, given=error_value(given))
    raise ServiceError(ErrorKind.NOT_JSON, f"the body is not JSON: {reason}")


def _check_size(body: bytes) -> None:
    """Count values before any is made. Raises ServiceError (body too large)."""
    if body.count(b",") <= MAX_VALUES and sum(map(body.count, (b"[", b"{", b":"))) <= MAX_NAMES:
        return
    # So many may be the punctuation of texts: now those are left out.
    values = names = strings = at = 0
    for string in _STRING.finditer(body):
        values += body.count(b",", at, string.start())
        names += sum(body.count(mark, at, string.start()) for mark in (b"[", b"{", b":"))
        strings += 1
        at = string.end()
        if max(values, strings - MAX_NAMES) > MAX_VALUES or names > MAX_NAMES:
            break
    values += body.count(b",", at)
    names += sum(body.count(mark, at) for mark in (b"[", b"{", b":"))
    for count, limit, what in (
        (values, MAX_VALUES, "values in lists and objects"),
        (strings, MAX_VALUES + MAX_NAMES, "texts"),
        (names, MAX_NAMES, "lists, objects and names in them"),
    ):
        if count > limit:
            raise ServiceError(
                ErrorKind.BODY_TOO_LARGE, f"the body has more than {limit} {what}; send it in several requests"
            )


def _field_with_surrogate(body: bytes) -> tuple[str, object] | None:
    """The top-level field whose text cannot be encoded, and its value; None if the body is no JSON anyway."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None if _has_utf8(data) else ("body", data)
    return next(((error_field_name(name), value) for name, value in data.items() if not _has_utf8([name, value])), None)


def _has_utf8(value: object) -> bool:
    """Whether all its text has a UTF-8 form."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
