"""DeepL's glossaries, v2 with one language pair and v3 with several. They are the service's stored glossaries."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import Any, Literal, Self

import msgspec
from pydantic import Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from routes.context import Context
from routes.request.bodies import Body
from routes.request.fields import TextFields, body_error
from routes.request_context import current_request
from routes.response.http_response import DEEPL_ERRORS, NO_CONTENT, HandlerResponse, HttpResponse, json_response
from routes.route import Routes
from routes.translation import stored
from routes.translation.glossaries import (
    MAX_TERMS,
    GlossaryId,
    GlossaryName,
    LanguageCode,
    add_glossary,
    call_glossaries,
    change_glossary,
    check_pairs,
    check_terms,
    delete_glossary,
    get_glossary,
    glossary_info,
)
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.translation.languages import LANGUAGE_NAMES, base_language

_TERMS = {"source_lang": "en", "target_lang": "de", "entries": "row\tZeile", "entries_format": "tsv"}
_ID = {"glossary_id": "glossary-019eae3d7d1a"}
_V2, _V3 = "/v2/glossaries", "/v3/glossaries"
_V2_ID, _V3_ID = f"{_V2}/{{glossary_id}}", f"{_V3}/{{glossary_id}}"
_FORM: dict[str, Any] = {"form_lists": ()}
_ONE: dict[str, Any] = {**_FORM, "errors": (ErrorKind.NOT_FOUND,)}
_QUERY: dict[str, Any] = {**_ONE, "example": _ID}
ROUTES = Routes(error_format=DEEPL_ERRORS)

_TSV = "text/tab-separated-values"
_ENTRIES, _DICTIONARIES = "/entries", "/dictionaries"
_CREATED = 201


class DictionaryBody(TextFields):
    """Terms of a language pair, as lines of tab-separated or comma-separated values."""

    source_lang: LanguageCode = Field(description="Code of the terms' language.")
    target_lang: LanguageCode = Field(description="Code of the translations' language.")
    entries: str = Field(description="A line per term: the term, a tab or comma, and its translation.")
    entries_format: Literal["tsv", "csv"] = Field("tsv", description="tsv or csv.")

    @property
    def dictionary(self) -> stored.Dictionary:
        return stored.Dictionary(source_lang=self.source_lang, target_lang=self.target_lang, entries=self._terms)

    _terms: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _parse(self) -> Self:
        self._terms = _parse_terms(self.entries, self.entries_format)
        check_pairs([self])
        return self


class DeepLGlossaryBody(DictionaryBody, Body):
    """A glossary of one language pair."""

    name: GlossaryName = Field(description="A name for lists.")


class DeepLGlossariesBody(Body):
    """A glossary of several language pairs."""

    name: GlossaryName = Field(description="A name for lists.")
    dictionaries: list[DictionaryBody] = Field(min_length=1, max_length=100, description="Terms of each pair.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_pairs(self.dictionaries)
        return self


class DeepLChangeBody(Body):
    """Changes of a glossary: its name, or terms that are added or replaced."""

    glossary_id: GlossaryId = Field("", description="From the path.")
    name: GlossaryName | None = Field(None, description="A new name.")
    dictionaries: list[DictionaryBody] = Field([], max_length=100, description="Terms to add or replace.")


class DeepLDictionaryBody(DictionaryBody, Body):
    """The terms of a language pair. They replace its earlier terms."""

    glossary_id: GlossaryId = Field("", description="From the path, followed by `/dictionaries`.")


class DeepLGlossaryQuery(TextFields):
    """The glossary, and for some paths a language pair."""

    glossary_id: GlossaryId = Field(
        min_length=1, description="The glossary's id. v3: also followed by `/entries` or `/dictionaries`."
    )
    source_lang: str = Field("", max_length=64, description="Source language of the pair.")
    target_lang: str = Field("", max_length=64, description="Target language of the pair.")


def _parse_terms(text: str, form: str) -> dict[str, str]:
    """Return the terms of lines. Raises PydanticCustomError."""
    lines = text.splitlines()
    try:
        rows: Iterable[list[str]] = csv.reader(lines, strict=True) if form == "csv" else (x.split("\t") for x in lines)
        pairs = [row for row in rows if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise body_error(f"entries: must be valid CSV: {error}", "entries") from None
    if not pairs or len(pairs) > MAX_TERMS:
        raise body_error(f"entries: must have 1 to {MAX_TERMS} terms", "entries")
    if any(len(row) not in (2, 4) for row in pairs):
        raise body_error("entries: must have a term and its translation in each line", "entries")
    if len({row[0].strip() for row in pairs}) < len(pairs):
        raise body_error("entries: must have each term once", "entries")
    try:
        return check_terms({row[0]: row[1] for row in pairs})
    except PydanticCustomError as error:
        raise body_error(f"entries: {error.message()}", "entries") from None


def _to_tsv(entries: dict[str, str]) -> str:
    return "\n".join(f"{term}\t{translation}" for term, translation in entries.items())


def _v2_info(glossary: stored.Glossary) -> dict[str, Any]:
    info = glossary_info(glossary)
    (pair, *_) = info.pop("dictionaries")
    return {**info, "ready": True, **pair}


def _dictionary_of(glossary: stored.Glossary, query: DeepLGlossaryQuery) -> stored.Dictionary:
    """Return the dictionary that a query names. Raises ServiceError."""
    pair = base_language(query.source_lang), base_language(query.target_lang)
    found = next((one for one in glossary.dictionaries if (one.source_lang, one.target_lang) == pair), None)
    if found is None:
        message = f"glossary_id: glossary {glossary.name!r} has no dictionary of {pair[0] or '?'} to {pair[1] or '?'}"
        raise ServiceError(ErrorKind.NOT_FOUND, message, field="source_lang", given=query.source_lang)
    return found


@ROUTES.add("POST", _V2, "DeepL: store a glossary.", status=_CREATED, example={"name": "terms", **_TERMS}, **_FORM)
async def create_v2(context: Context, body: DeepLGlossaryBody) -> HandlerResponse:
    """Store a glossary of one language pair."""
    return json_response(_v2_info(await add_glossary(context, body.name, [body.dictionary])), _CREATED)


@ROUTES.add(
    "POST",
    _V3,
    "DeepL: store a glossary.",
    status=_CREATED,
    example={"name": "terms", "dictionaries": [_TERMS]},
    **_FORM,
)
async def create_v3(context: Context, body: DeepLGlossariesBody) -> HandlerResponse:
    """Store a glossary of several language pairs."""
    dictionaries = [one.dictionary for one in body.dictionaries]
    return json_response(glossary_info(await add_glossary(context, body.name, dictionaries)), _CREATED)


@ROUTES.add("GET", _V2, "DeepL: the glossaries.")
async def list_v2(context: Context) -> HandlerResponse:
    """List this key's glossaries of one language pair."""
    found = await call_glossaries(context, stored.list_glossaries, current_request().owner)
    return json_response({"glossaries": [_v2_info(one) for one in found if len(one.dictionaries) == 1]})


@ROUTES.add("GET", _V3, "DeepL: the glossaries.")
async def list_v3(context: Context) -> HandlerResponse:
    """List this key's glossaries."""
    found = await call_glossaries(context, stored.list_glossaries, current_request().owner)
    return json_response({"glossaries": [glossary_info(one) for one in found]})


@ROUTES.add("GET", _V2_ID, "DeepL: a glossary.", **_QUERY)
async def get_v2(context: Context, query: DeepLGlossaryQuery) -> HandlerResponse:
    """Return a glossary, or with `/entries` its terms as tab-separated values."""
    name: str = query.glossary_id
    glossary = await get_glossary(context, name.removesuffix(_ENTRIES))
    if not name.endswith(_ENTRIES):
        return json_response(_v2_info(glossary))
    return HttpResponse(_to_tsv(glossary.dictionaries[0].entries).encode(), content_type=_TSV)


@ROUTES.add("GET", _V3_ID, "DeepL: a glossary.", **_QUERY)
async def get_v3(context: Context, query: DeepLGlossaryQuery) -> HandlerResponse:
    """Return a glossary, or with `/entries` the terms of a language pair."""
    glossary = await get_glossary(context, query.glossary_id.removesuffix(_ENTRIES))
    if not query.glossary_id.endswith(_ENTRIES):
        return json_response(glossary_info(glossary))
    found = _dictionary_of(glossary, query)
    entries = {"entries": _to_tsv(found.entries), "entries_format": "tsv"}
    pair = {"source_lang": found.source_lang, "target_lang": found.target_lang}
    return json_response({"dictionaries": [pair | entries]})


@ROUTES.add("PATCH", _V3_ID, "DeepL: change a glossary.", example=_ID | {"name": "terms"}, **_ONE)
async def change_v3(context: Context, body: DeepLChangeBody) -> HandlerResponse:
    """Change a glossary's name, or add and replace terms."""

    def change(last: stored.Glossary) -> stored.Glossary:
        pairs = {(one.source_lang, one.target_lang): one for one in last.dictionaries}
        for one in body.dictionaries:
            pair = (one.source_lang, one.target_lang)
            known = pairs[pair].entries if pair in pairs else {}
            pairs[pair] = msgspec.structs.replace(one.dictionary, entries=known | one.dictionary.entries)
        return msgspec.structs.replace(last, name=body.name or last.name, dictionaries=[*pairs.values()])

    return json_response(glossary_info(await change_glossary(context, body.glossary_id, change)))


@ROUTES.add("PUT", _V3_ID, "DeepL: replace a dictionary.", example=_ID | _TERMS, **_ONE)
async def replace_dictionary(context: Context, body: DeepLDictionaryBody) -> HandlerResponse:
    """Replace the terms of a language pair."""
    new = body.dictionary
    pair = (new.source_lang, new.target_lang)

    def change(last: stored.Glossary) -> stored.Glossary:
        others = [one for one in last.dictionaries if (one.source_lang, one.target_lang) != pair]
        return msgspec.structs.replace(last, dictionaries=[*others, new])

    await change_glossary(context, body.glossary_id.removesuffix(_DICTIONARIES), change)
    names = {"source_lang": new.source_lang, "target_lang": new.target_lang}
    return json_response({**names, "entry_count": len(new.entries)})


@ROUTES.add("DELETE", _V3_ID, "DeepL: delete a glossary or a dictionary.", status=NO_CONTENT, **_QUERY)
@ROUTES.add("DELETE", _V2_ID, "DeepL: delete a glossary.", status=NO_CONTENT, **_QUERY)
async def delete(context: Context, query: DeepLGlossaryQuery) -> HandlerResponse:
    """Delete a glossary, or with `/dictionaries` the terms of a language pair."""
    name = query.glossary_id.removesuffix(_DICTIONARIES)
    if name == query.glossary_id:
        await delete_glossary(context, name)
        return HttpResponse(b"", NO_CONTENT)

    def change(last: stored.Glossary) -> stored.Glossary:
        gone = _dictionary_of(last, query)
        return msgspec.structs.replace(last, dictionaries=[one for one in last.dictionaries if one is not gone])

    if len((await get_glossary(context, name)).dictionaries) == 1:
        raise invalid("source_lang", "is the glossary's only dictionary; delete the glossary", query.source_lang)
    await change_glossary(context, name, change)
    return HttpResponse(b"", NO_CONTENT)


@ROUTES.add("GET", "/v2/glossary-language-pairs", "DeepL: the glossaries' languages.")
async def language_pairs(context: Context) -> HandlerResponse:
    """Return all language pairs: a glossary may have any."""
    codes = sorted(LANGUAGE_NAMES)
    pairs = [{"source_lang": of, "target_lang": to} for of in codes for to in codes if of != to]
    return json_response({"supported_languages": pairs})
