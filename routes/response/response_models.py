"""What the routes answer, as models: for the OpenAPI document and the reference alone, answers are written without.

test/routes/test_routes_answers.py holds real answers against them, field by field.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rwkv_batch.request import FinishReason

END = "Why it ended; `length` is max_tokens."


class Error(BaseModel):
    """A failure; in a stream, one event of it."""

    error: str = Field(description="Names the field, the limit, the value and the remedy.")
    field: str = Field("", description="The field at fault, where there is one.")
    given: Any = Field(None, description="The value that was refused.")
    index: int = Field(0, description="In a stream: the row that failed, where it was one alone.")
    request_id: str = Field("", description="As in the header X-Request-Id.")
    status: str = Field("", description="In one word, of routes whose good answers have it too.")
    message: str = Field("", description="Of /state/delete: the same as `error`.")


class OpenAIErrorBody(BaseModel):
    """What went wrong."""

    message: str = Field(description="Names the field, the limit, the value and the remedy.")
    type: str = Field(description="What OpenAI's SDKs make their exceptions of.")
    param: str | None = Field(description="The field at fault.")
    code: str | None
    request_id: str = Field("", description="As in the header X-Request-Id.")


class OpenAIError(BaseModel):
    """A failure as OpenAI's SDKs read it; in a stream, one event of it."""

    error: OpenAIErrorBody
    index: int = Field(0, description="In a stream: the row that failed, where it was one alone.")


class CachedTokens(BaseModel):
    """How the prompts were read."""

    cached_tokens: int = Field(description="Of a session or a cached prefix: not computed.")


class Usage(BaseModel):
    """Tokens of all rows; `n` answers to one prompt read it once."""

    prompt_tokens: int
    completion_tokens: int = Field(description="Drawn, the stop token among them.")
    total_tokens: int
    prompt_tokens_details: CachedTokens


class AnswerMessage(BaseModel):
    """A row's text."""

    role: Literal["assistant"]
    content: str


class BatchChoice(BaseModel):
    """One row."""

    index: int = Field(description="Its place among the prompts.")
    message: AnswerMessage
    finish_reason: FinishReason = Field(description=END)
    error: str = Field("", description="Why this row failed, while others did not.")
    field: str = Field("", description="The field at fault, where there is one.")
    given: Any = Field(None, description="The value that was refused.")


class BatchAnswer(BaseModel):
    """The family's batch form: every row, in the order of the prompts."""

    id: str = Field(description="`rwkv7-batch`; of a conversation `chatcmpl-` and 32 hexadecimal digits.")
    object: Literal["chat.completion", "FIM.completion"]
    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="As asked for.")
    choices: list[BatchChoice]
    usage: Usage


class Delta(BaseModel):
    """New text."""

    content: str = Field("", description="Never cut inside a character.")


class BatchChunkChoice(BaseModel):
    """Update of one row: text, or its end."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = Field(None, description=f"{END} Only there at the end.")


class BatchChunk(BaseModel):
    """An event of a stream; one event may hold parts of many rows, or of one row twice."""

    object: Literal["chat.completion.chunk", "FIM.completion.chunk"]
    choices: list[BatchChunkChoice]
    id: str | None = Field(None, description="Only of conversations, as the next two.")
    created: int | None = None
    model: str | None = None
    usage: Usage | None = Field(None, description="In the last chunk, with stream_options.include_usage.")


class DialogueAnswer(BatchAnswer):
    """The batch form and the dialogue that the turn has made."""

    session_id: str
    dialogue_idx: int | None = Field(description="The new dialogue; null if the turn failed.")


class DialogueMade(BaseModel):
    """The last event of a branching turn: the dialogue that it has made."""

    object: Literal["multi_state.dialogue_idx"]
    session_id: str = Field(description="The dialogue's name in the list of sessions.")
    dialogue_idx: int


class BigBatchStatus(BaseModel):
    """What runs."""

    generating: bool
    requests: int = Field(description="Of this route, running or waiting.")
    running_rows: int = Field(description="Of all routes.")
    waiting_rows: int


class Cleaned(BaseModel):
    """What was cancelled."""

    status: Literal["success"]
    cancelled: int
    message: str


class Translation(BaseModel):
    """One text."""

    detected_source_lang: str = Field(description="ISO code; as given, where it was.")
    text: str


class Translations(BaseModel):
    """Every text in its place."""

    translations: list[Translation]


class KeptSession(BaseModel):
    """A session, or one dialogue of it."""

    session_id: str
    cache_level: Literal["L1 (VRAM)", "L2 (RAM)", "Database (Disk)"]
    last_updated: str = Field(description="Local time of the last turn.")
    timestamp: float = Field(description="The same in Unix seconds.")


class SessionList(BaseModel):
    """How many sessions there are by the fastest tier that holds them, and some of them, newest first."""

    status: Literal["success"]
    total_sessions: int
    l1_cache_count: int
    l2_cache_count: int
    database_count: int
    sessions: list[KeptSession]


class Deleted(BaseModel):
    """What was deleted."""

    status: Literal["success"]
    message: str
    deleted: int = Field(description="Sessions and dialogues.")


class Imported(BaseModel):
    """The new session."""

    status: Literal["success"]
    session_id: str
    num_tokens: int = Field(description="Tokens that it stands for.")


class CandidateScore(BaseModel):
    """One candidate."""

    index: int = Field(description="Its place among the prompt's candidates.")
    logprob: float = Field(description="Of the whole candidate behind the prompt: the sum over its tokens.")
    tokens: int
    is_greedy: bool = Field(description="Whether each token is the likeliest where it stands.")
    token_logprobs: list[float] = Field([], description="With `logprobs`; at least -9999 each.")


class ContentScores(BaseModel):
    """One prompt's candidates."""

    index: int = Field(description="The prompt's place among the contents.")
    candidates: list[CandidateScore]


class Scores(BaseModel):
    """Every candidate behind every prompt."""

    id: str
    object: Literal["score"]
    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="As asked for.")
    scores: list[ContentScores]
    usage: Usage = Field(description="Each prompt counts once.")


class Tokenized(BaseModel):
    """A text's tokens."""

    tokens: list[int]
    count: int
    max_model_len: int = Field(description="Most tokens of a prompt.")


class Detokenized(BaseModel):
    """The text of tokens."""

    prompt: str


class TokenizerInfo(BaseModel):
    """The World tokenizer."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str = Field(description="A name of the end token, 0, which stands before a text too.")
    eos_token: str


class Model(BaseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int = Field(description="Unix time in seconds.")
    owned_by: str
    status: str = Field("ready", description="Of one loaded while serving: loading, ready, failed or unloading.")
    error: str = Field("", description="Why it could not be loaded.")
    file: str = Field("", description="Its file within --models-dir.")
    defaults: dict[str, Any] = Field({}, description="Decode parameters of requests that name it and do not give them.")


class LoadedModel(BaseModel):
    """A model that is loaded or unloaded while serving."""

    id: str
    object: Literal["model"]
    status: str = Field(description="loading, ready, failed, unloading or unloaded.")
    error: str = Field("", description="Why it could not be loaded.")


class ModelList(BaseModel):
    """The models served."""

    object: Literal["list"]
    data: list[Model]


class ServingEngine(BaseModel):
    """An engine that serves the model."""

    id: str
    object: Literal["engine"]
    created: int = Field(description="Unix time of the last change of its status.")
    model: str
    status: str = Field(description="loading, ready, lost (it does not answer), unloading (it drains) or failed.")
    error: str = Field(description="Why it could not be started.")
    pid: int = Field(description="0: no process runs.")
    node: str = Field(description="IP address of the machine that it runs on; empty: this one.")
    devices: list[str] = Field(description="As --pp-devices.")


class EngineList(BaseModel):
    """The engines that serve the model."""

    object: Literal["list"]
    data: list[ServingEngine]


class MixtureMember(BaseModel):
    """A state in a mixture."""

    name: str
    weight: float


class TunedStateEntry(BaseModel):
    """A tuned state."""

    name: str
    models: list[str] = Field(description="What `model` may be to name it.")
    digest: str = Field(description="Of its numbers.")
    file: str = Field(description="What it was read from.")
    orientation: Literal["value_key", "key_value", ""] = Field(description="How the file had its matrices.")
    orientation_reason: str
    created: int = Field(description="Unix time in seconds at which it was loaded.")
    mixture: list[MixtureMember] = Field(description="What it mixes, if it is a mixture under a name.")
    defaults: dict[str, Any] = Field(description="Decode parameters of requests that name it and do not give them.")
    bytes: int
    is_kept: bool = Field(description="It is there after a restart too.")
    in_slot: bool = Field(description="A slot holds it, so that a row begins from it at once.")
    error: str = Field(description="Why a state that was kept cannot be used.")


class TunedStateList(BaseModel):
    """The tuned states."""

    object: Literal["list"]
    data: list[TunedStateEntry]


class AdapterEntry(BaseModel):
    """An adapter that requests may name."""

    name: str
    models: list[str] = Field(description="What `model` may be to name it.")
    digest: str = Field(description="Of its numbers and its scale.")
    file: str = Field(description="What it was read from.")
    scale: float | None = Field(description="As it was given; null: the file says it.")
    rank: int = Field(description="The largest of its pairs.")
    created: int = Field(description="Unix time in seconds at which it was loaded.")
    bytes: int = Field(description="In the devices' memory.")
    is_kept: bool = Field(description="It is loaded again after a restart.")
    error: str = Field(description="Why one that was loaded before the last restart cannot be used.")


class AdapterList(BaseModel):
    """The adapters that requests may name."""

    object: Literal["list"]
    data: list[AdapterEntry]


class RwkvInferDone(BaseModel):
    """It is done."""

    status: Literal["success"]


class RwkvInferHealth(BaseModel):
    """It is alive."""

    message: Literal["ok"]
    status_code: Literal[200]


class Health(BaseModel):
    """In one word."""

    status: str
    lost: list[str] = Field([], description="Engines that take no work, where others do.")


class TokenCount(BaseModel):
    """Tokens of all texts together."""

    tokens: int


class Status(BaseModel):
    """The service. What is not named here may change from version to version."""

    model_config = ConfigDict(extra="allow")

    model: str
    devices: list[str]
    samplers: dict[str, Any] = Field(description="`used` by name, and why others are `refused`.")
    kernels: dict[str, Any] = Field(description="`used`, and why others are `refused`.")
    running_rows: int
    waiting_rows: int
    free_slots: int
    pool: dict[str, Any] = Field(description="Sizes of the tiers, counters, and what is wrong with the disk.")
    generated_tokens_per_s: float = Field(description="Over the last ten seconds, as the next.")
    computed_tokens_per_s: float = Field(description="Tokens that went through the model, prompts' among them.")
    drawn_tokens_per_s: float = Field(description="The older name of generated_tokens_per_s.")
    read_tokens_per_s: float = Field(description="The older name of computed_tokens_per_s.")
    models: list[dict[str, Any]] = Field(
        description="Models loaded while serving, how they stand, and dtype, wkv_state, kernels and devices of "
        "those that are ready."
    )
    engines: list[dict[str, Any]] = Field(
        [], description="Each engine of the service's own model: its state, process, devices, load and sessions."
    )
    prompt_backlog_s: float = Field(
        0.0, description="Seconds in which the prompts that wait will be read; of the engine with the most."
    )
    processes: dict[str, Any]
