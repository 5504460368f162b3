"""Request bodies of Ollama's API, and their conversion to OpenAI's format."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from routes.openai.request import MAX_TOP_LOGPROBS, ChatBody, RawBody, TokenIds
from routes.openai.tools import ChatTools
from routes.request import prompts
from routes.request.bodies import Body, StopText
from routes.request.fields import Fields, Ignored, IgnoredValue, Repeated, Unsupported, rename_fields
from routes.request.json_body import validate
from routes.request.sampler_fields import SamplerFields

_FIELDS = {"num_predict": "max_tokens", "top_k": "top_k", "top_p": "top_p", "temperature": "temperature"}
_FIELDS |= {name: name for name in ("seed", "stop", "presence_penalty", "frequency_penalty")}
"""Options that become fields of the OpenAI routes."""
_NOT_SAMPLED = "Accepted and ignored: the samplers do not have it."
_BY_FLAGS: Any = Field(None, description="Accepted and not read: flags of the service decide it.")


class OllamaOptions(SamplerFields):
    """Decode parameters. The defaults are those of `/openai/v1/chat/completions`, or of the model."""

    num_predict: int | None = Field(
        None, ge=-2, description="Maximum number of generated tokens. Below 1: the default, 8192."
    )
    temperature: float | None = Field(None, ge=0, le=100, description="Sampling temperature. 0 is greedy.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: off.")
    top_p: float | None = Field(None, ge=0, le=1, description="1 turns it off.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed gives the same answer.")
    stop: StopText | Annotated[list[StopText], Field(max_length=64, fail_fast=True)] | None = Field(
        None, description="Texts that end the answer."
    )
    presence_penalty: float | None = Field(None, ge=-100, le=100, description="Presence penalty.")
    frequency_penalty: float | None = Field(None, ge=-100, le=100, description="Frequency penalty.")
    tfs_z: Annotated[float | None, Ignored((1,))] = Field(None, description=_NOT_SAMPLED)
    penalize_newline: IgnoredValue = Field(None, description=_NOT_SAMPLED)
    num_ctx: Any = _BY_FLAGS
    num_batch: Any = _BY_FLAGS
    num_gpu: Any = _BY_FLAGS
    num_keep: Any = _BY_FLAGS
    num_thread: Any = _BY_FLAGS
    main_gpu: Any = _BY_FLAGS
    low_vram: Any = _BY_FLAGS
    numa: Any = _BY_FLAGS
    use_mmap: Any = _BY_FLAGS
    use_mlock: Any = _BY_FLAGS

    @property
    def fields(self) -> dict[str, Any]:
        """The given options as fields of the OpenAI routes."""
        given = {field: getattr(self, name) for name, field in _FIELDS.items()}
        if self.num_predict is not None and self.num_predict < 1:
            del given["max_tokens"]
        given = {field: value for field, value in given.items() if value is not None}
        return given | self.given_samplers(repeat_last_n=64)


class EarlierFunction(Fields):
    """The function of a call."""

    name: str = Field(max_length=128)
    arguments: dict[str, Any] = Field({})


class EarlierCall(Fields):
    """A tool call of an earlier answer."""

    id: Repeated = None
    type: Repeated = None
    function: EarlierFunction


class OllamaMessage(Fields):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: Repeated = Field(None, description="Accepted and not read: earlier answers have it.")
    images: Unsupported = Field(None, description="Not supported; refused.")
    tool_calls: Annotated[list[EarlierCall], Field(max_length=128, fail_fast=True)] = Field([])
    tool_name: Repeated = Field(None, description="Accepted and not read: results follow their calls in order.")
    tool_call_id: Repeated = Field(None, description="Accepted and not read, like `tool_name`.")

    @property
    def openai(self) -> dict[str, Any]:
        """The message in OpenAI's format."""
        calls = [
            {"function": {"name": one.function.name, "arguments": json.dumps(one.function.arguments)}}
            for one in self.tool_calls
        ]
        return {"role": self.role, "content": self.content, **({"tool_calls": calls} if calls else {})}


class OllamaChat(ChatBody):
    """A conversation from Ollama's API."""

    schema_field: ClassVar[str] = "format"


class OllamaRaw(RawBody):
    """A raw prompt from Ollama's API."""

    schema_field: ClassVar[str] = "format"


RENAMED = {"max_tokens": "options.num_predict", "response_format": "format", "top_logprobs": "top_logprobs"}
"""Fields of the OpenAI routes in errors -> the request's."""


class OllamaBody(Body):
    """Fields of both routes that generate."""

    model: str = Field("rwkv7", max_length=256, description="A name of `/api/tags`. Others are 404.")
    stream: bool = Field(True, description="Answer with one JSON object per line. false: one object.")
    format: Literal["", "json"] | dict[str, Any] = Field(
        "",
        description="json: a JSON object. A JSON Schema: JSON that is valid under it; keywords that cannot be enforced "
        "are left out.",
    )
    options: OllamaOptions = Field(OllamaOptions.model_validate({}), description="Decode parameters.")
    think: bool | Literal["low", "medium", "high"] = Field(
        False, description="Let the model think. The reasoning is returned as `thinking`."
    )
    keep_alive: float | str | None = Field(
        None, description="Accepted: the model stays loaded. 0 without a prompt is answered as an unloading."
    )
    logprobs: bool = Field(False, description="Return the log-probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Number of most probable tokens to return per token."
    )

    @property
    def _shared_fields(self) -> dict[str, Any]:
        """The fields that both kinds of OpenAI's bodies have."""
        fields = {"model": self.model, "stream": self.stream, **self.options.fields}
        if self.format:
            schema = {"name": "format", "schema": self.format}
            is_schema = isinstance(self.format, dict)
            kind = {"type": "json_schema", "json_schema": schema} if is_schema else {"type": "json_object"}
            fields["response_format"] = kind
        return fields

    def _chat(self, messages: list[dict[str, Any]], tools: list[Any]) -> OllamaChat:
        think = {"enable_think": self.think} if isinstance(self.think, bool) else {"reasoning_effort": self.think}
        logprobs = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs if self.logprobs else None}
        with rename_fields(**RENAMED):
            return validate(
                OllamaChat, {**self._shared_fields, **think, **logprobs, "messages": messages, "tools": tools}
            )


class OllamaChatBody(OllamaBody):
    """Body of `/api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = Field(
        [], description='[{"role": "user", "content": "…"}]. Empty: only load the model.'
    )
    tools: ChatTools = Field([], description="Functions that the answer may call. With them, penalties default to 0.")

    def chat(self) -> OllamaChat:
        """Return the conversation in OpenAI's format. Raises ServiceError."""
        return self._chat([one.openai for one in self.messages], [one.model_dump() for one in self.tools])


class OllamaGenerateBody(OllamaBody):
    """Body of `/api/generate`."""

    prompt: str = Field("", description="The user's message, or the raw prompt. Empty: only load the model.")
    suffix: str | None = Field(None, description="Fill in the text between the prompt and this text.")
    system: str = Field("", description="System message.")
    raw: bool = Field(False, description="Continue the prompt as it is.")
    context: TokenIds = Field([], description="`context` of an earlier answer, which the prompt follows.")
    template: Annotated[str, Ignored()] = Field(
        "", description="Accepted and ignored: the prompt format is the model's. See `raw`."
    )
    images: Unsupported = Field(None, description="Not supported; refused.")

    def request(self) -> OllamaChat | OllamaRaw:
        """Return the request in OpenAI's format. Raises ServiceError."""
        if not (self.raw or self.suffix is not None):
            system = [{"role": "system", "content": self.system}] if self.system else []
            return self._chat([*system, {"role": "user", "content": self.prompt}], [])
        text = self.prompt if self.suffix is None else prompts.fill_in_the_middle(self.prompt, self.suffix)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        with rename_fields(**RENAMED):
            return validate(OllamaRaw, {**self._shared_fields, "prompt": text, "logprobs": logprobs})
