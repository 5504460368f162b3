"""Files over HTTP: the native routes, DeepL's `translate_document` and LibreTranslate's `/translate_file`."""

from __future__ import annotations

import io
import time
import zipfile
from typing import Any

import deepl
import httpx
import pytest

from test.routes.conftest import ANNA, BERT, PASSWORD, bearer
from test.serving import Service, wait_for
from test.translation.documents import docx, epub

pytestmark = pytest.mark.slow

PATH = "/translate/v1/documents"
SRT = "1\n00:00:01,000 --> 00:00:02,000\nHello\n\n2\n00:00:03,000 --> 00:00:04,500\nBye\n"


def send(service: Service, name: str, content: bytes, **fields: str) -> httpx.Response:
    form = {"target_lang": "de", "source_lang": "en", **fields}
    return httpx.post(service.url + PATH, headers=service.headers, data=form, files={"file": (name, content)})


def get(service: Service, path: str) -> httpx.Response:
    return httpx.get(f"{service.url}{PATH}/{path}", headers=service.headers)


def finished(service: Service, document: dict[str, Any]) -> dict[str, Any]:
    def ended() -> Any:
        found = get(service, document["id"]).json()
        return found if found["status"] in ("done", "error") else None

    return dict(wait_for(ended, 120, "the document"))


def test_a_file_is_translated_in_the_background(keyed_fake: Service) -> None:
    sent = send(keyed_fake, "film.srt", SRT.encode(), instruction="Be short.", formality="more")
    assert sent.status_code == 200, sent.text
    document = sent.json()
    assert (document["filename"], document["texts"], document["status"]) == ("film.de.srt", 2, "queued")
    warning = "the translation is much longer than the text"
    doubtful = [{"text": text, "translation": "Be short.", "warning": warning} for text in ("Hello", "Bye")]
    assert finished(keyed_fake, document) | {"created_at": 0} == {
        "id": document["id"], "filename": "film.de.srt", "status": "done", "texts": 2, "translated": 2, "failed": 0,
        "created_at": 0, "error": "", "notes": [], "doubtful": doubtful,
    }  # fmt: skip
    result = get(keyed_fake, f"{document['id']}/content")
    assert 'filename="film.de.srt"' in result.headers["Content-Disposition"], "curl -OJ takes this name"
    assert result.text.startswith("1\n00:00:01,000 --> 00:00:02,000\n") and "Be short." in result.text
    assert get(keyed_fake, f"{document['id']}/content").content == result.content
    assert httpx.delete(f"{keyed_fake.url}{PATH}/{document['id']}", headers=keyed_fake.headers).json()["deleted"]
    assert (
        get(keyed_fake, document["id"]).status_code == get(keyed_fake, f"{document['id']}/content").status_code == 404
    )
    assert httpx.get(keyed_fake.url + "/openai/v1/batches", headers=keyed_fake.headers).json()["data"] == []
    assert httpx.get(keyed_fake.url + "/openai/v1/files", headers=keyed_fake.headers).json()["data"] == []


def test_a_file_uses_approved_translations(keyed_fake: Service) -> None:
    memory = {"source_lang": "en", "target_lang": "de", "pairs": [{"source": "Hello", "target": "Guten Tag"}]}
    assert keyed_fake.post("/translate/v1/memory", memory).status_code == 200
    documents = [send(keyed_fake, "film.srt", SRT.encode(), memory=flag).json() for flag in ("true", "false")]
    for document, is_approved in zip(documents, (True, False), strict=True):
        assert finished(keyed_fake, document)["status"] == "done"
        assert ("Guten Tag" in get(keyed_fake, f"{document['id']}/content").text) == is_approved
    assert keyed_fake.request("DELETE", "/translate/v1/memory", headers=keyed_fake.headers).status_code == 200


def test_a_file_is_translated_with_terms(keyed_fake: Service) -> None:
    terms = {"glossary": '{"Bye": "Zubuwort"}', "glossary_mode": "enforce"}
    document = send(keyed_fake, "film.srt", SRT.encode(), **terms).json()
    assert finished(keyed_fake, document)["status"] == "done"
    assert "Zubuwort" in get(keyed_fake, f"{document['id']}/content").text
    assert send(keyed_fake, "film.srt", SRT.encode(), glossary="Bye").json()["field"] == "glossary"
    httpx.delete(f"{keyed_fake.url}{PATH}/{document['id']}", headers=keyed_fake.headers)


def test_the_body_may_be_the_file(keyed_fake: Service) -> None:
    url = f"{keyed_fake.url}{PATH}/word%20file.docx"
    content = docx("<w:p><w:r><w:t>Hello</w:t></w:r></w:p>")
    sent = httpx.put(
        url, params={"target_lang": "de", "bilingual": "true"}, content=content, headers=keyed_fake.headers
    )
    assert sent.status_code == 200, sent.text
    assert finished(keyed_fake, sent.json())["status"] == "done"
    result = get(keyed_fake, f"{sent.json()['id']}/content").content
    assert (
        "Hello</w:t></w:r><w:r><w:br/></w:r>" in zipfile.ZipFile(io.BytesIO(result)).read("word/document.xml").decode()
    )


@pytest.mark.parametrize(
    ("name", "content", "fields", "field", "message"),
    [
        ("a.csv", b"id,body\n1,x\n", {"column": "text"}, "column", "name one of 'id', 'body'"),
        ("a.pdf", b"%PDF-1.7", {}, "file", "convert it to docx or html"),
        ("a.docx", b"PK", {}, "file", "is not a ZIP file"),
        ("a.docx", docx("x" * (20 << 20)), {}, "file", "expands to"),
        ("a.foo", b"x", {}, "file", "the name must end in .txt"),
        ("a.txt", b"12", {}, "file", "no text to translate"),
        ("a.txt", b"", {}, "file", "must not be empty"),
        ("a.txt", b"x", {"target_lang": "auto"}, "target_lang", "must be the language to translate into"),
        ("a.po", b'msgid "a"\nmsgstr ""\n', {"bilingual": "1"}, "file", "po has no place for two languages"),
        ("a.xlf", b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><xliff>&e;</xliff>', {}, "file", "entities"),
    ],
)
def test_wrong_files_are_refused_at_once(
    keyed_fake: Service, name: str, content: bytes, fields: dict[str, str], field: str, message: str
) -> None:
    answer = send(keyed_fake, name, content, **fields)
    assert answer.status_code == 400 or answer.status_code == 422, answer.text
    error = answer.json()
    assert message in str(error) and field in str(error)
    assert "/etc" not in str(error)


def test_what_was_found_in_a_file_stays_in_its_status(keyed_fake: Service) -> None:
    document = send(keyed_fake, "a.txt", "Hello 4".encode("utf-16")).json()
    assert "utf-16-le" in document["notes"][0]
    assert get(keyed_fake, document["id"]).json()["notes"] == document["notes"]


def test_nobody_without_the_password_sends_or_reads_files(keyed_fake: Service) -> None:
    document = send(keyed_fake, "a.txt", b"Hello you").json()
    stranger = {"url": f"{keyed_fake.url}{PATH}/{document['id']}"}
    assert httpx.get(**stranger).status_code == httpx.delete(**stranger).status_code == 401
    assert (
        httpx.post(keyed_fake.url + PATH, data={"target_lang": "de"}, files={"file": ("a.txt", b"x")}).status_code
        == 401
    )
    assert get(keyed_fake, "doc_unknown").status_code == get(keyed_fake, "batch_unknown").status_code == 404


def test_a_key_sees_its_own_documents_and_a_running_one_is_stopped_by_delete(
    keyed_fake: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_key(key: str) -> None:
        monkeypatch.setattr(keyed_fake, "headers", bearer(key))

    as_key(ANNA)
    content = b"".join(b"line %d of a long text\n" % i for i in range(3000))
    document = send(keyed_fake, "a.txt", content).json()
    path = f"{PATH}/{document['id']}"
    assert get(keyed_fake, f"{document['id']}/content").status_code == 429
    as_key(BERT)
    assert get(keyed_fake, document["id"]).status_code == 404
    assert keyed_fake.request("DELETE", path, headers=bearer(BERT)).status_code == 404
    as_key(ANNA)
    assert keyed_fake.request("DELETE", path, headers=bearer(ANNA)).status_code == 200
    assert get(keyed_fake, document["id"]).status_code == 404
    wait_for(lambda: not keyed_fake.get("/openai/v1/files").json()["data"], 120, "the deletion of the files")


def test_deepls_client_translates_a_document(keyed_fake: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.2)))
    client = deepl.DeepLClient(PASSWORD, server_url=keyed_fake.url)
    out = io.BytesIO()
    page = '<html xmlns="http://www.w3.org/1999/xhtml"><body><p>Hello</p></body></html>'
    status = client.translate_document(epub(page), out, target_lang="DE", filename="book.epub")
    assert status.done and status.billed_characters == len("A small book") + len("First chapter") + len("Hello")
    assert zipfile.ZipFile(out).namelist()[0] == "mimetype"
    handle = client.translate_document_upload(b"Hello you", target_lang="DE", filename="a.txt")
    wrong = deepl.DocumentHandle(handle.document_id, "x" * 32)
    with pytest.raises(deepl.DeepLException, match="no such document"):
        client.translate_document_get_status(wrong)
    with pytest.raises(deepl.DeepLException, match="output_format"):
        client.translate_document_upload(b"Hello", target_lang="DE", filename="a.txt", output_format="docx")
    with pytest.raises(deepl.DeepLException, match="is a pdf file, which is not translated"):
        client.translate_document_upload(b"%PDF-1.7", target_lang="DE", filename="a.pdf", output_format="docx")


def test_libretranslates_files(keyed_fake: Service) -> None:
    settings = httpx.get(keyed_fake.url + "/frontend/settings").json()
    assert settings["filesTranslation"] and {".docx", ".epub", ".srt"} <= set(settings["supportedFilesFormat"])
    form = {"source": "en", "target": "zt", "api_key": PASSWORD}
    answer = httpx.post(keyed_fake.url + "/translate_file", data=form, files={"file": ("a.txt", b"Hello you\n")})
    url = answer.json()["translatedFileUrl"]
    assert url.startswith(f"{keyed_fake.url}/download_file/doc_")
    result = httpx.get(url)
    assert result.status_code == 200 and "a.zh-TW.txt" in result.headers["Content-Disposition"] and result.content
    assert httpx.get(f"{keyed_fake.url}/download_file/doc_unknown").status_code == 404
    for wrong in (url.rpartition(".")[0], f"{url}0"):
        assert httpx.get(wrong).status_code == 404, "the id alone opens no file"
    refused = httpx.post(
        keyed_fake.url + "/translate_file", data={**form, "api_key": "x"}, files={"file": ("a.txt", b"x")}
    )
    assert refused.status_code == 403
    long = {"file": ("a.txt", b"a b " * 300_000)}
    path = f"/translate_file?api_key={PASSWORD}"
    refused = httpx.post(keyed_fake.url + path, data={**form, "api_key": ""}, files=long)
    assert refused.status_code == 400 and "1199999 characters, the limit is 1048576" in refused.json()["error"]
