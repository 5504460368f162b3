"""The body of `/openai/v1/responses`: the same conversation in the words of OpenAI's newer route."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from routes.openai.request import MAX_TOP_LOGPROBS, ConversationBody
from routes.openai.response_format import ResponseFormat
from routes.openai.tools import MAX_TOOLS, FunctionFields, Mode, Named, tool_set
from routes.request import prompts
from routes.request.bodies import Message
from routes.request.constraints import THINK_END
from routes.request.fields import Fields
from routes.request.tool_set import ToolSet
from routes.request.unsupported_fields import UNSUPPORTED_VERBOSITY, Unsupported
from sampling.grammar.constraint import Constraint

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"


class TextItemPart(Fields):
    """A part of an item's content; only text is understood."""

    type: Literal["input_text", "output_text", "text"]
    text: str


ItemText = str | Annotated[list[TextItemPart], Field(fail_fast=True)]


class MessageItem(Fields):
    """Something said."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemText


class CallItem(Fields):
    """A call that an answer has made."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: str = Field(max_length=64)
    arguments: str = Field(description="JSON as text.")


class ResultItem(Fields):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: ItemText


class ReasoningItem(Fields):
    """A thought of an earlier answer: taken, and not read again."""

    type: Literal["reasoning"]


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


class TypedFields(Fields):
    """What a tool is."""

    type: Literal["function"]


class ResponsesTool(FunctionFields, TypedFields):
    """A function that may be called."""


class NamedFunction(Named):
    """The one function to call."""

    type: Literal["function"]


class AllowedFunctions(Fields):
    """A choice of several."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class TextFormat(Fields):
    """What the answer's text is."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field({}, alias="schema", description="A JSON schema.")
    strict: bool = False

    @property
    def chat_format(self) -> ResponseFormat:
        """The same in the words of the chat route."""
        schema = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        named = {"json_schema": schema} if self.type == "json_schema" else {}
        return ResponseFormat.model_validate({"type": self.type, **named})


class TextOptions(Fields):
    """`text` of a response."""

    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))
    verbosity: Annotated[Any, UNSUPPORTED_VERBOSITY] = Field(None, description="Refused, but for medium.")


class Reasoning(Fields):
    """`reasoning` of a response."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesBody(ConversationBody):
    """`/responses`."""

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)] = Field(
        description="What the user says, or the conversation's items: messages, calls of functions and their results."
    )
    instructions: str = Field("", description="What the system says first.")
    n: int = Field(1, ge=1, le=1, description="Always one.")
    max_output_tokens: int | None = Field(None, ge=1, description="Name of max_tokens here; it wins.")
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        [], description="Functions that the answer may call; with them, penalties are 0 unless given."
    )
    tool_choice: Mode | NamedFunction | AllowedFunctions = Field(
        "auto", description="Whether it does: none, auto, required, one by name, or `allowed_tools`."
    )
    parallel_tool_calls: bool = Field(True, description="Whether one answer may have several calls.")
    text: TextOptions = Field(
        TextOptions.model_validate({}), description='{"format": …}: text, JSON, or JSON under a schema.'
    )
    reasoning: Reasoning = Field(Reasoning(), description='{"effort": …}: how long it thinks; none unless asked.')
    enable_think: bool = Field(False, description="Let the model think, where no effort is given.")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        [], description="Log-probabilities of the text's tokens; thoughts are told in plain text anyway."
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="And of so many likeliest tokens.")
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] = Field({}, description="Repeated.")
    store: bool = Field(False, description="Accepted; nothing is stored, and the answer says so.")
    previous_response_id: Unsupported = Field(
        None, description="Refused: responses are not kept. Send the conversation's items, or use session_id."
    )
    conversation_: Unsupported = Field(None, alias="conversation", description="Refused; use session_id.")
    background: Unsupported = Field(None, description="Not supported; refused.")
    prompt: Unsupported = Field(None, description="Not supported; refused.")

    @property
    def conversation(self) -> list[Message]:
        """See ConversationBody."""
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
        """See ConversationBody."""
        given = self.reasoning.effort
        return prompts.think_mode(self.enable_think) if given is None else prompts.EFFORTS[given]

    @property
    def tool_set(self) -> ToolSet | None:
        """See ConversationBody."""
        functions = [tool.function(f"tools[{at}].parameters") for at, tool in enumerate(self.tools)]
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, NamedFunction):
            return tool_set(functions, "required", [choice.name], parallel)
        if isinstance(choice, AllowedFunctions):
            return tool_set(functions, choice.mode, [tool.name for tool in choice.tools], parallel)
        return tool_set(functions, choice, None, parallel)

    @property
    def format_constraint(self) -> Constraint | None:
        """See ConversationBody."""
        format_constraint = self.text.format.chat_format.constraint(THINK_END if self.thinks else "")
        return (
            None
            if format_constraint is None
            else msgspec.structs.replace(format_constraint, field="text.format.schema")
        )

    @property
    def num_logprobs(self) -> int | None:
        """See OpenAIBody."""
        return (self.top_logprobs or 0) if LOGPROBS in self.include else None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise PydanticCustomError(
                "logprobs", "top_logprobs needs {name} in include", {"name": LOGPROBS, "field": "top_logprobs"}
            )
        if LOGPROBS in self.include and (self.thinks or self.tool_set is not None):
            raise PydanticCustomError(
                "logprobs",
                "log-probabilities cannot be told beside thoughts or tools: they are not of the text alone",
                {"field": "include"},
            )
        if self.max_output_tokens is not None:
            self.max_tokens = self.max_output_tokens
        return self


def _append_item(messages: list[dict[str, Any]], item: MessageItem | CallItem | ResultItem | ReasoningItem) -> None:
    """Put an item behind what was said; calls belong to the assistant's message before them."""
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
