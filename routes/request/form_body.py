"""Parses a form: a body of application/x-www-form-urlencoded."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import parse_qs

from rwkv_batch.errors import ErrorKind, ServiceError

URLENCODED, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
MAX_FORM_FIELDS = 10_000
_NESTED = re.compile(r"(\w+)\[([0-9]{1,5})\]\.(\w+)")
"""A field of an object in a list, like `dictionaries[0].entries`."""


def parse_form(body: bytes, lists: Collection[str]) -> dict[str, Any]:
    """Return a form's fields. Of a repeated field that is not in `lists`, the last one counts. Raises ServiceError."""
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FORM_FIELDS)
    except ValueError as error:
        message = f"the body is not a form of at most {MAX_FORM_FIELDS} fields in UTF-8: {error}"
        raise ServiceError(ErrorKind.NOT_JSON, message) from None
    return fields_of_form(fields, lists)


def fields_of_form(fields: Mapping[str, str | list[str]], lists: Collection[str]) -> dict[str, Any]:
    """Return each field as a text, or a list if in `lists`. Nested fields become lists of objects."""
    found: dict[str, Any] = {}
    objects: defaultdict[str, defaultdict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name, given in fields.items():
        values = [given] if isinstance(given, str) else given
        if (nested := _NESTED.fullmatch(name)) is not None:
            objects[nested[1]][int(nested[2])][nested[3]] = values[-1]
        else:
            found[name] = values if name in lists else values[-1]
    return found | {name: [entries[index] for index in sorted(entries)] for name, entries in objects.items()}
