"""Default decode parameters from a `generation_config.json`, in Hugging Face's format."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rwkv_batch.calls import DecodeDefaults
from rwkv_batch.errors import StartupError
from rwkv_batch.tokenizer import END_OF_TEXT, VOCAB_SIZE
from sampling.params import Filters

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
AUTO, NONE = "auto", "none"
_MAX_BYTES = 1 << 20
TokenId = Annotated[int, Meta(ge=0, lt=VOCAB_SIZE)]


class _GenerationConfig(msgspec.Struct, frozen=True):
    """The fields that apply here, with the requests' limits. Others are not read."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    eos_token_id: TokenId | Annotated[list[TokenId], Meta(max_length=64)] | None = None


def read_defaults(chosen: str, model_path: str) -> DecodeDefaults:
    """Return the defaults of a file. Raises StartupError.

    chosen: a file, "none", or "auto" for the file next to the model
    """
    if chosen == NONE:
        return DecodeDefaults()
    if chosen == AUTO:
        model = Path(model_path)
        file = (model if model.is_dir() else model.parent) / FILE
        if not file.is_file():
            return DecodeDefaults()
    else:
        file = Path(chosen)
    try:
        with file.open("rb") as opened:
            data: dict[str, Any] = msgspec.json.decode(opened.read(_MAX_BYTES), type=dict[str, Any])
        given = {name: value for name, value in data.items() if value is not None}
        known = msgspec.convert(given, _GenerationConfig)
        numbers = {name: given[name] for name in Filters.__struct_fields__ if isinstance(given.get(name), int | float)}
        msgspec.convert(numbers, Filters)
    except OSError as error:
        raise StartupError(f"{file} cannot be read ({error.strerror}); check --generation-config") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        remedy = "correct it, or give another file, or none, as --generation-config"
        raise StartupError(f"{file} is no generation config ({error}); {remedy}") from None
    ends = [known.eos_token_id] if isinstance(known.eos_token_id, int) else known.eos_token_id or []
    defaults = DecodeDefaults(
        temperature=known.temperature,
        top_p=known.top_p,
        top_k=known.top_k,
        max_tokens=known.max_new_tokens,
        stop_token_ids=tuple(one for one in ends if one != END_OF_TEXT) or None,
        filters=numbers,
    )
    logger.info("%s: %s are the defaults of requests", file, defaults.given)
    return defaults
