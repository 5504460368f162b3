"""The tokenizer as vLLM serves it: `/tokenize`, `/detokenize`, `/tokenizer_info`.

Evaluation harnesses that score by token ids ask for them beside the completions' address.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from routes.context import Context
from routes.openai.errors import OPENAI_ERRORS
from routes.request.bodies import Body
from routes.request.generate_requests import offload_if_large
from routes.response.http_response import NATIVE_ERRORS, HandlerResponse, json_response
from routes.response.response_models import Detokenized, Tokenized, TokenizerInfo
from routes.route import Route
from rwkv_batch.tokenizer import END_OF_TEXT, VOCAB_SIZE

END_NAME = "<|rwkv_tokenizer_end_of_text|>"
"""What the World tokenizers of the transformers package call token 0, which has no text."""


class TokenizeBody(Body):
    """A text."""

    prompt: str = Field(description=f"The text. {END_NAME} alone is the end token, 0; inside a text it is text.")
    add_special_tokens: bool = Field(True, description="Accepted; there are none to add.")


class DetokenizeBody(Body):
    """Token ids."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=VOCAB_SIZE)]], Field(fail_fast=True)] = Field(
        description="The token ids."
    )


async def tokenize(context: Context, body: TokenizeBody) -> HandlerResponse:
    """Token ids of a text."""
    if body.prompt == END_NAME:
        ids = [END_OF_TEXT]
    else:
        ids = await offload_if_large(len(body.prompt), context.tokenizer.encode, body.prompt)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": context.config.max_prompt_tokens})


async def detokenize(context: Context, body: DetokenizeBody) -> HandlerResponse:
    """The text of token ids; what is no UTF-8 is shown as U+FFFD."""
    return json_response({"prompt": context.tokenizer.decode_bytes(body.tokens).decode("utf-8", "replace")})


async def tokenizer_info(context: Context, query: dict[str, str]) -> HandlerResponse:
    """What a client has to know of the tokenizer."""
    info = {"tokenizer_class": "RWKVWorldTokenizer", "vocab_size": VOCAB_SIZE}
    return json_response({**info, "bos_token": END_NAME, "eos_token": END_NAME})


def _routes(place: str) -> tuple[Route, ...]:
    """The three under `place`, where clients look for them beside `{place}/v1/completions`."""
    form = OPENAI_ERRORS if place else NATIVE_ERRORS
    return (
        Route(
            "POST",
            f"{place}/tokenize",
            tokenize,
            TokenizeBody,
            "Token ids of a text.",
            answer=Tokenized,
            error_format=form,
            example={"prompt": "Hello world!"},
        ),
        Route(
            "POST",
            f"{place}/detokenize",
            detokenize,
            DetokenizeBody,
            "The text of token ids.",
            answer=Detokenized,
            error_format=form,
            example={"tokens": [33155, 40213, 34]},
        ),
        Route(
            "GET",
            f"{place}/tokenizer_info",
            tokenizer_info,
            None,
            "About the tokenizer.",
            answer=TokenizerInfo,
            error_format=form,
        ),
    )


ROUTES = (*_routes(""), *_routes("/openai"))
