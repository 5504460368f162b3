"""`generation_config.json`: where it is looked for, what is read of it, and that requests use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from programs.settings import parse_settings
from programs.settings.generation_config import read_defaults
from programs.settings.model_file import with_default_model
from routes.openai.request import ChatBody
from routes.request.decode_defaults import DefaultsFields, as_defaults, with_defaults
from routes.request.json_body import validate
from rwkv_batch.calls import DecodeDefaults
from rwkv_batch.errors import StartupError
from test.serving import Service

GIVEN: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 99,
    "eos_token_id": [0, 65],
    "do_sample": True,
    "transformers_version": "4.50.0",
    "bos_token_id": None,
}
READ = DecodeDefaults(
    temperature=0.6,
    top_p=0.9,
    top_k=40,
    max_tokens=99,
    stop_token_ids=(65,),
    filters={"min_p": 0.05, "repetition_penalty": 1.1},
)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def written(path: Path, value: Any = GIVEN) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")
    return path


def test_auto_is_the_file_next_to_the_model(tmp_path: Path) -> None:
    model = tmp_path / "m.pth"
    model.write_bytes(b"")
    assert read_defaults("auto", str(model)) == DecodeDefaults()
    file = written(tmp_path / "generation_config.json")
    assert [read_defaults("auto", str(path)) for path in (model, tmp_path)] == [READ, READ]
    assert read_defaults("none", str(model)) == DecodeDefaults()
    settings = with_default_model(parse_settings(["--model-path", str(model)], {}))
    assert msgspec.convert(settings.http.defaults, DecodeDefaults) == READ
    other = written(tmp_path / "other.json", {"temperature": 1})
    assert read_defaults(str(other), str(model)).temperature == 1 and file.exists()
    off = read_defaults(str(written(tmp_path / "off.json", {"top_k": -1})), str(model))
    assert with_defaults(validate(ChatBody, CHAT), DecodeDefaults(), off).row_sampling(list).top_k == 0


def test_a_draft_model_has_a_name_like_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tmp_path / "m.pth"
    model.write_bytes(b"")
    flags = ["--model-path", str(model), "--draft-model", "ollama:nowhere"]
    with pytest.raises(StartupError, match="nowhere"):
        with_default_model(parse_settings([*flags, "--speculate", "auto"], {}))
    for mode in ("off", "ngram"):  # it was downloaded
        with_default_model(parse_settings([*flags, "--speculate", mode], {}))
        assert f"--draft-model has no effect with --speculate {mode}; add --speculate auto" in caplog.text


def test_requests_use_it_unless_they_give_a_field() -> None:
    body = with_defaults(validate(ChatBody, {**CHAT, "top_p": 0.5}), DecodeDefaults(), READ)
    sampling = body.row_sampling(list)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 40, 0.5)
    assert sampling.filters is not None and sampling.filters.min_p == 0.05
    assert body.max_tokens == 99 and 65 in body.more_stops
    own = with_defaults(validate(ChatBody, {**CHAT, "repeat_penalty": 1.0, "min_p": 0}), DecodeDefaults(), READ)
    assert own.row_sampling(list).filters is None
    constrained = with_defaults(validate(ChatBody, {**CHAT, "regex": "a"}), DecodeDefaults(), READ)
    assert constrained.more_stops == []


def test_a_models_and_a_states_defaults_may_have_every_sampler() -> None:
    from routes.config import HttpConfig

    fields = validate(DefaultsFields, {"min_p": 0.1, "mirostat": 2, "top_p": 0.5})
    assert as_defaults(fields, HttpConfig()).given == {"top_p": 0.5, "min_p": 0.1, "mirostat": 2}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "is no generation config .*; correct it, or give another file, or none, as --generation-config"),
        ("[1]", "is no generation config"),
        ({"temperature": -1}, r"Expected `float` >= 0.0 - at `\$.temperature`"),
        ({"temperature": "1"}, r"at `\$.temperature`"),
        ({"min_p": 2}, r"at `\$.min_p`"),
        ({"eos_token_id": [1, 70_000]}, r"at `\$.eos_token_id"),
        ({"max_new_tokens": 0}, r"at `\$.max_new_tokens`"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    file = written(tmp_path / "g.json", value)
    with pytest.raises(StartupError, match=message):
        read_defaults(str(file), "m.pth")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot be read .*; check --generation-config"):
        read_defaults(str(tmp_path / "none.json"), "m.pth")


@pytest.mark.slow
def test_a_service_shows_them(tmp_path: Path, tiny_model: Path) -> None:
    file = str(written(tmp_path / "g.json"))
    with Service(
        tmp_path, "--model-path", str(tiny_model), "--generation-config", file, "--http-workers", "1"
    ) as service:
        shown = service.get("/props").json()["default_generation_settings"]["params"]
    assert (shown["temperature"], shown["top_k"], shown["n_predict"]) == (0.6, 40, 99)
