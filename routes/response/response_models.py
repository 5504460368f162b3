"""Models of the routes' answers.

They are for the OpenAPI document and the reference only. Answers are not built from these models.
test/routes/test_routes_answers.py compares real answers with them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rwkv_batch.request import FinishReason

END = "Why the row ended. `length`: max_tokens was reached."


class Error(BaseModel):
    """An error. A stream has it as one event."""

    error: str = Field(description="Names the field, the value, what is allowed and what to do.")
    field: str = Field("", description="The wrong field, if the error has one.")
    given: Any = Field(None, description="The refused value.")
    index: int = Field(0, description="In a stream: the row that failed, if only one did.")
    request_id: str = Field("", description="The id in the header X-Request-Id.")
    status: str = Field("", description="The status in one word, for routes whose answers have it.")
    message: str = Field("", description="Only of /state/delete: same as `error`.")


class OpenAIErrorBody(BaseModel):
    """OpenAI's error object."""

    message: str = Field(description="Names the field, the value, what is allowed and what to do.")
    type: str = Field(description="OpenAI's SDKs choose their exception class by it.")
    param: str | None = Field(description="The wrong field.")
    code: str | None
    request_id: str = Field("", description="The id in the header X-Request-Id.")


class OpenAIError(BaseModel):
    """An error in OpenAI's format. A stream has it as one event."""

    error: OpenAIErrorBody
    index: int = Field(0, description="In a stream: the row that failed, if only one did.")


class AnthropicErrorBody(BaseModel):
    """Anthropic's error object."""

    type: str = Field(description="Anthropic's SDKs choose their exception class by the status.")
    message: str = Field(description="Names the field, the value, what is allowed and what to do.")


class AnthropicError(BaseModel):
    """An error in Anthropic's format. A stream has it as an event."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str = Field("", description="The id in the header Request-Id.")
    index: int = Field(0, description="In a stream: always 0.")


class FieldWarning(BaseModel):
    """A field of the request that changes nothing."""

    field: str = Field(description="Where it is, like `messages[0].nmae`. Empty if the list was cut.")
    message: str


class WithWarnings(BaseModel):
    """Warnings about the request. The OpenAPI document adds them to each answer to a body or query."""

    warnings: list[FieldWarning] = Field(
        [],
        description="Unknown and ignored fields, unknown languages and suspicious translations. "
        "In a stream, in the first event.",
    )


class CachedTokens(BaseModel):
    """Details of the prompts' tokens."""

    cached_tokens: int = Field(description="Tokens from a session or a cached prefix. They were not computed.")


class Usage(BaseModel):
    """Tokens of all rows. The prompt of `n` answers counts once."""

    prompt_tokens: int
    completion_tokens: int = Field(description="Generated tokens, including the stop token.")
    total_tokens: int
    prompt_tokens_details: CachedTokens


class AnswerMessage(BaseModel):
    """A row's text."""

    role: Literal["assistant"]
    content: str


class BatchChoice(BaseModel):
    """One row."""

    index: int = Field(description="Index of the prompt.")
    message: AnswerMessage
    finish_reason: FinishReason = Field(description=END)
    error: str = Field("", description="Why this row failed, if others did not.")
    field: str = Field("", description="The wrong field, if the error has one.")
    given: Any = Field(None, description="The refused value.")


class BatchAnswer(BaseModel):
    """The batch format: all rows, in the order of the prompts."""

    id: str = Field(description="`rwkv7-batch`. For a conversation: `chatcmpl-` and 32 hexadecimal digits.")
    object: Literal["chat.completion", "FIM.completion"]
    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="As in the request.")
    choices: list[BatchChoice]
    usage: Usage


class Delta(BaseModel):
    """New text."""

    content: str = Field("", description="Contains only whole characters.")


class BatchChunkChoice(BaseModel):
    """An update of one row: text or its end."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = Field(None, description=f"{END} Only in the row's last chunk.")


class BatchChunk(WithWarnings):
    """An event of a stream. It may contain several rows, or several updates of a row."""

    object: Literal["chat.completion.chunk", "FIM.completion.chunk"]
    choices: list[BatchChunkChoice]
    id: str | None = Field(None, description="Only for conversations, like the next two.")
    created: int | None = None
    model: str | None = None
    usage: Usage | None = Field(None, description="In the last chunk, with stream_options.include_usage.")


class DialogueAnswer(BatchAnswer):
    """The batch format, and the dialogue that the turn created."""

    session_id: str
    dialogue_idx: int | None = Field(description="The new dialogue. null if the turn failed.")


class DialogueMade(BaseModel):
    """The last event of a branching turn: the new dialogue."""

    object: Literal["multi_state.dialogue_idx"]
    session_id: str = Field(description="The dialogue's name in the list of sessions.")
    dialogue_idx: int


class BigBatchStatus(BaseModel):
    """Requests that run or wait."""

    generating: bool
    requests: int = Field(description="Requests of this route that run or wait.")
    running_rows: int | None = Field(None, description="Rows of all routes. Only with admin rights, like the next.")
    waiting_rows: int | None = None


class Cleaned(BaseModel):
    """The cancelled requests."""

    status: Literal["success"]
    cancelled: int
    message: str


class Translation(BaseModel):
    """One translated text."""

    detected_source_lang: str = Field(description="ISO code. A given source language is repeated.")
    detected_confidence: float = Field(0.0, description="Probability of the detected language, with `auto`.")
    text: str
    source: str = Field(
        "", description="memory, cache, model, or none for a text that stays, if the request has `memory` or `cache`."
    )
    score: float = Field(0.0, description="Mean log-probability per token, with `scores`.")
    confidence: float = Field(0.0, description="The same of the text after its translation, with `scores`.")
    review: bool = Field(
        False, description="Whether the confidence is one of the ten lowest, at most a third, with `scores`."
    )
    alternatives: list[dict[str, Any]] = Field([], description="`text` and `score` of others, with `alternatives`.")


class StreamedTranslation(WithWarnings):
    """One translated text of a stream. The last event may have only warnings."""

    index: int = Field(0, description="Number of the text in `text_list`.")
    detected_source_lang: str = Field("", description="ISO code. A given source language is repeated.")
    detected_confidence: float = Field(0.0, description="Probability of the detected language, with `auto`.")
    text: str = ""
    source: str = Field(
        "", description="memory, cache, model, or none for a text that stays, if the request has `memory` or `cache`."
    )


class DeepLError(BaseModel):
    """An error as DeepL's clients expect it."""

    message: str


class Translations(BaseModel):
    """The translations, in the order of the texts."""

    translations: list[Translation]


class KeptSession(BaseModel):
    """A session, or one dialogue of it."""

    session_id: str = Field(
        description="The id, and for a dialogue `:` and its number. Others' ids begin with `owner=`."
    )
    dialogue_idx: int | None = Field(description="Number of the dialogue. null for a session without branches.")
    owner: str | None = Field(description="Name of the API key that the session belongs to. null: it is shared.")
    cache_level: Literal["L1 (VRAM)", "L2 (RAM)", "Database (Disk)"]
    last_updated: str = Field(description="Local time of the last turn.")
    timestamp: float = Field(description="Unix time of the last turn in seconds.")


class SessionList(BaseModel):
    """Number of sessions per storage tier, and the newest sessions. A session counts in its fastest tier."""

    status: Literal["success"]
    total_sessions: int
    l1_cache_count: int
    l2_cache_count: int
    database_count: int
    sessions: list[KeptSession]


class Deleted(BaseModel):
    """The deleted sessions."""

    status: Literal["success"]
    message: str
    deleted: int = Field(description="Number of deleted sessions and dialogues.")


class Imported(BaseModel):
    """The imported session."""

    status: Literal["success"]
    session_id: str
    num_tokens: int = Field(description="Tokens of the session's history.")


class CandidateScore(BaseModel):
    """The score of one candidate."""

    index: int = Field(description="Index of the candidate.")
    logprob: float = Field(description="Log-probability of the candidate after the prompt: the sum over its tokens.")
    tokens: int
    is_greedy: bool = Field(description="Whether each token of the candidate is the most probable one.")
    token_logprobs: list[float] = Field([], description="With `logprobs`. The minimum is -9999.")


class ContentScores(BaseModel):
    """The scores of one prompt's candidates."""

    index: int = Field(description="Index of the prompt in contents.")
    candidates: list[CandidateScore]


class Scores(BaseModel):
    """The scores of all candidates."""

    id: str
    object: Literal["score"]
    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="As in the request.")
    scores: list[ContentScores]
    usage: Usage = Field(description="Each prompt counts once.")


class TokenPiece(BaseModel):
    """A token and its text."""

    id: int
    piece: str | list[int] = Field(description="Its bytes if they are no text.")


class Tokenized(BaseModel):
    """The tokens of a text."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int = Field(description="Maximum number of tokens per prompt.")


class Detokenized(BaseModel):
    """The text of token ids."""

    prompt: str
    content: str = Field(description="Same as prompt, under llama.cpp's name.")


class Prompt(BaseModel):
    """The prompt of a conversation."""

    prompt: str


class Version(BaseModel):
    """The version of the service."""

    version: str


class TokenizerInfo(BaseModel):
    """The World tokenizer."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str = Field(description="Name of token 0, which marks both beginning and end.")
    eos_token: str


class RwkvInferDone(BaseModel):
    """The request succeeded."""

    status: Literal["success"]


class RwkvInferHealth(BaseModel):
    """The service is alive."""

    message: Literal["ok"]
    status_code: Literal[200]


class Health(BaseModel):
    """Health of the service."""

    status: str
    lost: list[str] = Field([], description="Engines that take no work, if others do.")


class TokenCount(BaseModel):
    """Number of tokens of all texts."""

    tokens: int


class Status(BaseModel):
    """Status of the service. Fields not listed here may change between versions.

    Without admin rights: model, devices, samplers, kernels and other fields about the model.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    devices: list[str]
    samplers: dict[str, Any] = Field(description="`used` samplers by name, and reasons for `refused` ones.")
    kernels: dict[str, Any] = Field(description="`used` kernels, and reasons for `refused` ones.")
    running_rows: int | None = None
    waiting_rows: int | None = None
    free_slots: int | None = None
    pool: dict[str, Any] | None = Field(None, description="Sizes of the tiers, counters and disk errors.")
    generated_tokens_per_s: float | None = Field(None, description="Mean of the last ten seconds.")
    computed_tokens_per_s: float | None = Field(
        None, description="Tokens computed by the model, prompts included. Mean of the last ten seconds."
    )
    drawn_tokens_per_s: float | None = Field(None, description="Older name of generated_tokens_per_s.")
    read_tokens_per_s: float | None = Field(None, description="Older name of computed_tokens_per_s.")
    models: list[dict[str, Any]] | None = Field(
        None,
        description="Models loaded at run time with their status. Ready ones have dtype, wkv_state, kernels "
        "and devices.",
    )
    keys: list[dict[str, Any]] = Field([], description="The API keys: name, rights and limits, null for none.")
    engines: list[dict[str, Any]] = Field(
        [], description="The engines of the service's own model: status, process, devices, load and sessions."
    )
    prompt_backlog_s: float = Field(
        0.0, description="Estimated seconds to compute the waiting prompts, for the engine with the longest wait."
    )
    processes: dict[str, Any] | None = None
