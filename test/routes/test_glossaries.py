"""Stored glossaries of two API keys: native routes, and DeepL's own package. The fake engine repeats its prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepl
import httpx
import pytest
from deepl.api_data import MultilingualGlossaryDictionaryEntries
from pydantic import TypeAdapter, ValidationError

from routes.file_store import Store, StoreFullError
from routes.translation import stored
from routes.translation.languages import GlossaryText
from test.routes.conftest import ANNA, BERT, request
from test.serving import Service

pytestmark = pytest.mark.slow

PATH = "/translate/v1/glossaries"
TERMS = {"state pool": "Zustandsspeicher", "row": "Zeile"}


def translated(service: Service, **body: Any) -> httpx.Response:
    fields = {"source_lang": "en", "target_lang": "de", "text_list": ["The state pool has a row."], **body}
    return request(service, "POST", "/translate/v1/batch-translate", json=fields)


def body_of(*pairs: tuple[str, str, dict[str, str]], name: str = "terms") -> dict[str, Any]:
    return {
        "name": name,
        "dictionaries": [{"source_lang": of, "target_lang": to, "entries": terms} for of, to, terms in pairs],
    }


def test_a_glossary_has_versions_and_an_owner(keyed_fake: Service) -> None:
    made = request(keyed_fake, "POST", PATH, json=body_of(("en-US", "German", TERMS))).json()
    path = f"{PATH}/{made['glossary_id']}"
    assert (made["version"], made["dictionaries"]) == (
        1, [{"source_lang": "en", "target_lang": "de", "entry_count": 2}]
    )  # fmt: skip
    changed = request(keyed_fake, "PUT", path, json=body_of(("en", "de", {"row": "Reihe"}), name="new")).json()
    assert (changed["version"], changed["name"]) == (2, "new")
    read = request(keyed_fake, "GET", path).json()
    assert read["dictionaries"][0]["entries"] == {"row": "Reihe"}
    assert request(keyed_fake, "GET", path, params={"version": "1"}).json()["dictionaries"][0]["entries"] == TERMS
    assert request(keyed_fake, "GET", path, BERT).status_code == 404
    assert request(keyed_fake, "GET", PATH, BERT).json() == {"glossaries": []}
    assert request(keyed_fake, "DELETE", path, BERT).status_code == 404
    for _ in range(10):
        request(keyed_fake, "PUT", path, json=body_of(("en", "de", {"row": "Reihe"})))
    assert request(keyed_fake, "GET", path, params={"version": "2"}).status_code == 404
    assert request(keyed_fake, "DELETE", path).json()["deleted"] is True
    assert request(keyed_fake, "GET", path).status_code == 404


def test_a_translation_uses_a_stored_glossary(keyed_fake: Service) -> None:
    pairs = (("en", "de", TERMS), ("fr", "de", {"ligne": "Zeile"}))
    glossary_id = request(keyed_fake, "POST", PATH, json=body_of(*pairs)).json()["glossary_id"]
    for source in ("en", "auto"):
        (one,) = translated(keyed_fake, glossary_id=glossary_id, source_lang=source).json()["translations"]
        assert "Zustandsspeicher" in one["text"] and "Zeile" in one["text"]
    own = translated(keyed_fake, glossary_id=glossary_id, glossary={"row": "Linie"}).json()["translations"][0]["text"]
    assert "Zustandsspeicher" in own and "Linie" in own and "Zeile" not in own
    unknown, other = (
        translated(keyed_fake, glossary_id="none"),
        translated(keyed_fake, glossary_id=glossary_id, target_lang="it"),
    )
    assert (unknown.status_code, unknown.json()["field"]) == (404, "glossary_id")
    assert other.status_code == 422 and "only of en to de, fr to de" in other.json()["error"]
    request(keyed_fake, "PUT", f"{PATH}/{glossary_id}", json=body_of(("en", "de", {"row": "Reihe"})))
    old = translated(keyed_fake, glossary_id=glossary_id, glossary_version=1).json()["translations"][0]["text"]
    new = translated(keyed_fake, glossary_id=glossary_id).json()["translations"][0]["text"]
    assert "Zeile" in old and "Reihe" in new


WRONG = [
    body_of(),
    body_of(("en", "de", {})),
    body_of(("en", "de", {" ": "x"})),
    body_of(("en", "de", {"a\tb": "x"})),
    body_of(("en", "de", {"a" * 1025: "x"})),
    body_of(("en", "en-GB", {"a": "x"})),
    body_of(("en", "de", {"a": "x"}), ("EN", "de", {"b": "x"})),
    body_of(("en", "de", {"a": "x"}), name=" "),
]


@pytest.mark.parametrize("body", WRONG)
def test_wrong_glossaries_are_refused(keyed_fake: Service, body: dict[str, Any]) -> None:
    refused = request(keyed_fake, "POST", PATH, json=body)
    assert refused.status_code == 422 and refused.json()["error"].startswith(("dictionaries", "name"))


@pytest.mark.parametrize("entries", ["", "a", "a\tb\na\tc", "a\x01\tb", "a" * 1025 + "\tb"])
def test_wrong_entries_of_deepls_glossaries_are_named(keyed_fake: Service, entries: str) -> None:
    body = {"name": "x", "source_lang": "en", "target_lang": "de", "entries": entries, "entries_format": "tsv"}
    refused = request(keyed_fake, "POST", "/v2/glossaries", json=body)
    assert refused.status_code == 400 and refused.json()["message"].startswith("entries: ")


def test_a_term_of_two_lines_is_refused(keyed_fake: Service) -> None:
    """A line break ends the answer: the translation had only the first line."""
    body = {"text_list": ["Hello"], "source_lang": "en", "target_lang": "de", "glossary": {"Hello": "a\nb"}}
    refused = request(keyed_fake, "POST", "/translate/v1/batch-translate", json=body)
    assert refused.status_code == 422 and "glossary.Hello: must be on one line" in refused.json()["error"]


def test_deepl_glossaries_of_one_pair(keyed_fake: Service) -> None:
    client = deepl.DeepLClient(ANNA, server_url=keyed_fake.url)
    made = client.create_glossary("two", "EN", "DE", {"state pool": "Zustandsspeicher", "row": "Zeile"})
    assert made.ready and made.entry_count == 2 and made.source_lang == "EN" and made.creation_time.tzinfo
    assert client.get_glossary_entries(made) == TERMS and client.get_glossary(made.glossary_id).name == "two"
    assert made.glossary_id in [one.glossary_id for one in client.list_glossaries()]
    result = client.translate_text("The state pool.", source_lang="EN", target_lang="DE", glossary=made)
    assert not isinstance(result, list) and "Zustandsspeicher" in result.text
    with pytest.raises(deepl.DeepLException, match="has no terms of FR to DE"):
        client.translate_text("The row.", source_lang="FR", target_lang="DE", glossary=made.glossary_id)
    no_source = {"text": ["The row."], "target_lang": "DE", "glossary_id": made.glossary_id}
    refused = request(keyed_fake, "POST", "/v2/translate", json=no_source)
    assert refused.status_code == 400 and refused.json()["message"].startswith("source_lang")
    from_csv = client.create_glossary_from_csv("csv", "EN", "DE", 'a,"b, c"\nd,e,en,de\n')
    assert client.get_glossary_entries(from_csv) == {"a": "b, c", "d": "e"}
    client.delete_glossary(made)
    with pytest.raises(deepl.GlossaryNotFoundException):
        client.get_glossary(made.glossary_id)
    assert any((one.source_lang, one.target_lang) == ("en", "de") for one in client.get_glossary_languages())


def test_deepl_glossaries_of_several_pairs(keyed_fake: Service) -> None:
    client = deepl.DeepLClient(ANNA, server_url=keyed_fake.url)
    german = MultilingualGlossaryDictionaryEntries("EN", "DE", {"row": "Zeile"})
    french = MultilingualGlossaryDictionaryEntries("EN", "FR", {"row": "ligne"})
    made = client.create_multilingual_glossary("many", [german, french])
    assert [(one.source_lang, one.target_lang, one.entry_count) for one in made.dictionaries] == [
        ("EN", "DE", 1), ("EN", "FR", 1)
    ]  # fmt: skip
    client.update_multilingual_glossary_dictionary(
        made, MultilingualGlossaryDictionaryEntries("EN", "DE", {"pool": "Speicher"})
    )
    assert client.update_multilingual_glossary_name(made, "named").name == "named"
    read = client.get_multilingual_glossary_entries(made, "EN", "DE")
    assert read.dictionaries[0].entries == "row\tZeile\npool\tSpeicher"
    replaced = client.replace_multilingual_glossary_dictionary(made, german)
    assert replaced.entry_count == 1
    client.delete_multilingual_glossary_dictionary(made, german)
    with pytest.raises(deepl.GlossaryNotFoundException):
        client.get_multilingual_glossary_entries(made, "EN", "DE")
    with pytest.raises(deepl.DeepLException, match="only dictionary"):
        client.delete_multilingual_glossary_dictionary(made, french)
    assert made.glossary_id in [one.glossary_id for one in client.list_multilingual_glossaries()]
    client.delete_multilingual_glossary(made)
    terms = {"source_lang": "en", "target_lang": "ja", "entries": "row\t行", "entries_format": "tsv"}
    form = {"name": "from a form", **{f"dictionaries[0].{name}": value for name, value in terms.items()}}
    sent = request(keyed_fake, "POST", "/v3/glossaries", data=form)
    assert sent.status_code == 201 and sent.json()["dictionaries"][0]["entry_count"] == 1


def test_a_key_cannot_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_MAX_BYTES", 64 << 10)
    store = Store(tmp_path, 1 << 20, 10)
    entries = {str(number): "x" * 1000 for number in range(10)}
    dictionary = stored.Dictionary(source_lang="en", target_lang="de", entries=entries)

    def add(owner: str) -> None:
        number = str(len(stored.list_glossaries(store, "")))
        stored.add_glossary(
            store, stored.Glossary(id=number, owner=owner, name="n", created=0.0, dictionaries=[dictionary])
        )

    for _ in range(6):
        add("anna")
    with pytest.raises(StoreFullError, match="delete some"):
        add("anna")
    with pytest.raises(StoreFullError, match="in all versions"):
        stored.change_glossary(store, "anna", "0", lambda last: last)
    add("bert")


def test_a_deep_glossary_in_a_form_is_a_wrong_value() -> None:
    with pytest.raises(ValidationError):
        TypeAdapter[dict[str, str]](GlossaryText).validate_python('{"a":' * 5000 + "1" + "}" * 5000)
