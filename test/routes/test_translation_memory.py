"""Approved translations of two API keys, TMX files, and the cache. The fake engine repeats its prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from routes.file_store import Store, StoreFullError
from routes.translation import stored
from routes.translation.memory import MemoryQuery, read_tmx
from rwkv_batch.errors import ServiceError
from rwkv_batch.translation.context import Example
from test.routes.conftest import BERT, request
from test.serving import Service

PATH = "/translate/v1/memory"
PAIR = {"source": "Save the {name} file", "target": "Datei {name} speichern"}
HEADER = '<?xml version="1.0"?><!DOCTYPE tmx SYSTEM "tmx14.dtd"><tmx version="1.4"><header srclang="en-US"/><body>'
TMX = f"""{HEADER}
<tu><tuv xml:lang="en-US"><seg>Open <ph x="1">{{0}}</ph> now</seg></tuv><tuv xml:lang="de"><seg>{{0}} öffnen</seg></tuv>
<tuv xml:lang="fr"><seg>Ouvrir {{0}}</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>Close</seg></tuv><tuv xml:lang="de"><seg>Schließen</seg></tuv></tu>
</body></tmx>"""
BOMB = '<!DOCTYPE a [<!ENTITY a "{0}"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>'
XXE = '<!DOCTYPE a [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
TU = '<tmx><header srclang="en"/><body><tu><tuv xml:lang="en"><seg>{0}</seg></tuv>{1}</tu></body></tmx>'
DE = '<tuv xml:lang="de"><seg>x</seg></tuv>'


def translated(service: Service, *texts: str, **body: Any) -> list[tuple[str, str]]:
    key = {"key": body.pop("key")} if "key" in body else {}
    fields = {"source_lang": "en", "target_lang": "de", "text_list": texts, **body}
    answer = request(service, "POST", "/translate/v1/batch-translate", json=fields, **key).json()
    return [(one["text"], one.get("source", "")) for one in answer["translations"]]


def upload(service: Service, content: str, **query: str) -> Any:
    return request(service, "POST", f"{PATH}/tmx", content=content.encode(), params=query)


def test_approved_translations_replace_the_model(keyed_fake: Service) -> None:
    body = {"source_lang": "en-GB", "target_lang": "German", "pairs": [PAIR]}
    assert request(keyed_fake, "POST", PATH, json=body).json() == {"stored": 1}
    text = PAIR["source"]
    assert translated(keyed_fake, text, memory=True) == [(PAIR["target"], "memory")]
    ((by_model, origin),) = translated(keyed_fake, text)
    assert by_model != PAIR["target"] and not origin
    ((other_key, _),) = translated(keyed_fake, text, memory=True, key=BERT)
    assert other_key != PAIR["target"]
    terms = {
        "source_lang": "en",
        "target_lang": "de",
        "text_list": [text],
        "memory": True,
        "glossary": {text[:4]: "xyz"},
    }
    answer = request(keyed_fake, "POST", "/translate/v1/batch-translate", json=terms).json()
    assert "lacks the term" in answer["warnings"][0]["message"], "the memory came before the glossary in silence"
    mixed = translated(keyed_fake, f"{text}\nAnother line of text", memory=True)
    assert mixed[0][0].startswith(PAIR["target"]) and mixed[0][1] == "model"
    assert request(keyed_fake, "GET", PATH).json()["memory"][0] == {
        "source_lang": "English", "target_lang": "German", "count": 1
    }  # fmt: skip
    assert request(keyed_fake, "GET", PATH, BERT).json() == {"memory": []}
    assert request(keyed_fake, "DELETE", PATH, params={"source_lang": "fr"}).json() == {"deleted": 0}
    assert request(keyed_fake, "DELETE", PATH).json() == {"deleted": 1}


def test_a_tmx_file_is_imported(keyed_fake: Service) -> None:
    assert upload(keyed_fake, TMX).json() == {"stored": 3}
    assert translated(keyed_fake, "Open {0} now", "Close", memory=True) == [
        ("{0} öffnen", "memory"), ("Schließen", "memory")
    ]  # fmt: skip
    request(keyed_fake, "DELETE", PATH)
    assert upload(keyed_fake, TMX, target_lang="fr").json() == {"stored": 1}
    request(keyed_fake, "DELETE", PATH)


HOSTILE = [
    "", "no xml", "<tmx>", "<tmx></tmx>", TMX.replace("</tmx>", ""), TU.format("text", ""), TU.format("a" * 5000, DE),
    "<a>" * 3000, "\x00" * 100, "PK\x03\x04" + "x" * 100, TMX.replace('srclang="en-US"', 'srclang="ja"'),
]  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_wrong_files_are_refused(keyed_fake: Service, content: str) -> None:
    refused = upload(keyed_fake, content)
    assert refused.status_code == 422 and refused.json()["error"].startswith("content"), refused.text


def test_a_form_is_refused_as_one(keyed_fake: Service) -> None:
    """It was said to be a body that ended early, because Robyn removes a form's boundaries."""
    refused = request(keyed_fake, "POST", f"{PATH}/tmx", files={"file": ("a.tmx", HEADER)})
    assert refused.status_code == 400 and "is a form" in refused.json()["error"]


def test_entities_become_text() -> None:
    content = BOMB.format("lol") + TU.format("text &c;", DE)
    assert [pair.source for pair in read_tmx(content.encode(), MemoryQuery())] == ["text " + "lol" * 72]


@pytest.mark.parametrize(("prefix", "name"), [(BOMB.format("lol" * 99_999), "c"), (XXE, "a")])
def test_entities_that_grow_or_are_elsewhere_are_refused(prefix: str, name: str) -> None:
    content = prefix + TU.format(f"text &{name};", DE)
    with pytest.raises(ServiceError, match="content: must be a TMX file"):
        list(read_tmx(content.encode(), MemoryQuery()))


def test_the_answer_tells_whether_it_was_cached(keyed_fake: Service) -> None:
    text = "A text that only this test sends"
    origins = [translated(keyed_fake, text, cache=use)[0][1] for use in ("off", "use", "use", "refresh", "use")]
    assert origins == ["model", "model", "cache", "model", "cache"]


def test_similar_translations_are_examples(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20, 10)
    known = [(f"The {thing} is ready to be used", f"{thing} bereit") for thing in ("state pool", "big engine", "row")]
    stored.add_pairs(store, "anna", [stored.Pair("en", "de", *one) for one in [*known, ("Nothing alike", "x")]])
    key, other = ("en", "The state poll is ready to be used"), ("en", "Completely different words here")
    memory = stored.recall(store, "anna", [key, other, ("en", known[2][0])], "de-AT")
    assert memory.exact == {("en", known[2][0]): known[2][1]}
    assert memory.examples[key][-1] == Example("English", *known[0]) and len(memory.examples[key]) == 2
    assert memory.examples[other] == ()
    assert stored.recall(store, "bert", [key], "de").examples[key] == ()
    assert not stored.recall(store, "anna", [("en", known[2][0])], "fr").exact


def test_the_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_MAX_PAIRS", 10)
    store = Store(tmp_path, 1 << 20, 10)
    with pytest.raises(StoreFullError, match="delete some"):
        stored.add_pairs(store, "anna", (stored.Pair("en", "de", str(number), "x") for number in range(11)))
    assert stored.count_pairs(store, "anna") == []


def test_requests_of_a_document_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_MAX_DOCUMENTS", 3)
    store = Store(tmp_path, 1 << 20, 10)
    page = stored.Document(context="A page")
    assert stored.save_document(store, "anna", "d", page) and stored.save_document(store, "anna", "d", page)
    assert not stored.save_document(store, "anna", "d", stored.Document(context="Another page"))
    assert stored.find_document(store, "anna", "d").context == "A page"
    assert stored.find_document(store, "bert", "d") == stored.Document()
    for number in range(4):
        stored.save_document(store, "anna", str(number), page)
    assert stored.find_document(store, "anna", "d") == stored.find_document(store, "anna", "0") == stored.Document()
    assert stored.find_document(store, "anna", "3").context == "A page"
