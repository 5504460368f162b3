"""JSON and YAML of programs' strings, with nested keys: i18next and the like, ARB, Apple's xcstrings, Rails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from rwkv_batch.translation.documents.document import (
    MAX_DEPTH,
    Document,
    DocumentError,
    DocumentOptions,
    Slot,
    TextEdits,
    Texts,
    Unit,
    decode,
    paired,
    slot,
    text_document,
)
from rwkv_batch.translation.documents.plurals import icu_slot, is_icu, plural_forms, plural_units
from rwkv_batch.translation.languages import language_name
from rwkv_batch.translation.segments import has_letters

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s"{}\[\],:]+')
_NUMBER = re.compile(r"\{\{\s*(?:count|n|num)\s*\}\}|\{(?:count|n|num)\}|%d|#")
_PLURAL_KEY = re.compile(r"(.+)_(zero|one|two|few|many|other)")
_MAX_YAML_BYTES = 8 << 20
_ENTRY = "\0"


def _json_strings(text: str) -> Iterator[tuple[tuple[str, ...], int, int, int]]:
    """Yield path, start, end and key's start of each string. An entry of a list is its number after `_ENTRY`.

    Raises DocumentError.
    """
    try:
        msgspec.json.decode(text.encode("utf-8", "surrogatepass"))  # the tokens of other text could take quadratic time
    except RecursionError:
        pass  # the depth is named below
    except ValueError as error:
        raise DocumentError(f"is not JSON: {error}; repair it") from None
    path: list[str] = []
    kinds: list[str] = []
    is_key, key_start = False, 0
    for found in _TOKEN.finditer(text):
        part = found.group()
        if part in "{[":
            kinds.append(part)
            path.append("" if part == "{" else f"{_ENTRY}0")
            is_key = part == "{"
            if len(kinds) > MAX_DEPTH:
                raise DocumentError(f"has more than {MAX_DEPTH} nested lists and objects; flatten it")
        elif part in "}]":
            kinds, path = kinds[:-1], path[:-1]
        elif part == ",":
            is_key = bool(kinds) and kinds[-1] == "{"
            if kinds and not is_key:
                path[-1] = f"{_ENTRY}{int(path[-1].removeprefix(_ENTRY)) + 1}"
        elif part == ":":
            is_key = False
        elif part.startswith('"') and is_key:
            path[-1], key_start = _json_value(part), found.start()
        elif part.startswith('"'):
            yield tuple(path), *found.span(), key_start


def _json_value(token: str) -> str:
    return str(msgspec.json.decode(token.encode("utf-8", "surrogatepass"), type=str))


def _json_text(text: str) -> str:
    return msgspec.json.encode(text.encode("utf-8", "replace").decode()).decode()


def read_json(data: bytes, options: DocumentOptions, kind: str = "json") -> Document:
    """Read JSON: each string value at any depth. `kind` arb: also its descriptions and language.

    Raises DocumentError.
    """
    source = decode(data, options.encoding)
    edits = TextEdits(source.text)
    places = list(_json_strings(source.text))
    values = {path: _json_value(source.text[start:end]) for path, start, end, _ in places}
    for path, start, end, key_start in places:
        key, value = path[-1] if path else "", _json_value(source.text[start:end])
        if kind == "arb":
            if key == "@@locale":
                edits.change(start, end, _json_text(options.target.replace("-", "_")))
            if any(one.startswith("@") for one in path):
                continue
        note = values.get(
            (*path[:-1], f"@{key}", "description"), ".".join(one for one in path if one and one[0] != _ENTRY)
        )
        plural = _PLURAL_KEY.fullmatch(key)
        if is_icu(value):
            edits.slots.append(icu_slot(value, note, options.target, _changer(edits, start, end)))
        elif plural and plural[2] == "other" and (one := values.get((*path[:-1], f"{plural[1]}_one"))) is not None:
            units = Unit(one, note=note), Unit(value, note=note)
            existing = {
                category
                for category, _ in plural_forms(options.target)[1]
                if (*path[:-1], f"{plural[1]}_{category}") in values
            }
            separator = source.text[_separator_start(source.text, key_start) : key_start]
            middle = source.text[key_start + len(_raw_key(source.text, key_start)) : start]
            edits.slots.append(
                _plural_slot(edits, (start, end), units, options.target, plural[1], existing, separator, middle)
            )
        else:
            edits.add(start, end, Unit(value, note=note), _json_text)
    return text_document(source, edits)


def _changer(edits: TextEdits, start: int, end: int) -> Callable[[str], None]:
    return lambda text: edits.change(start, end, _json_text(text))


def _raw_key(text: str, at: int) -> str:
    found = _TOKEN.match(text, at)
    return found.group() if found else ""


def _separator_start(text: str, at: int) -> int:
    """Return the start of the white space before a position."""
    while at and text[at - 1].isspace():
        at -= 1
    return at


def _plural_slot(
    edits: TextEdits, span: tuple[int, int], units: tuple[Unit, Unit], language: str, base: str, existing: set[str],
    separator: str, middle: str,
) -> Slot:  # fmt: skip
    """Return the slot of a plural's last key. Keys of forms that the file lacks are written after it."""
    all_units, finish = plural_units(*units, language, _NUMBER)

    def put(texts: Texts) -> None:
        if forms := finish(texts):
            new = [name for name in forms if name not in existing and name not in ("one", "other")]
            more = (f",{separator}{_json_text(f'{base}_{name}')}{middle}{_json_text(forms[name])}" for name in new)
            edits.change(*span, "".join((_json_text(forms["other"]), *more)))

    return Slot(all_units, put)


def read_xcstrings(data: bytes, options: DocumentOptions) -> Document:
    """Read Apple's string catalogue. Strings without the language get it, to be reviewed. Raises DocumentError."""
    source = decode(data, options.encoding)
    list(_json_strings(source.text))  # checks the depth
    try:
        catalogue = msgspec.json.decode(source.text.encode("utf-8", "surrogatepass"))
        entries = dict(catalogue["strings"])
        base = str(catalogue["sourceLanguage"])
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError) as error:
        raise DocumentError(f"is not a string catalogue of Xcode: {error!r}; open it with Xcode") from None
    slots: list[Slot] = []
    for key, entry in entries.items():
        if isinstance(entry, dict) and entry.get("shouldTranslate") is not False:
            slots += _xcstring_slots(key, entry, base, options.target)

    def save() -> bytes:
        text = msgspec.json.format(msgspec.json.encode(catalogue), indent=2).decode()
        return source.encode(re.sub(r'^( *"(?:[^"\\]|\\.)*"):', r"\1 :", text, flags=re.MULTILINE))

    return Document(slots, save, source.notes)


def _xcstring_slots(key: str, entry: dict[str, Any], base: str, target: str) -> Iterator[Slot]:
    localizations = entry.get("localizations")
    localizations = localizations if isinstance(localizations, dict) else {}
    if any(language_name(name) == language_name(target) for name in localizations):
        return
    original = localizations.get(base)
    original = original if isinstance(original, dict) else {}
    note = str(entry.get("comment") or key)

    def store(value: dict[str, Any]) -> None:
        entry["localizations"] = {**localizations, target: value}

    plural = _at(original, "variations", "plural")
    if isinstance(plural, dict) and isinstance(other := _at(plural, "other", "stringUnit", "value"), str):
        one = _at(plural, "one", "stringUnit", "value")
        singular = Unit(one if isinstance(one, str) else other, note=note)
        units, finish = plural_units(singular, Unit(other, note=note), target, re.compile(r"%(?:1\$)?(?:l{0,2}[du]|@)"))

        def put(texts: Texts) -> None:
            if forms := finish(texts):
                store({"variations": {"plural": {name: _string_unit(text) for name, text in forms.items()}}})

        yield Slot(units, put)
        return
    value = _at(original, "stringUnit", "value")
    text = value if isinstance(value, str) else key
    if not original.get("variations") and has_letters(text):
        yield slot(Unit(text, note=note), lambda new: store(_string_unit(new)))


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _string_unit(text: str) -> dict[str, Any]:
    return {"stringUnit": {"state": "needs_review", "value": text}}


def read_yaml(data: bytes, options: DocumentOptions) -> Document:
    """Read YAML: each string value. A single root key with the language's code, as in Rails, is renamed.

    Raises DocumentError.
    """
    import yaml

    if len(data) > _MAX_YAML_BYTES:
        raise DocumentError(f"has {len(data)} bytes; the limit of YAML files is {_MAX_YAML_BYTES}; split it")
    source = decode(data, options.encoding)
    edits = TextEdits(source.text)
    stack: list[list[Any]] = []
    """Per open collection: whether it is a mapping, the last key, and whether a key comes next."""
    roots: list[Any] = []
    loader = getattr(yaml, "CSafeLoader", None)
    if loader is None:
        raise DocumentError("needs PyYAML with libyaml, which this installation lacks; install the package's wheel")
    try:
        for event in yaml.parse(source.text, Loader=loader):
            if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                _next_yaml(stack)
                stack.append([isinstance(event, yaml.MappingStartEvent), "", isinstance(event, yaml.MappingStartEvent)])
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                stack.pop()
            elif isinstance(event, yaml.ScalarEvent):
                is_key = bool(stack) and stack[-1][2]
                if is_key:
                    stack[-1][1] = event.value
                    roots += [event] if len(stack) == 1 else []
                else:
                    _add_scalar(edits, event, ".".join(str(one[1]) for one in stack), options.target)
                _next_yaml(stack)
            elif isinstance(event, yaml.AliasEvent):
                _next_yaml(stack)
    except yaml.YAMLError as error:
        raise DocumentError(f"is not YAML: {' '.join(str(error).split())[:300]}; check its indentation") from None
    if len(roots) == 1 and re.fullmatch(r"[a-z]{2,3}(?:[-_]\w{2,4})?", roots[0].value):
        edits.change(roots[0].start_mark.index, roots[0].end_mark.index, options.target)
    return text_document(source, edits)


def _next_yaml(stack: list[list[Any]]) -> None:
    if stack and stack[-1][0]:
        stack[-1][2] = not stack[-1][2]


def _add_scalar(edits: TextEdits, event: Any, note: str, target: str) -> None:
    start, end = event.start_mark.index, event.end_mark.index
    anchor = re.compile(r"(?:[&!]\S*\s+)*").match(edits.text, start, end)
    start = anchor.end() if anchor else start
    raw, style, value = edits.text[start:end], event.style or "", paired(event.value)
    if not style and not (event.implicit[0] and _is_yaml_text(raw)):
        return
    if style in ("|", ">"):
        edits.add(start, end, Unit(value, note=note), partial(_yaml_block, raw, value))
        return
    if is_icu(value):
        edits.slots.append(icu_slot(value, note, target, _changer(edits, start, end)))
    else:
        encode = _single_quoted if style == "'" else _json_text if style else _plain_yaml
        edits.add(start, end, Unit(value, note=note), encode)


def _yaml_block(raw: str, value: str, text: str) -> str:
    """Return a text as a block scalar like `raw`, whose value is `value`: with its indentation and its end."""
    head, _, rest = raw.partition("\n")
    first = next((line for line in rest.split("\n") if line.strip()), "")
    first_value = next((line for line in value.split("\n") if line.strip()), "")
    # A number in the head, as in `|2`, says that the text begins with spaces.
    depth = _num_spaces(first) - _num_spaces(first_value)
    lead = "\n" * (len(value) - len(value.lstrip("\n")))
    text = text.strip("\n")
    if head.startswith(">"):  # there, a line break is written as two, except next to lines that begin with a space
        text = re.sub(r"^([^ \t\n].*\n+)(?=[^ \t\n])", r"\1\n", text, flags=re.MULTILINE)
    if not re.search(r"\d", head.partition("#")[0]):
        text = text.lstrip(" ")
    body = "\n".join(" " * depth + line if line else "" for line in text.split("\n"))
    return f"{head}\n{lead}{body}{raw[len(raw.rstrip(_YAML_END)) :]}"


_YAML_END = "\n "


def _num_spaces(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _is_yaml_text(raw: str) -> bool:
    """Return whether a plain scalar is text: no number, date, boolean or null."""
    return has_letters(raw) and not re.fullmatch(
        r"(?i)true|false|yes|no|on|off|null|y|n|\.inf|\.nan|0x[0-9a-f]+", raw.strip()
    )


def _single_quoted(text: str) -> str:
    return _json_text(text) if "\n" in text else "'" + text.replace("'", "''") + "'"


def _plain_yaml(text: str) -> str:
    is_safe = re.fullmatch(r"[^\W\d_][^:#\n\[\]{},\"'|>&*!%@`]*", text) and text == text.strip() and _is_yaml_text(text)
    return text if is_safe else _json_text(text)
