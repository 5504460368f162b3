"""`/translate/v1/memory`: approved translations of a key, which requests with `memory` use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, Field

from routes.context import Context
from routes.openai.files import call_store, get_store
from routes.request.bodies import Body
from routes.request.fields import Fields, TextFields
from routes.request_context import current_request
from routes.response.http_response import XML, HandlerResponse, json_response
from routes.route import Routes, Upload
from routes.translation import stored
from routes.translation.glossaries import call_limited
from rwkv_batch.errors import invalid
from rwkv_batch.translation.languages import base_language
from rwkv_batch.translation.tmx import MAX_CHARACTERS, TmxError, read_pairs

_LANGUAGES = {"source_lang": "en", "target_lang": "de"}
ROUTES = Routes()

PATH = "/translate/v1/memory"
_MAX_PAIRS = 100_000
_Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS, pattern=r"\S")]
_Code = Annotated[str, Field(min_length=1, max_length=64, pattern=r"\S")]


class ApprovedPair(Fields):
    """A text with its approved translation."""

    source: _Text = Field(description="The text.")
    target: _Text = Field(description="Its translation.")


class MemoryBody(Body):
    """Approved translations of a language pair."""

    source_lang: _Code = Field(description="Code or name of the texts' language.")
    target_lang: _Code = Field(description="Code or name of the translations' language.")
    pairs: Annotated[list[ApprovedPair], Field(fail_fast=True)] = Field(
        min_length=1, max_length=10_000, description="Texts with their translations. They replace earlier ones."
    )


class MemoryQuery(TextFields):
    """Languages of approved translations."""

    source_lang: str = Field("", max_length=64, description="Only texts of this language.")
    target_lang: str = Field("", max_length=64, description="Only translations into this language.")


class StoredPairs(BaseModel):
    """The number of stored translations."""

    stored: int


class DeletedPairs(BaseModel):
    """The number of deleted translations."""

    deleted: int


class MemoryCount(BaseModel):
    """The number of approved translations of a language pair."""

    source_lang: str
    target_lang: str
    count: int


class MemoryCounts(BaseModel):
    """The approved translations of this key."""

    memory: list[MemoryCount]


async def add_pairs(context: Context, pairs: list[stored.Pair], field: str) -> None:
    """Store approved translations of this key. Raises ServiceError."""
    message = "the translations cannot be stored"
    await call_limited(context, field, message, stored.add_pairs, current_request().owner, pairs)


@ROUTES.add(
    "POST",
    PATH,
    "Store approved translations.",
    answer=StoredPairs,
    example=_LANGUAGES | {"pairs": [{"source": "Good morning", "target": "Guten Morgen"}]},
)
async def add(context: Context, body: MemoryBody) -> HandlerResponse:
    """Store approved translations, like those that someone edited."""
    pairs = [stored.Pair(body.source_lang, body.target_lang, one.source, one.target) for one in body.pairs]
    await add_pairs(context, pairs, "pairs")
    return json_response({"stored": len(pairs)})


@ROUTES.add(
    "POST", f"{PATH}/tmx", "Store the translations of a TMX file.", uploads=XML, answer=StoredPairs, example=_LANGUAGES
)
async def import_tmx(context: Context, upload: Upload[MemoryQuery]) -> HandlerResponse:
    """Store the translations of a TMX file. Its entries must be in the header's source language."""
    message, owner = "the translations cannot be stored", current_request().owner

    def read_and_store(store: stored.Store) -> int:
        pairs = list(read_tmx(upload.content, upload.query))
        stored.add_pairs(store, owner, pairs)
        return len(pairs)

    return json_response({"stored": await call_limited(context, "content", message, read_and_store)})


def read_tmx(content: bytes, query: MemoryQuery) -> Iterator[stored.Pair]:
    """Yield the translations of a TMX file, of the query's languages. Raises ServiceError."""
    wanted_from, wanted_to = (base_language(one) for one in (query.source_lang, query.target_lang))
    count = 0
    try:
        for pair in read_pairs(content):
            if not (_fits(pair.source_language, wanted_from) and _fits(pair.language, wanted_to)):
                continue
            count += 1
            if count > _MAX_PAIRS:
                raise invalid("content", f"has more than {_MAX_PAIRS} translations; send it in parts", count)
            yield stored.Pair(pair.source_language, pair.language, pair.text, pair.translation)
    except TmxError as error:
        raise invalid("content", str(error), None) from None
    if not count:
        raise invalid(
            "content", "has no translations of these languages; a TMX file has tu, tuv and seg elements", None
        )


def _fits(language: str, wanted: str) -> bool:
    return not wanted or base_language(language) == wanted


@ROUTES.add("GET", PATH, "Count approved translations.", answer=MemoryCounts)
async def count(context: Context) -> HandlerResponse:
    """Count this key's approved translations."""
    message = "the translations cannot be counted"
    found = await call_store(stored.count_pairs, message, get_store(context), current_request().owner)
    names = ("source_lang", "target_lang", "count")
    return json_response({"memory": [dict(zip(names, one, strict=True)) for one in found]})


@ROUTES.add("DELETE", PATH, "Delete approved translations.", answer=DeletedPairs, example=_LANGUAGES)
async def delete(context: Context, query: MemoryQuery) -> HandlerResponse:
    """Delete this key's approved translations, all or those of the given languages."""
    message, owner = "the translations cannot be deleted", current_request().owner
    languages = query.source_lang, query.target_lang
    return json_response(
        {"deleted": await call_store(stored.delete_pairs, message, get_store(context), owner, *languages)}
    )
