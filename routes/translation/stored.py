"""What a key stores for translation, in the database of files.

These are glossaries, documents and approved translations.
"""

from __future__ import annotations

import itertools
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from routes.file_store import Batch, Result, Store, StoreFullError
from rwkv_batch.translation.context import Example, History
from rwkv_batch.translation.languages import language_name
from rwkv_batch.translation.memory import MAX_FUZZY_TEXTS, MAX_GROWTH, Key, Memory

_MAX_GLOSSARIES = 1000
_MAX_BYTES = 64 << 20
"""Of a key's glossaries, with all versions."""
_VERSIONS = 10
_MAX_DOCUMENTS, _MAX_DOCUMENT_BYTES = 1000, 64 << 20
"""Of a key. The least recently used documents are forgotten."""

_MAX_PAIRS, _MAX_MEMORY_CHARACTERS = 100_000, 32 << 20
"""Approved translations of a key."""
_MAX_COMPARED = 20_000
MAX_DOUBTFUL = 100
"""Doubtful translations of a document that its status lists."""


class Pair(NamedTuple):
    """An approved translation. Languages are codes or names."""

    source_lang: str
    target_lang: str
    source: str
    target: str


FILE_KEY, DELETED_KEY = "file", "deleted"
"""Metadata of a document: the id of its file, and whether it is deleted when its batch has ended."""


class Dictionary(msgspec.Struct, frozen=True, kw_only=True):
    """Terms of a language pair."""

    source_lang: str
    target_lang: str
    entries: dict[str, str]


class Glossary(msgspec.Struct, frozen=True, kw_only=True):
    """A stored glossary: dictionaries of different language pairs."""

    id: str
    owner: str
    """Name of the API key. "": no owner."""
    name: str
    version: int = 1
    created: float
    dictionaries: list[Dictionary]


def add_glossary(store: Store, glossary: Glossary) -> None:
    """Add a glossary. Raises StoreFullError."""
    with store.open() as database:
        query = "SELECT COUNT(DISTINCT id) FROM glossaries WHERE owner = ?"
        (count,) = database.execute(query, (glossary.owner,)).fetchone()
        if count >= _MAX_GLOSSARIES:
            raise StoreFullError(f"there are {count} glossaries, the limit is {_MAX_GLOSSARIES}; delete some")
        _insert(database, glossary)


def change_glossary(
    store: Store, owner: str, glossary_id: str, change: Callable[[Glossary], Glossary]
) -> Glossary | None:
    """Add a version of a glossary, in one transaction. None: there is no such glossary. Raises StoreFullError."""
    with store.open() as database:
        last = _read(database, owner, glossary_id)
        if last is None:
            return None
        changed = msgspec.structs.replace(change(last), version=last.version + 1, created=time.time())
        oldest = (glossary_id, changed.version - _VERSIONS)
        database.execute("DELETE FROM glossaries WHERE id = ? AND version <= ?", oldest)
        _insert(database, changed)
    return changed


def find_glossary(store: Store, owner: str, glossary_id: str, version: int | None = None) -> Glossary | None:
    """Return a version of a glossary, by default the last one. Owner "" sees all glossaries."""
    with store.open() as database:
        return _read(database, owner, glossary_id, version)


def list_glossaries(store: Store, owner: str) -> list[Glossary]:
    """Return the last versions of the owner's glossaries, oldest first."""
    query = (
        "SELECT record, MAX(version) FROM glossaries WHERE ? = '' OR owner = ? GROUP BY id ORDER BY MIN(rowid) LIMIT ?"
    )
    with store.open() as database:
        rows = database.execute(query, (owner, owner, _MAX_GLOSSARIES)).fetchall()
    return [msgspec.json.decode(row[0], type=Glossary) for row in rows]


def delete_glossary(store: Store, owner: str, glossary_id: str) -> bool:
    """Delete all versions of a glossary. Return whether it existed."""
    query = "DELETE FROM glossaries WHERE id = ? AND (? = '' OR owner = ?)"
    with store.open() as database:
        return database.execute(query, (glossary_id, owner, owner)).rowcount > 0


def _read(database: sqlite3.Connection, owner: str, glossary_id: str, version: int | None = None) -> Glossary | None:
    query = (
        "SELECT record FROM glossaries WHERE id = ? AND (? = '' OR owner = ?) AND (? IS NULL OR version = ?) "
        "ORDER BY version DESC LIMIT 1"
    )
    row = database.execute(query, (glossary_id, owner, owner, version, version)).fetchone()
    return None if row is None else msgspec.json.decode(row[0], type=Glossary)


def _insert(database: sqlite3.Connection, glossary: Glossary) -> None:
    record = msgspec.json.encode(glossary)
    query = "SELECT COALESCE(SUM(bytes), 0) FROM glossaries WHERE owner = ?"
    (used,) = database.execute(query, (glossary.owner,)).fetchone()
    if used + len(record) > _MAX_BYTES:
        raise StoreFullError(
            f"the glossaries have {used} bytes in all versions and this one {len(record)}, the limit is {_MAX_BYTES}; "
            "delete some"
        )
    row = (glossary.id, glossary.version, glossary.owner, len(record), record.decode())
    database.execute("INSERT INTO glossaries VALUES (?, ?, ?, ?, ?)", row)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What a translation of a client's document continues from."""

    version: int = 0
    context: str = ""
    histories: dict[str, History] = {}
    """By target language."""


def find_document(store: Store, owner: str, document_id: str) -> Document:
    """Return a document. It is empty if it is new."""
    with store.open() as database:
        return _read_document(database, owner, document_id)


def save_document(store: Store, owner: str, document_id: str, document: Document) -> bool:
    """Store a document's next version. False: another request has changed it otherwise."""
    with store.open() as database:
        last = _read_document(database, owner, document_id)
        if last.version != document.version:
            return msgspec.structs.replace(last, version=document.version) == document
        record = msgspec.json.encode(msgspec.structs.replace(document, version=document.version + 1))
        row = (owner, document_id, time.time(), len(record), record.decode())
        database.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?)", row)
        newest = (
            "SELECT id, ROW_NUMBER() OVER newest AS number, SUM(bytes) OVER newest AS total FROM documents "
            "WHERE owner = ? WINDOW newest AS (ORDER BY used DESC ROWS UNBOUNDED PRECEDING)"
        )
        forgotten = f"SELECT id FROM ({newest}) WHERE number > ? OR total > ?"
        limits = (owner, owner, _MAX_DOCUMENTS, _MAX_DOCUMENT_BYTES)
        database.execute(f"DELETE FROM documents WHERE owner = ? AND id IN ({forgotten})", limits)
    return True


def _read_document(database: sqlite3.Connection, owner: str, document_id: str) -> Document:
    query = "SELECT record FROM documents WHERE owner = ? AND id = ?"
    row = database.execute(query, (owner, document_id)).fetchone()
    return Document() if row is None else msgspec.json.decode(row[0], type=Document)


def add_pairs(store: Store, owner: str, pairs: Iterable[Pair]) -> None:
    """Store approved translations. One of the same text is replaced. Raises StoreFullError, and stores none then."""
    rows = [(owner, language_name(of), language_name(to), source.strip(), target) for of, to, source, target in pairs]
    with store.open() as database:
        database.executemany("INSERT OR REPLACE INTO memory VALUES (?, ?, ?, ?, ?)", rows)
        query = "SELECT COUNT(*), SUM(LENGTH(source) + LENGTH(target)) FROM memory WHERE owner = ?"
        count, characters = database.execute(query, (owner,)).fetchone()
        if count > _MAX_PAIRS or (characters or 0) > _MAX_MEMORY_CHARACTERS:
            raise StoreFullError(
                f"the memory would have {count} translations with {characters} characters, the limits are "
                f"{_MAX_PAIRS} and {_MAX_MEMORY_CHARACTERS}; delete some"
            )


def count_pairs(store: Store, owner: str) -> list[tuple[str, str, int]]:
    """Return the number of approved translations of each language pair."""
    query = (
        "SELECT source_lang, target_lang, COUNT(*) FROM memory WHERE owner = ? GROUP BY source_lang, target_lang "
        "ORDER BY source_lang, target_lang"
    )
    with store.open() as database:
        return database.execute(query, (owner,)).fetchall()


def delete_pairs(store: Store, owner: str, source_lang: str, target_lang: str) -> int:
    """Delete the approved translations of a language pair. Return how many. "": of any language."""
    query = "DELETE FROM memory WHERE owner = ? AND (? = '' OR source_lang = ?) AND (? = '' OR target_lang = ?)"
    source, target = language_name(source_lang), language_name(target_lang)
    with store.open() as database:
        return database.execute(query, (owner, source, source, target, target)).rowcount


def recall(store: Store, owner: str, keys: Sequence[Key], target: str) -> Memory:
    """Return the approved translations of these texts and of similar ones."""
    exact: dict[Key, str] = {}
    examples: dict[Key, tuple[Example, ...]] = {}
    candidates: list[tuple[str, list[str], list[tuple[str, str]]]] = []
    to = language_name(target)
    query = "SELECT target FROM memory WHERE owner = ? AND source_lang = ? AND target_lang = ? AND source = ?"
    with store.open() as database:
        for source, text in keys:
            row = database.execute(query, (owner, language_name(source), to, text)).fetchone()
            if row is not None:
                exact[source, text] = row[0]
        others = [key for key in keys if key not in exact][:MAX_FUZZY_TEXTS]
        for source in dict.fromkeys(source for source, _ in others):
            texts = [text for language, text in others if language == source]
            shortest, longest = min(map(len, texts)) / MAX_GROWTH, max(map(len, texts)) * MAX_GROWTH
            known = database.execute(
                "SELECT source, target FROM memory WHERE owner = ? AND source_lang = ? AND target_lang = ? "
                "AND LENGTH(source) BETWEEN ? AND ? LIMIT ?",
                (owner, language_name(source), to, shortest, longest, _MAX_COMPARED),
            ).fetchall()
            candidates.append((source, texts, known))
    for source, texts, known in candidates:  # takes long, and the transaction would make others wait
        from rwkv_batch.translation.similarity import similar

        for text, found in zip(texts, similar(texts, [one for one, _ in known]), strict=True):
            examples[source, text] = tuple(Example(language_name(source), *known[index]) for index in found)
    return Memory(exact, examples)


def delete_document(store: Store, batch: Batch) -> None:
    """Delete a document that is not translated any more, with its files."""
    for name in ((batch.metadata or {}).get(FILE_KEY, ""), batch.input_file_id, *map(batch.result_id, Result)):
        store.delete_file("", name)
    with store.open() as database:
        database.execute("DELETE FROM batches WHERE id = ?", (batch.id,))


def answers(store: Store, batch: Batch) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key of each translated text with its answer."""
    answered = store.content(batch.output_file_id).read_bytes() if batch.output_file_id else b""
    for line in map(msgspec.json.decode, answered.splitlines()):
        yield line["custom_id"], line["response"]["body"]


def doubtful_texts(store: Store, batch: Batch) -> list[dict[str, str]]:
    """Return the first translations with warnings. Empty if the files have expired."""
    try:
        warned = ((key, answer) for key, answer in answers(store, batch) if answer.get("warnings"))
        found = dict(itertools.islice(warned, MAX_DOUBTFUL))
        lines = map(msgspec.json.decode, store.content(batch.input_file_id).read_bytes().splitlines()) if found else ()
    except FileNotFoundError:
        return []
    texts = {line["custom_id"]: line["body"]["text_list"][0] for line in lines if line["custom_id"] in found}
    return [
        {
            "text": texts[key],
            "translation": answer["translations"][0]["text"],
            "warning": answer["warnings"][0]["message"].partition(": ")[2],
        }
        for key, answer in found.items()
    ]
