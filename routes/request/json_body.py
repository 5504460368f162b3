"""Parses a JSON body, with a limit on the number of values."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, TypeVar

import pydantic
import pydantic_core

from routes.request.fields import Fields, describe_value, error_field_name, error_value
from rwkv_batch.errors import ErrorKind, ServiceError

OTHER_VALUES = 1 << 16
"""List entries and object members that a body may have besides token ids."""
MAX_NAMES = 200_000
"""Limit of lists, objects and their keys. As Python objects they take thirty times their size in the body."""
_HAS_VALUES = re.compile(rb"\s*[\[{]")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def parse_json(body: bytes, max_tokens: int) -> object:
    """Parse the body of a request of at most `max_tokens` token ids.

    Raises ServiceError: 400 if it is not JSON, 413 if it has too many values, 422 for lone surrogates.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise ServiceError(ErrorKind.NOT_JSON, "the body is empty; send a JSON object, {} at least")
    check_num_values(body, max_tokens)
    try:
        # "keys" only: pydantic never frees its string cache, which would hold clients' texts and passwords.
        return pydantic_core.from_json(body, allow_inf_nan=True, cache_strings="keys")
    except ValueError as error:
        reason = str(error)
    found = _field_with_surrogate(body) if b"\\u" in body else None
    if found is not None:
        field, given = found
        message = f"{field}: must be text with a UTF-8 form, but has a lone surrogate ({reason})"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field=field, given=error_value(given))
    raise ServiceError(ErrorKind.NOT_JSON, f"the body is not JSON: {reason}")


def check_num_values(body: bytes, max_tokens: int) -> None:
    """Check the number of values before parsing. Raises ServiceError (body too large)."""
    if not _HAS_VALUES.match(body):
        return  # one value at most: what else follows is an error that parsing finds at once
    max_values = max_tokens + OTHER_VALUES
    if body.count(b",") <= max_values and sum(map(body.count, (b"[", b"{", b":"))) <= MAX_NAMES:
        return
    # Some of these marks may be inside strings: count without strings.
    values = names = strings = at = 0
    for string in _STRING.finditer(body):
        values += body.count(b",", at, string.start())
        names += sum(body.count(mark, at, string.start()) for mark in (b"[", b"{", b":"))
        strings += 1
        at = string.end()
        if max(values, strings - MAX_NAMES) > max_values or names > MAX_NAMES:
            break
    values += body.count(b",", at)
    names += sum(body.count(mark, at) for mark in (b"[", b"{", b":"))
    for count, limit, what in (
        (values, max_values, "values in lists and objects"),
        (strings, max_values + MAX_NAMES, "texts"),
        (names, MAX_NAMES, "lists, objects and names in them"),
    ):
        if count > limit:
            raise ServiceError(
                ErrorKind.BODY_TOO_LARGE, f"the body has more than {limit} {what}; send it in several requests"
            )


def _field_with_surrogate(body: bytes) -> tuple[str, object] | None:
    """Return the top-level field with a lone surrogate and its value. Returns None if the body is not JSON."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None if _has_utf8(data) else ("body", data)
    return next(((error_field_name(name), value) for name, value in data.items() if not _has_utf8([name, value])), None)


def _has_utf8(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


_PYDANTIC_PREFIX = re.compile(r"^(Input|List|String|Dictionary|Value) should")


_NUMBERS = {"int_type": "a whole number"} | dict.fromkeys(("float_type", "float_parsing", "finite_number"), "a number")
"""pydantic's errors for values that are no number -> the value to give"""

_PYTHON_TYPES = re.compile(r"a valid dictionary( or instance of \w+)?")


_PYDANTIC_SUFFIX = re.compile(r"( after validation, not|, unable to) .*")
Model = TypeVar("Model", bound=Fields)


def validate(model: type[Model], data: Any) -> Model:
    """Return an instance of `model`. Raises ServiceError with the field, the limit and the value."""
    if not isinstance(data, dict):
        raise ServiceError(
            ErrorKind.INVALID_FIELD, f"the body must be a JSON object, got {describe_value(data)}", field="body"
        )
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        first = _most_specific_error(data, errors)
    location, given = _locate(data, first)
    if location:
        wording = _PYDANTIC_SUFFIX.sub("", _PYDANTIC_PREFIX.sub("must", first["msg"])).replace(
            "Field required", "must be given"
        )
        wording = _PYTHON_TYPES.sub("a JSON object", wording)
        if first["type"] == "literal_error":  # of a word that may be given instead of a number
            numbers = (_NUMBERS.get(one["type"]) for one in errors if one["loc"][:-1] == first["loc"][:-1])
            wording += "".join(f" or {kind}" for kind in numbers if kind is not None)
        message = f"{location}: {wording}" + ("" if first["type"] == "missing" else f", got {describe_value(given)}")
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field=location, given=error_value(given))
    field = first.get("ctx", {}).get("field") or _blamed_field(data)
    raise ServiceError(ErrorKind.INVALID_FIELD, first["msg"], field=field, given=error_value(data.get(field)))


def _most_specific_error(data: dict[str, Any], errors: list[Any]) -> Any:
    """Return the error to report for the first wrong field.

    For a union, this is the deepest error of a type-compatible branch, and a
    number's limit before the words that may be given instead.
    """
    candidates = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    return max(
        candidates,
        key=lambda error: (
            sum(map(_locate(data, error)[0].count, ".[")),
            not error["type"].endswith("_type"),
            error["type"].startswith(("greater_than", "less_than")),
        ),
    )


def _blamed_field(data: dict[str, Any]) -> str:
    """Return the field to report for an error of the whole body."""
    return next((name for name in ("contents", "messages", "prefix") if data.get(name) is not None), "contents")


def _locate(data: Any, error: Any) -> tuple[str, Any]:
    """Return the field as the client writes it, and its value. Leaves out pydantic's tags of union members."""
    location, given = "", data
    path = error["loc"]
    for i, step in enumerate(path):
        is_missing = error["type"] == "missing" and i == len(path) - 1
        if isinstance(given, list) and isinstance(step, int) and step < len(given):
            location, given = f"{location}[{step}]", given[step]
        elif isinstance(given, dict) and isinstance(step, str) and (step in given or is_missing):
            location, given = f"{location}.{error_field_name(step)}".lstrip("."), given.get(step)
            if path[i + 1 :] == ("[key]",):  # the key is wrong, not its value
                given = step
    return location, given
