"""The body of `/openai/v1/responses`: a conversation in the format of OpenAI's newer route."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from routes.openai.request import MAX_TOP_LOGPROBS, ConversationBody
from routes.openai.response_format import ResponseFormat
from routes.openai.tools import MAX_TOOLS, FunctionFields, FunctionName, Mode, build_tool_set
from routes.request import fields, prompts
from routes.request.messages import Message
from routes.request.tools import ToolSet
from sampling.grammar.constraint import THINK_END, Constraint

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"


class TextItemPart(fields.Fields):
    """A part of an item's content. Only text is supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: fields.Repeated = Field(None, description="Accepted and not read: earlier answers have it.")
    logprobs: fields.Repeated = Field(None, description="Accepted and not read: earlier answers have it.")


ItemText = str | Annotated[list[TextItemPart], Field(fail_fast=True)]


class Item(fields.Fields):
    """An item of a conversation."""

    id: fields.Repeated = Field(default=None, description="Accepted and not read: items of earlier answers have it.")
    status: fields.Repeated = Field(
        default=None, description="Accepted and not read: items of earlier answers have it."
    )


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemText


class CallItem(Item):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: str = Field(max_length=128)
    arguments: str = Field(description="JSON as text.")


class ResultItem(Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: ItemText


class ReasoningItem(Item):
    """Reasoning of an earlier answer. It is accepted and ignored."""

    type: Literal["reasoning"]
    summary: fields.Repeated = Field(None, description="Accepted and not read.")
    content: fields.Repeated = Field(None, description="Accepted and not read.")
    encrypted_content: fields.Repeated = Field(None, description="Accepted and not read.")


def _item_type(item: Any) -> str | None:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item",
        custom_error_message="must be of type message, function_call, function_call_output or reasoning",
    ),
]


class TypedFields(fields.Fields):
    """Type of a tool."""

    type: Literal["function"]


class ResponsesTool(FunctionFields, TypedFields):
    """A function that the answer may call."""


class NamedFunction(FunctionName):
    """The one function to call."""

    type: Literal["function"]


class AllowedFunctions(fields.Fields):
    """A choice of several functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class TextFormat(fields.Fields):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: Annotated[str, fields.Ignored()] = ""
    schema_: dict[str, Any] = Field({}, alias="schema", description="A JSON Schema.")
    strict: bool = False

    @property
    def chat_format(self) -> ResponseFormat:
        """Return the format in the form of the chat route."""
        schema = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        named = {"json_schema": schema} if self.type == "json_schema" else {}
        return ResponseFormat.model_validate({"type": self.type, **named})


class TextOptions(fields.Fields):
    """`text` of a response."""

    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))
    verbosity: Annotated[Any, fields.UNSUPPORTED_VERBOSITY] = Field(None, description="Refused, except for medium.")


class Reasoning(fields.Fields):
    """`reasoning` of a response."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: fields.IgnoredValue = Field(
        default=None, description="Accepted and ignored: the reasoning is returned whole."
    )
    generate_summary: fields.IgnoredValue = Field(default=None, description="Accepted and ignored.")


class ResponsesBody(ConversationBody):
    """Body of `/responses`."""

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)] = Field(
        description="The user's message, or the conversation's items: messages, function calls and their results."
    )
    instructions: str = Field("", description="System message at the beginning.")
    n: int = Field(1, ge=1, le=1, description="Always one.")
    max_output_tokens: int | None = Field(
        None, ge=1, description="Name of max_tokens on this route. It takes precedence."
    )
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        [], description="Functions that the answer may call. With them, penalties default to 0."
    )
    tool_choice: Mode | NamedFunction | AllowedFunctions = Field(
        "auto", description="none, auto, required, one function by name, or `allowed_tools`."
    )
    parallel_tool_calls: bool = Field(True, description="Whether one answer may have several calls.")
    text: TextOptions = Field(
        TextOptions.model_validate({}), description='{"format": …}: text, JSON, or JSON with a schema.'
    )
    reasoning: Reasoning = Field(
        Reasoning(), description='{"effort": …}: how long the model thinks. Default: not at all.'
    )
    enable_think: bool = Field(False, description="Let the model think if no effort is given.")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        [],
        description="message.output_text.logprobs returns log-probabilities. Reasoning is always returned as "
        "plain text.",
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Number of most probable tokens to return per token."
    )
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] = Field(
        {}, description="Repeated in the response."
    )
    truncation: Annotated[Any, fields.Ignored(("disabled",))] = Field(None, description="Accepted and ignored.")
    max_tool_calls: fields.IgnoredValue = Field(None, description="Accepted and ignored: it limits OpenAI's own tools.")
    context_management: fields.IgnoredValue = Field(None, description="Accepted and ignored.")
    access_programs: fields.IgnoredValue = Field(None, description="Accepted and ignored.")
    image: fields.Unsupported = Field(None, description="Not supported; refused.")
    previous_response_id: fields.Unsupported = Field(
        None, description="Refused, because responses are not stored. Send the conversation's items, or use session_id."
    )
    conversation_: fields.Unsupported = Field(None, alias="conversation", description="Refused. Use session_id.")
    background: fields.Unsupported = Field(None, description="Not supported; refused.")
    prompt: fields.Unsupported = Field(None, description="Not supported; refused.")

    @property
    def conversation(self) -> list[Message]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self._items:
            _append_item(messages, item)
        return [Message.model_validate(message) for message in messages]

    @property
    def _items(self) -> list[MessageItem | CallItem | ResultItem | ReasoningItem]:
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def effort(self) -> prompts.Think:
        given = self.reasoning.effort
        return prompts.think_mode(self.enable_think) if given is None else prompts.EFFORTS[given]

    @property
    def tool_set(self) -> ToolSet | None:
        functions = [tool.function(f"tools[{i}].parameters") for i, tool in enumerate(self.tools)]
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, NamedFunction):
            return build_tool_set(functions, "required", [choice.name], parallel)
        if isinstance(choice, AllowedFunctions):
            return build_tool_set(functions, choice.mode, [tool.name for tool in choice.tools], parallel)
        return build_tool_set(functions, choice, None, parallel)

    @property
    def format_constraint(self) -> Constraint | None:
        return self.text.format.chat_format.constraint(THINK_END if self.thinks else "", "text.format.schema")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in self.include else None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise fields.body_error(f"top_logprobs needs {LOGPROBS} in include", "top_logprobs")
        if LOGPROBS in self.include and (self.thinks or self.tool_set is not None):
            message = (
                "log-probabilities are not available with reasoning or tools; leave out include, or reasoning and tools"
            )
            raise fields.body_error(message, "include")
        if self.max_output_tokens is not None:
            self.max_tokens = self.max_output_tokens
        return self


def _append_item(messages: list[dict[str, Any]], item: MessageItem | CallItem | ResultItem | ReasoningItem) -> None:
    """Append an item as a message. A call joins the preceding message of the assistant."""
    match item:
        case MessageItem():
            messages.append({"role": item.role, "content": _item_text(item.content)})
        case ResultItem():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _item_text(item.output)})
        case CallItem():
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            messages[-1].setdefault("tool_calls", []).append(call)


def _item_text(content: str | list[TextItemPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
