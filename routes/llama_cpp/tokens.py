"""Routes about tokens and prompts: counts, token ids, texts, and the prompt of a conversation.

The tokenizer routes are vLLM's and llama.cpp's. Evaluation harnesses that score token ids call them under the address
of the completions.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from routes.context import Context
from routes.openai.formatter import prompt_of
from routes.openai.tools import ChatToolChoice, ChatTools, chat_tool_set
from routes.request import prompts
from routes.request.bodies import Body, Messages, Texts
from routes.request.fields import body_error
from routes.request.jobs import encode, offload_if_large
from routes.response.http_response import OPENAI_ERRORS, HandlerResponse, HttpResponse, json_response
from routes.response.response_models import Detokenized, Prompt, TokenCount, Tokenized, TokenizerInfo
from routes.route import Routes
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.tokenizer import END_OF_TEXT, VOCAB_SIZE, Tokenizer

ROUTES = Routes()


class TemplateBody(Body):
    """A conversation to convert into a prompt."""

    messages: Messages = Field([], description="The conversation.")
    enable_think: bool = Field(False, description="Use the prompt format with thinking.")
    tools: ChatTools = Field([], description="Functions that the prompt of `messages` lists.")
    tool_choice: ChatToolChoice | None = Field(
        None,
        description="As in chat completions. `none` lists no functions. A forced call adds the beginning of a call.",
    )

    @property
    def prompt(self) -> str:
        return prompt_of(
            self.messages,
            prompts.think_mode(self.enable_think),
            chat_tool_set(self.tools, self.tool_choice, parallel_calls=True),
        )

    @model_validator(mode="after")
    def _has_tools(self) -> Self:
        chat_tool_set(self.tools, self.tool_choice, parallel_calls=True)
        if self.tools and not self.messages:
            raise body_error("tools can only be given with messages", "tools")
        return self


class CountBody(TemplateBody):
    """Text to count."""

    text: str | None = Field(None, description="One text.")
    contents: Texts = Field([], description="Raw prompts.")


@ROUTES.add("POST", "/v1/tokens/count", "Count tokens.", answer=TokenCount, example={"text": "Hello world!"})
async def count_tokens(context: Context, body: CountBody) -> HandlerResponse:
    """Count the tokens of a text, raw prompts, or a conversation.

    A conversation is counted in its prompt format.
    """
    if body.messages:
        texts = [body.prompt]
    elif body.contents:
        texts = body.contents
    elif body.text is not None:
        texts = [body.text]
    else:
        raise ServiceError(
            ErrorKind.INVALID_FIELD, "one of text, contents and messages must be given", field="text", given=None
        )
    counts = await offload_if_large(sum(map(len, texts)), _counts, context.tokenizer, texts)
    return json_response({"tokens": sum(counts)})


def _counts(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    return [sum(map(len, tokenizer.encode_pieces(text))) for text in texts]


@ROUTES.add(
    "POST",
    "/apply-template",
    "The prompt of a conversation.",
    answer=Prompt,
    example={"messages": [{"role": "user", "content": "Hello!"}]},
)
async def apply_template(context: Context, body: TemplateBody) -> HandlerResponse:
    """Return the prompt of a conversation, under llama.cpp's name."""
    if not body.messages:
        raise invalid("messages", "must not be empty", [])
    size = sum(len(message.text) for message in body.messages)
    return json_response({"prompt": await offload_if_large(size, lambda: body.prompt)})


END_NAME = "<|rwkv_tokenizer_end_of_text|>"
"""Name of token 0, which has no text, in the transformers package's World tokenizers."""


class TokenizeBody(Body):
    """A text to tokenise."""

    prompt: str | None = Field(
        None, description=f"The text. {END_NAME} alone is token 0, the end token. Inside a text it is ordinary text."
    )
    content: str | None = Field(None, description="llama.cpp's name of `prompt`.")
    with_pieces: bool = Field(False, description="llama.cpp's field: return each token with its text.")
    add_special_tokens: bool = Field(True, description="Accepted. There are no special tokens to add.")
    add_special: bool = Field(False, description="Accepted, like `add_special_tokens`.")
    parse_special: bool = Field(True, description="Accepted, like `add_special_tokens`.")

    @property
    def text(self) -> str:
        return self.prompt if self.prompt is not None else self.content or ""

    @model_validator(mode="after")
    def _check_one_text(self) -> Self:
        if (self.prompt is None) == (self.content is None):
            raise body_error("exactly one of prompt and content must be given", "prompt")
        return self


class DetokenizeBody(Body):
    """Token ids to decode."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=VOCAB_SIZE)]], Field(fail_fast=True)] = Field(
        description="The token ids."
    )


@ROUTES.add("POST", "/tokenize", "Token ids of a text.", answer=Tokenized, example={"prompt": "Hello world!"})
async def tokenize(context: Context, body: TokenizeBody) -> HandlerResponse:
    """Return the token ids of a text, at most those of a prompt."""
    return await offload_if_large(len(body.text), _tokenized, context, body)


def _tokenized(context: Context, body: TokenizeBody) -> HttpResponse:
    field, text = "content" if body.prompt is None else "prompt", body.text
    if text in ("", END_NAME):
        ids = [END_OF_TEXT] if text else []
    else:
        ids = encode(context.tokenizer, text, field, context.config)
    tokens = [_piece(context.tokenizer, token) for token in ids] if body.with_pieces else ids
    return json_response({"tokens": tokens, "count": len(ids), "max_model_len": context.config.max_prompt_tokens})


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """Return a token with its text, or its bytes if not UTF-8."""
    piece = tokenizer.decode_bytes([token])
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(piece)}


@ROUTES.add("POST", "/detokenize", "The text of token ids.", answer=Detokenized, example={"tokens": [33155, 40213, 34]})
async def detokenize(context: Context, body: DetokenizeBody) -> HandlerResponse:
    """Return the text of token ids. Invalid UTF-8 is shown as U+FFFD."""
    data = await offload_if_large(len(body.tokens), context.tokenizer.decode_bytes, body.tokens)
    text = data.decode("utf-8", "replace")
    return json_response({"prompt": text, "content": text})


@ROUTES.add("GET", "/tokenizer_info", "About the tokenizer.", answer=TokenizerInfo)
async def tokenizer_info(context: Context) -> HandlerResponse:
    """Return the tokenizer's class, vocabulary size and special tokens."""
    info = {"tokenizer_class": "RWKVWorldTokenizer", "vocab_size": VOCAB_SIZE}
    return json_response({**info, "bos_token": END_NAME, "eos_token": END_NAME})


ROUTES += [one.at(f"/openai{one.path}", error_format=OPENAI_ERRORS) for one in ROUTES[-3:]]
"""Clients of `/openai/v1/completions` expect the tokenizer's routes there."""
