"""`/translate/v1/glossaries`: stored glossaries, which translations name by `glossary_id`."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import PydanticCustomError

from routes.context import Context
from routes.file_store import Store, StoreFullError
from routes.openai.files import call_store, get_store, new_id
from routes.request.bodies import Body
from routes.request.fields import Fields
from routes.request_context import current_request
from routes.response.http_response import HandlerResponse, json_response, timestamp
from routes.route import Routes
from routes.translation import stored
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.translation.glossary import Glossary
from rwkv_batch.translation.languages import base_language
from rwkv_batch.translation.plan import AUTO, TranslationRequest

PATH = "/translate/v1/glossaries"
_ONE = f"{PATH}/{{glossary_id}}"
_ID = {"glossary_id": "glossary-019eae3d7d1a"}
_EXAMPLE = {
    "name": "house terms",
    "dictionaries": [{"source_lang": "en", "target_lang": "zh", "entries": {"state pool": "状态池"}}],
}
_NOT_FOUND = (ErrorKind.NOT_FOUND,)
ROUTES = Routes()
MAX_TERMS = 10_000
_MAX_TERM_BYTES = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_Result = TypeVar("_Result")


def check_terms(entries: Mapping[str, str]) -> dict[str, str]:
    """Return terms without white space at their ends. Raises PydanticCustomError."""
    found = {}
    for given in entries.items():
        term, translation = map(str.strip, given)
        if not term or not translation:
            raise PydanticCustomError("terms", "must have a term and a translation in each entry")
        for text in (term, translation):
            if _CONTROL.search(text) or len(text.encode("utf-8", "replace")) > _MAX_TERM_BYTES:
                raise PydanticCustomError(
                    "terms", f"must have terms on one line of at most {_MAX_TERM_BYTES} bytes, without tabs"
                )
        found[term] = translation
    return found


GlossaryTerms = Annotated[dict[str, str], Field(max_length=MAX_TERMS), AfterValidator(check_terms)]
GlossaryName = Annotated[str, Field(min_length=1, max_length=_MAX_TERM_BYTES, pattern=r"\S")]
GlossaryId = Annotated[str, Field(max_length=80)]
LanguageCode = Annotated[str, Field(min_length=1, max_length=64, pattern=r"\S"), AfterValidator(base_language)]


class DictionaryFields(Fields):
    """Terms of a language pair."""

    source_lang: LanguageCode = Field(description="Code of the terms' language. A region is left out.")
    target_lang: LanguageCode = Field(description="Code of the translations' language. A region is left out.")
    entries: GlossaryTerms = Field(min_length=1, description='Terms and translations: {"state pool": "状态池"}.')


def check_pairs(dictionaries: list[Any]) -> list[Any]:
    """Return dictionaries of different pairs. Raises PydanticCustomError."""
    pairs = {(one.source_lang, one.target_lang) for one in dictionaries}
    if len(pairs) < len(dictionaries) or any(source == target for source, target in pairs):
        raise PydanticCustomError("pairs", "must be of different language pairs, each of two languages")
    return dictionaries


class GlossaryBody(Body):
    """A glossary to store."""

    name: GlossaryName = Field(description="A name for lists.")
    dictionaries: Annotated[list[DictionaryFields], AfterValidator(check_pairs)] = Field(
        min_length=1, max_length=100, description="Terms of each language pair."
    )


class GlossaryVersionBody(GlossaryBody):
    """A new version of a glossary."""

    glossary_id: GlossaryId = Field("", description="From the path.")


class GlossaryQuery(Fields):
    """The glossary to return."""

    glossary_id: GlossaryId = Field(min_length=1, description="The glossary's id.")
    version: str = Field("", pattern="^[0-9]{0,9}$", description="Number of a version. The last ten are kept.")


class GlossaryInfo(BaseModel):
    """A stored glossary. Lists leave the entries out."""

    glossary_id: str
    name: str
    version: int
    creation_time: str = Field(description="Time of this version.")
    dictionaries: list[dict[str, Any]]


class GlossaryList(BaseModel):
    """The stored glossaries, oldest first."""

    glossaries: list[GlossaryInfo]


class DeletedGlossary(BaseModel):
    """A deleted glossary."""

    glossary_id: str
    deleted: bool


def glossary_info(glossary: stored.Glossary, *, has_entries: bool = False) -> dict[str, Any]:
    dictionaries = [
        {"source_lang": one.source_lang, "target_lang": one.target_lang, "entry_count": len(one.entries)}
        | ({"entries": one.entries} if has_entries else {})
        for one in glossary.dictionaries
    ]
    return {
        "glossary_id": glossary.id,
        "name": glossary.name,
        "version": glossary.version,
        "creation_time": timestamp(glossary.created),
        "dictionaries": dictionaries,
    }


async def call_limited(
    context: Context, field: str, failure: str, function: Callable[..., _Result], *args: Any
) -> _Result:
    """Call a function of `stored` on a thread. Raises ServiceError, of `field` if a limit is reached."""

    def call(store: Store) -> _Result | StoreFullError:
        try:
            return function(store, *args)
        except StoreFullError as error:
            return error

    result = await call_store(call, failure, get_store(context))
    if isinstance(result, StoreFullError):
        raise invalid(field, str(result), None)
    return result


async def call_glossaries(
    context: Context, function: Callable[..., _Result], *args: Any, action: str = "read"
) -> _Result:
    """Call a function of stored glossaries on a thread. Raises ServiceError."""
    return await call_limited(context, "name", f"the glossaries cannot be {action}", function, *args)


def no_glossary(glossary_id: str) -> ServiceError:
    """Return the error for a glossary that this key lacks."""
    message = f"glossary_id: no such glossary: {glossary_id[:80]!r}; GET {PATH} lists them"
    return ServiceError(ErrorKind.NOT_FOUND, message, field="glossary_id", given=glossary_id[:80])


async def get_glossary(context: Context, glossary_id: str, version: int | None = None) -> stored.Glossary:
    """Return a glossary of this key. Raises ServiceError."""
    owner = current_request().owner
    found = await call_glossaries(context, stored.find_glossary, owner, glossary_id, version)
    if found is None:
        raise no_glossary(glossary_id)
    return found


async def add_glossary(context: Context, name: str, dictionaries: list[stored.Dictionary]) -> stored.Glossary:
    """Store a glossary of this key. Raises ServiceError."""
    glossary = stored.Glossary(
        id=new_id("glossary-"),
        owner=current_request().owner,
        name=name,
        created=time.time(),
        dictionaries=dictionaries,
    )
    await call_glossaries(context, stored.add_glossary, glossary, action="stored")
    return glossary


async def change_glossary(
    context: Context, glossary_id: str, change: Callable[[stored.Glossary], stored.Glossary]
) -> stored.Glossary:
    """Store a new version of a glossary. Raises ServiceError."""
    owner = current_request().owner
    changed = await call_glossaries(context, stored.change_glossary, owner, glossary_id, change, action="stored")
    if changed is None:
        raise no_glossary(glossary_id)
    return changed


async def delete_glossary(context: Context, glossary_id: str) -> None:
    """Delete a glossary of this key. Raises ServiceError."""
    owner = current_request().owner
    if not await call_glossaries(context, stored.delete_glossary, owner, glossary_id, action="changed"):
        raise no_glossary(glossary_id)


@functools.lru_cache(maxsize=32)
def compiled(terms: tuple[tuple[str, str], ...]) -> Glossary:
    """Return the terms as a glossary. Ten thousand terms take about a second, so recent ones are kept."""
    return Glossary(dict(terms))


async def named_glossaries(
    context: Context, ids: Sequence[str], request: TranslationRequest, version: int | None = None
) -> TranslationRequest:
    """Return a request with the terms of stored glossaries. Its own terms win, then the first glossary's.

    Raises ServiceError if a glossary does not exist, or none of them has the languages.
    """
    if not ids:
        return request
    found = [await get_glossary(context, one, version) for one in ids]
    base = base_language(request.target)
    terms: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for dictionary in (one for glossary in reversed(found) for one in glossary.dictionaries):
        if dictionary.target_lang == base:
            terms[dictionary.source_lang] |= dictionary.entries
    if not terms or (request.source.lower() != AUTO and base_language(request.source) not in terms):
        pairs = ", ".join(f"{one.source_lang} to {one.target_lang}" for each in found for one in each.dictionaries)
        message = f"has no terms of {request.source} to {request.target}, only of {pairs[:500]}"
        raise invalid("glossary_id", message, found[0].id)
    own = request.glossary.terms
    glossaries = {
        source: await asyncio.to_thread(compiled, tuple({**entries, **own}.items()))
        for source, entries in terms.items()
    }
    return dataclasses.replace(request, glossaries=glossaries)


def _dictionaries(body: GlossaryBody) -> list[stored.Dictionary]:
    return [
        stored.Dictionary(source_lang=one.source_lang, target_lang=one.target_lang, entries=one.entries)
        for one in body.dictionaries
    ]


@ROUTES.add("POST", PATH, "Store a glossary.", answer=GlossaryInfo, example=_EXAMPLE)
async def create(context: Context, body: GlossaryBody) -> HandlerResponse:
    """Store a glossary. Translations of the same key may name it by `glossary_id`."""
    return json_response(glossary_info(await add_glossary(context, body.name, _dictionaries(body))))


@ROUTES.add(
    "PUT", _ONE, "Store a new version of a glossary.", answer=GlossaryInfo, errors=_NOT_FOUND, example=_EXAMPLE | _ID
)
async def replace(context: Context, body: GlossaryVersionBody) -> HandlerResponse:
    """Store a new version of a glossary. The last ten versions are kept."""

    def change(last: stored.Glossary) -> stored.Glossary:
        return stored.Glossary(
            id=last.id, owner=last.owner, name=body.name, created=last.created, dictionaries=_dictionaries(body)
        )

    return json_response(glossary_info(await change_glossary(context, body.glossary_id, change)))


@ROUTES.add("GET", PATH, "List glossaries.", answer=GlossaryList)
async def list_all(context: Context) -> HandlerResponse:
    """List this key's glossaries, without entries."""
    found = await call_glossaries(context, stored.list_glossaries, current_request().owner)
    return json_response({"glossaries": [glossary_info(one) for one in found]})


@ROUTES.add("GET", _ONE, "Return a glossary.", answer=GlossaryInfo, errors=_NOT_FOUND, example=_ID)
async def get(context: Context, query: GlossaryQuery) -> HandlerResponse:
    """Return a glossary with its entries."""
    found = await get_glossary(context, query.glossary_id, int(query.version) if query.version else None)
    return json_response(glossary_info(found, has_entries=True))


@ROUTES.add("DELETE", _ONE, "Delete a glossary.", answer=DeletedGlossary, errors=_NOT_FOUND, example=_ID)
async def delete(context: Context, query: GlossaryQuery) -> HandlerResponse:
    """Delete a glossary with all its versions."""
    await delete_glossary(context, query.glossary_id)
    return json_response({"glossary_id": query.glossary_id, "deleted": True})
