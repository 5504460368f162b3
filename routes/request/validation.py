"""Validates bodies, and reports fields that change nothing: unknown ones, and those that are accepted and ignored."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from routes.request.fields import Fields, Ignored, error_field_name, error_value
from routes.request.json_body import validate
from routes.request_context import warn
from rwkv_batch.errors import invalid

MAX_WARNINGS = 16
"""Per request. A body may have 200,000 names."""
_REMEDY = "correct or remove it (--strict-fields)"


@dataclass(frozen=True, slots=True)
class IgnoredField:
    """A field that changes nothing. `known`: the names that are allowed there, if this one is unknown."""

    field: str
    given: Any
    known: Collection[str] = ()


def validated(model: type[Fields], data: Any, *, others: Collection[str] = (), is_strict: bool = False) -> Any:
    """Return an instance of `model`. Unknown and ignored fields become warnings of the request.

    others: known names that are no fields of the model. Raises ServiceError; if `is_strict`, also for an unknown field.
    """
    body = validate(model, data)
    found = find_ignored(body, data, others=others)
    for ignored in itertools.islice(found, MAX_WARNINGS):
        if ignored.known:
            problem = _unknown_problem(ignored)
            report_unknown(ignored.field, problem, "it was ignored", error_value(ignored.given), is_strict=is_strict)
        else:
            warn(ignored.field, f"{ignored.field}: is accepted and ignored")
    if next(found, None) is not None:
        warn("", f"more than {MAX_WARNINGS} fields are unknown or ignored; these are the first")
    return body


def report_query(query: Mapping[str, str], *, is_strict: bool) -> None:
    """Report the query of a route that reads none. Raises ServiceError if `is_strict`."""
    for name, given in itertools.islice(query.items(), MAX_WARNINGS):
        problem = "is in the query, which this route does not read"
        report_unknown(f"?{error_field_name(name)}", problem, "it was ignored", error_value(given), is_strict=is_strict)


def report_unknown(field: str, problem: str, effect: str, given: object, *, is_strict: bool) -> None:
    """Add a warning about a field or value that is not known. Raises ServiceError if `is_strict`.

    problem: what is wrong; effect: what the service does with it if it is not strict
    """
    if is_strict:
        raise invalid(field, f"{problem}; {_REMEDY}", given)
    warn(field, f"{field}: {problem}; {effect}")


def nearest_name(name: str, known: Collection[str]) -> str:
    """Return a sentence part with the known name nearest to `name`. Returns "" if no known name is similar."""
    nearest = difflib.get_close_matches(error_field_name(name), known, 1)
    return f"; the nearest known name is {nearest[0]}" if nearest else ""


def _unknown_problem(unknown: IgnoredField) -> str:
    place, _, name = unknown.field.rpartition(".")
    return f"is not a field of {place or 'this request'}{nearest_name(name, unknown.known)}"


def find_ignored(
    body: BaseModel, data: Mapping[str, Any], place: str = "", others: Collection[str] = ()
) -> Iterator[IgnoredField]:
    """Yield the fields of `data` that change nothing. `body` was made from `data`. null means a missing field."""
    names = _fields_by_name(type(body))
    for name, given in data.items():
        if given is None or name in others:
            continue
        attribute, ignored = names.get(name, ("", None))
        is_ignored = ignored is not None and ignored.is_request(given)
        if attribute and not is_ignored and not isinstance(given, dict | list):
            continue  # as most fields
        field = f"{place}.{error_field_name(name)}".lstrip(".")
        if not attribute:
            yield IgnoredField(field, given, names.keys() | set(others))
            continue
        if is_ignored:
            yield IgnoredField(field, given)
        yield from _find_nested(getattr(body, attribute), given, field)


def _find_nested(value: Any, given: Any, field: str) -> Iterator[IgnoredField]:
    if isinstance(value, BaseModel) and isinstance(given, dict):
        yield from find_ignored(value, given, field)
    elif isinstance(value, list) and isinstance(given, list) and value and isinstance(value[0], BaseModel):
        for i, (entry, entry_given) in enumerate(zip(value, given, strict=False)):
            yield from _find_nested(entry, entry_given, f"{field}[{i}]")


@functools.cache
def _fields_by_name(model: type[BaseModel]) -> dict[str, tuple[str, Ignored | None]]:
    """Return attribute and mark of each name that a request may use."""
    return {
        info.alias or attribute: (attribute, next((mark for mark in info.metadata if isinstance(mark, Ignored)), None))
        for attribute, info in model.model_fields.items()
    }
