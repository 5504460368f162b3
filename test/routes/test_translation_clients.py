"""DeepL's and LibreTranslate's APIs with their own Python packages. The fake engine repeats the last text."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import deepl
import httpx
import pytest
from libretranslatepy import LibreTranslateAPI

from routes.translation import deepl as deepl_routes
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.translation.glossary import GlossaryMode
from rwkv_batch.translation.plan import TranslationRequest
from test.routes.conftest import PASSWORD
from test.serving import Service, wait_for

NODE = Path(__file__).parent / "node"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def translator(keyed_fake: Service) -> deepl.DeepLClient:
    return deepl.DeepLClient(PASSWORD, server_url=keyed_fake.url)


def test_deepl_translates_texts(translator: deepl.DeepLClient) -> None:
    first, second = translator.translate_text(
        ["say Guten Morgen!", "12.5 {x}"], target_lang="de", source_lang="en", context="A page about mornings.",
        formality=deepl.Formality.PREFER_MORE, model_type=deepl.ModelType.LATENCY_OPTIMIZED,
    )  # fmt: skip
    assert (second.text, second.billed_characters, second.detected_source_lang) == ("12.5 {x}", 8, "EN")
    assert first.text and first.model_type_used == "quality_optimized"
    html = translator.translate_text(
        '<p translate="no">Stay</p><p>42</p>', target_lang="ZH-HANT", tag_handling="html", split_sentences="nonewlines"
    )
    assert html.text == '<p translate="no">Stay</p><p>42</p>'
    xml = translator.translate_text(
        "<d><raw>Keep</raw></d>", target_lang="PT-BR", tag_handling="xml", ignore_tags=["raw"], outline_detection=False
    )
    assert xml.text == "<d><raw>Keep</raw></d>"


def test_deepl_lists(translator: deepl.DeepLClient) -> None:
    assert {"EN", "DE", "ZH"} <= {one.code for one in translator.get_source_languages()}
    targets = {one.code: one.supports_formality for one in translator.get_target_languages()}
    assert targets["EN-US"] is False and "ZH-HANT" in targets and "EN" not in targets
    usage = translator.get_usage()
    assert usage.character.valid and not usage.any_limit_reached


def test_deepl_errors(translator: deepl.DeepLClient, keyed_fake: Service) -> None:
    with pytest.raises(deepl.AuthorizationException):
        deepl.DeepLClient("wrong", server_url=keyed_fake.url).get_usage()
    with pytest.raises(deepl.DeepLException, match="is not supported"):
        translator.translate_text("Hello", target_lang="DE", formality="more")
    v2 = {"target_lang": "DE", "tag_handling": "xml", "tag_handling_version": "v2"}
    for wrong, why in (
        ("<a>1</b>", "mismatched tag at line 1, column 7"),
        ("1<a>\n&", "at line 2, column 2"),
        ("1 < 2", "column 4"),
        ("1</x><x>2", "mismatched tag"),
    ):
        with pytest.raises(deepl.DeepLException, match=rf"text\[0\]: is not well-formed XML: .*{why}"):
            translator.translate_text(wrong, **v2)
    bomb = '<!DOCTYPE x [<!ENTITY a "1111111111"><!ENTITY b "&a;&a;&a;&a;&a;&a;">]><x>&b;</x>'
    for whole in ('<?xml version="1.0" encoding="UTF-16"?>\n<d>1</d>', bomb, "<a:b>1</a:b>", "1&nbsp;<c/>2"):
        assert translator.translate_text(whole, **v2).text == whole
    for version in ("v1", None):
        v1 = v2 | {"tag_handling_version": version}
        assert translator.translate_text("<a>1</b>", **v1).text == "<a>1</b>"
    for wrong_list in ([1], ["x" * 301], ["x"] * 11):
        with pytest.raises(deepl.DeepLException, match="custom_instructions"):
            translator.translate_text("42", target_lang="de", custom_instructions=wrong_list)
    for stored in ("style_id", "translation_memory_id"):
        with pytest.raises(deepl.DeepLException, match=f"{stored}: .*leave it out"):
            translator.translate_text("42", target_lang="de", extra_body_parameters={stored: "an-id"})
    with pytest.raises(deepl.DeepLException, match="no such path: /v2/write/rephrase"):
        translator.rephrase_text("Hello", target_lang="DE")
    for method, path, status in (
        ("POST", "/v3/style_rules", 404),
        ("GET", "/v2/translate", 405),
        ("PATCH", "/v2/glossaries/x", 405),
    ):
        unserved = httpx.request(method, keyed_fake.url + path)
        assert unserved.status_code == status and list(unserved.json()) == ["message"], path
    assert "error" in httpx.post(f"{keyed_fake.url}/v2/chat/complete").json(), "a path of the native API"
    refused = httpx.post(f"{keyed_fake.url}/v2/translate", json={"text": ["a"], "target_lang": "DE"})
    assert refused.status_code == 403 and isinstance(refused.json()["message"], str) and refused.headers["x-trace-id"]


@pytest.mark.skipif(not (NODE / "node_modules").is_dir(), reason="no deepl-node; run `npm ci` in test/routes/node")
def test_deepls_node_client(keyed_fake: Service, tmp_path: Path) -> None:
    command = ["node", "deepl.mjs", keyed_fake.url, PASSWORD, str(tmp_path)]
    ended = subprocess.run(command, cwd=NODE, capture_output=True, text=True, timeout=60, check=False)
    assert not ended.returncode, ended.stderr[-2000:]
    assert json.loads(ended.stdout) == {
        "texts": ["en", "12.5 {x}", 8, "quality_optimized"],
        "tags": ['<p translate="no">Stay</p><p>42</p>', "<d><raw>Keep</raw></d>"],
        "languages": [True, True],
        "usage": [True, False],
        "pairs": True,
        "glossary": [2, True, True],
        "entries": {"Hallo": "Howdy", "Welt": "world"},
        "listed": True,
        "withGlossary": "string",
        "many": ["renamed", [2, 1]],
        "dictionary": {"hi": "na"},
        "document": ["done", True],
        "errors": ["AuthorizationError", "DeepLError", "GlossaryNotFoundError", "DeepLError"],
    }


def test_deepl_node_repeats_a_slow_request(keyed_fake: Service) -> None:
    """deepl-node needs the head within 5 s. It sends forms, and the same again while the first runs."""
    fields = [("text", "A slow text. " * 40), ("target_lang", "de"), ("source_lang", "en"), ("split_sentences", "0")]
    content = urlencode([*fields, ("context", "A page."), ("outline_detection", "0"), ("show_billed_characters", "1")])
    agent = "deepl-node/1.28.0 (linux) node/22.0.0"
    headers = {**FORM, "Authorization": f"DeepL-Auth-Key {PASSWORD}", "User-Agent": agent}

    def sent(body: str) -> tuple[float, bytes, int, float]:
        started = time.monotonic()
        with httpx.stream(
            "POST", f"{keyed_fake.url}/v2/translate", content=body, headers=headers, timeout=30
        ) as answer:
            head_s = time.monotonic() - started
            return head_s, answer.read(), answer.status_code, time.monotonic() - started

    def running() -> int:
        return int(keyed_fake.status()["jobs"].get("/v2/translate", 0))

    with ThreadPoolExecutor(3) as pool:
        both = [pool.submit(sent, content), pool.submit(sent, content)]
        wait_for(lambda: running() == 1, 10, "it runs")
        other = pool.submit(sent, content.replace("slow", "long"))
        wait_for(lambda: running() == 2, 10, "another text is another translation")
        (head_s, first, status, whole_s), (_, again, _, _) = [one.result() for one in both]
    assert 1.5 < head_s < whole_s / 2, "the head comes after two seconds, long before the text"
    assert status == 200 and first.strip() == again.strip()
    assert json.loads(first)["translations"][0]["billed_characters"] == 520 and other.result()[2] == 200


def test_large_xml_is_checked_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 texts of 1 MiB stopped all other requests for 2 s."""
    on_loop: list[bool] = []

    def fault(*_: str) -> str:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return "it is large"

    monkeypatch.setattr(deepl_routes, "_xml_fault", fault)
    fields = {"target_lang": "DE", "source_lang": "EN", "tag_handling": "xml", "tag_handling_version": "v2"}
    body = deepl_routes.DeepLBody.model_validate({"text": ["1" * 1_000_000], **fields})
    context: Any = SimpleNamespace(config=SimpleNamespace(strict_fields=False))
    with pytest.raises(ServiceError, match="it is large"):
        asyncio.run(deepl_routes.translate_text(context, body))
    assert on_loop and not any(on_loop)


@pytest.mark.parametrize(
    ("fields", "style"),
    [
        ({"custom_instructions": ["Use short words.", "Keep names."]}, "Use short words. Keep names."),
        ({"formality": "prefer_more"}, "Use formal, polite language."),
        ({"formality": "prefer_less", "custom_instructions": ["a"]}, "a\nUse informal language."),
        ({"formality": "default"}, ""),
    ],
)
def test_deepl_instructions_are_the_style(fields: dict[str, Any], style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def checked(_context: Any, _ids: Any, request: TranslationRequest) -> TranslationRequest:
        assert request.style == style and request.glossary_mode is GlossaryMode.ENFORCE, "clients see no warnings"
        raise ServiceError(ErrorKind.OVERLOADED, "checked")

    monkeypatch.setattr(deepl_routes, "named_glossaries", checked)
    body = deepl_routes.DeepLBody.model_validate({"text": ["Hello"], "target_lang": "DE", **fields})
    context: Any = SimpleNamespace(config=SimpleNamespace(strict_fields=False))
    with pytest.raises(ServiceError, match="checked"):
        asyncio.run(deepl_routes.translate_text(context, body))


def test_unknown_languages_are_refused(keyed_fake: Service) -> None:
    """They were put into the prompt, with a warning that these clients do not show."""
    key = {"Authorization": f"DeepL-Auth-Key {PASSWORD}"}
    refused = keyed_fake.post("/v2/translate", {"text": ["a"], "target_lang": "XX"}, headers=key)
    assert refused.status_code == 400 and "unknown language 'XX'" in refused.json()["message"]
    body = {"q": "a", "source": "en", "target": "xx", "api_key": PASSWORD}
    refused = keyed_fake.post("/translate", body, headers={})
    assert refused.status_code == 400 and "unknown language 'xx'" in refused.json()["error"]
    form = {"source": "en", "target": "xx", "api_key": PASSWORD}
    refused = httpx.post(f"{keyed_fake.url}/translate_file", data=form, files={"file": ("a.txt", b"Hello you")})
    assert refused.status_code == 400 and "unknown language 'xx'" in refused.json()["error"], refused.text


def test_deepl_forms(keyed_fake: Service) -> None:
    fields = [("text", "1"), ("text", "2"), ("target_lang", "zh-HANS"), ("tag_handling", "xml"), ("ignore_tags", "a,b")]
    fields += [("show_billed_characters", "1"), ("outline_detection", "0"), ("split_sentences", "1")]
    headers = {**FORM, "Authorization": f"DeepL-Auth-Key {PASSWORD}"}
    answer = httpx.post(f"{keyed_fake.url}/v2/translate", content=urlencode(fields), headers=headers)
    assert [one["text"] for one in answer.json()["translations"]] == ["1", "2"], answer.text
    many = httpx.post(f"{keyed_fake.url}/v2/translate", content="a=1&" * 20_000, headers=headers)
    assert many.status_code == 400 and "10000 fields" in many.json()["message"]


def test_omegats_requests(keyed_fake: Service) -> None:
    """Forms as OmegaT's plugins send them: deepl-java's, and LibreTranslate's without a field for a key."""
    java = {**FORM, "User-Agent": "Java/17.0.9", "Accept": "text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2"}
    text = "<f0>42</f0>, 7<i1/>!"
    libre = urlencode({"q": text, "source": "en", "target": "de", "api_key": ""})  # as clients without a key send it
    answer = httpx.post(f"{keyed_fake.url}/translate?api_key={PASSWORD}", content=libre, headers=java)
    assert answer.status_code == 200, answer.text
    fields = {"source_lang": "EN", "target_lang": "ZH-HANS", "text": text, "show_billed_characters": "1"}
    agent = {"User-Agent": "deepl-java/1.16.0 (Linux-6.1-amd64) java/17.0.9"}
    headers = java | agent | {"Authorization": f"DeepL-Auth-Key {PASSWORD}"}
    deepls = httpx.post(
        f"{keyed_fake.url}/v2/translate", content=urlencode({**fields, "split_sentences": "1"}), headers=headers
    )
    (one,) = deepls.json()["translations"]
    for translation in (answer.json()["translatedText"], one["text"]):
        assert [translation.count(tag) for tag in ("<f0>", "</f0>", "<i1/>")] == [1, 1, 1], translation
    assert one["billed_characters"] == len(text) and one["detected_source_language"] == "EN"
    assert "warnings" not in answer.json() or "api_key" not in str(answer.json()["warnings"])
    empty = httpx.post(f"{keyed_fake.url}/translate?api_key={PASSWORD}", content=f"{libre}&api_key=", headers=java)
    assert empty.status_code == 200, "clients without a key send an empty field"
    wrong = httpx.post(f"{keyed_fake.url}/translate?api_key=wrong", content=libre, headers=java)
    assert wrong.status_code == 403 and isinstance(wrong.json()["error"], str)


def test_libretranslate_translates_and_detects(keyed_fake: Service) -> None:
    client = LibreTranslateAPI(keyed_fake.url, PASSWORD)
    assert client.translate("42 {x}", "en", "zh") == "42 {x}"
    assert client.translate("say Hallo", "en", "zt")
    (best, *_) = client.detect("Das ist ein Haus, und die Katze schläft darin.")
    assert best["language"] == "de" and best["confidence"] > 90
    assert client.detect("你好，世界")[0]["language"] == "zh-Hans"
    assert client.detect("12 + 3") == [{"confidence": 0.0, "language": "en"}], "the client's users read the first"
    codes = {one["code"]: one["targets"] for one in client.languages()}
    assert {"en", "zh-Hans", "pt-BR"} <= set(codes["en"])


def test_a_very_long_text_is_refused(keyed_fake: Service) -> None:
    """Other requests would wait while it is searched for placeholders and sentences."""
    body, headers = {"q": "a b " * 300_000, "source": "en", "target": "de"}, {"Authorization": f"Bearer {PASSWORD}"}
    refused = httpx.post(f"{keyed_fake.url}/translate", json=body, headers=headers)
    assert refused.status_code == 400 and "1200000 characters, the limit is 1048576" in refused.text, refused.text


def test_libretranslate_answers_have_the_form_of_their_request(keyed_fake: Service) -> None:
    def post(**body: Any) -> httpx.Response:
        return httpx.post(
            f"{keyed_fake.url}/translate", json={"api_key": PASSWORD, "source": "auto", "target": "en", **body}
        )

    one, many = post(q="42", alternatives=2).json(), post(q=["42", "7"], alternatives=1, format="html").json()
    assert one == {
        "translatedText": "42", "alternatives": [], "detectedLanguage": {"confidence": 0.0, "language": "en"}
    }  # fmt: skip
    assert many["translatedText"] == ["42", "7"] and many["alternatives"] == [[], []]
    assert [entry["language"] for entry in many["detectedLanguage"]] == ["en", "en"]
    assert "detectedLanguage" not in post(q="42", source="de").json()
    for wrong in ({"q": ""}, {"q": []}, {"q": "a", "format": "pdf"}, {"q": "a", "alternatives": -1}, {}):
        refused = post(**wrong)
        assert refused.status_code == 400 and refused.json()["error"].startswith(next(reversed(wrong), "q"))
    with pytest.raises(urllib.error.HTTPError, match="403"):
        LibreTranslateAPI(keyed_fake.url, "wrong").translate("a", "en", "de")
    form = httpx.post(f"{keyed_fake.url}/translate", files={name: (None, text) for name, text in
        {"q": "42", "source": "en", "target": "de", "api_key": PASSWORD}.items()})  # fmt: skip
    assert form.json() == {"translatedText": "42"}
    settings = httpx.get(f"{keyed_fake.url}/frontend/settings").json()
    assert settings["keyRequired"] is True and settings["filesTranslation"] is True and settings["suggestions"] is True


def test_libretranslate_uses_suggestions(keyed_fake: Service) -> None:
    client = LibreTranslateAPI(keyed_fake.url, PASSWORD)
    suggestion = {"q": "The pool is empty.", "s": "Der Speicher ist leer.", "source": "en", "target": "de"}
    sent = httpx.post(f"{keyed_fake.url}/suggest", data={**suggestion, "api_key": PASSWORD})
    assert sent.json() == {"success": True}, sent.text
    assert client.translate("The pool is empty.", "en", "de") == "Der Speicher ist leer."
    detected = {"q": "Das ist ein Haus, und die Katze schläft.", "s": "A house.", "source": "auto", "target": "en"}
    assert httpx.post(f"{keyed_fake.url}/suggest", data={**detected, "api_key": PASSWORD}).json() == {"success": True}
    assert client.translate(detected["q"], "de", "en") == "A house.", "the pair was stored under auto"
