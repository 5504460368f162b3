"""The tokenizer routes of vLLM: `/tokenize`, `/detokenize`, `/tokenizer_info`.

Evaluation harnesses that score token ids call them under the address of the completions.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from routes.context import Context
from routes.request.bodies import Body
from routes.request.jobs import offload_if_large
from routes.response.http_response import NATIVE_ERRORS, OPENAI_ERRORS, HandlerResponse, json_response
from routes.response.response_models import Detokenized, Tokenized, TokenizerInfo
from routes.route import Route
from rwkv_batch.tokenizer import END_OF_TEXT, VOCAB_SIZE

END_NAME = "<|rwkv_tokenizer_end_of_text|>"
"""Name of token 0, which has no text, in the transformers package's World tokenizers."""


class TokenizeBody(Body):
    """A text to tokenise."""

    prompt: str = Field(
        description=f"The text. {END_NAME} alone is token 0, the end token. Inside a text it is ordinary text."
    )
    add_special_tokens: bool = Field(True, description="Accepted. There are no special tokens to add.")


class DetokenizeBody(Body):
    """Token ids to decode."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=VOCAB_SIZE)]], Field(fail_fast=True)] = Field(
        description="The token ids."
    )


async def tokenize(context: Context, body: TokenizeBody) -> HandlerResponse:
    """Return the token ids of a text."""
    if body.prompt == END_NAME:
        ids = [END_OF_TEXT]
    else:
        ids = await offload_if_large(len(body.prompt), context.tokenizer.encode, body.prompt)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": context.config.max_prompt_tokens})


async def detokenize(context: Context, body: DetokenizeBody) -> HandlerResponse:
    """Return the text of token ids. Invalid UTF-8 is shown as U+FFFD."""
    return json_response({"prompt": context.tokenizer.decode_bytes(body.tokens).decode("utf-8", "replace")})


async def tokenizer_info(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Return the tokenizer's class, vocabulary size and special tokens."""
    info = {"tokenizer_class": "RWKVWorldTokenizer", "vocab_size": VOCAB_SIZE}
    return json_response({**info, "bos_token": END_NAME, "eos_token": END_NAME})


def _routes(prefix: str) -> tuple[Route, ...]:
    """Return the three routes under `prefix`, where clients of `{prefix}/v1/completions` expect them."""
    error_format = OPENAI_ERRORS if prefix else NATIVE_ERRORS
    return (
        Route(
            "POST",
            f"{prefix}/tokenize",
            tokenize,
            TokenizeBody,
            "Token ids of a text.",
            answer=Tokenized,
            error_format=error_format,
            example={"prompt": "Hello world!"},
        ),
        Route(
            "POST",
            f"{prefix}/detokenize",
            detokenize,
            DetokenizeBody,
            "The text of token ids.",
            answer=Detokenized,
            error_format=error_format,
            example={"tokens": [33155, 40213, 34]},
        ),
        Route(
            "GET",
            f"{prefix}/tokenizer_info",
            tokenizer_info,
            None,
            "About the tokenizer.",
            answer=TokenizerInfo,
            error_format=error_format,
        ),
    )


ROUTES = (*_routes(""), *_routes("/openai"))
