"""Models of the answers about what is loaded: models, engines, tuned states, adapters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class Model(BaseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int = Field(description="Unix time in seconds.")
    owned_by: str
    status: str = Field(
        "ready", description="Status of a model loaded at run time: loading, ready, failed or unloading."
    )
    loaded: float = Field(1, description="Share of the layers that are loaded, 0 to 1.")
    error: str = Field("", description="Why loading failed.")
    file: str = Field("", description="Path within --models-dir.")
    defaults: dict[str, Any] = Field(
        {}, description="Decode parameters for requests that name the model and give none."
    )
    type: Literal["model"] = Field(description="Of Anthropic's API, like the next fields.")
    display_name: str = Field(description="Same as id.")
    created_at: str = Field(description="Same as created (RFC 3339).")


class LoadedModel(BaseModel):
    """The status of a model loaded or unloaded at run time."""

    id: str
    object: Literal["model"]
    status: str = Field(description="loading, ready, failed, unloading or unloaded.")
    error: str = Field("", description="Why loading failed.")


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str


class ServingEngine(BaseModel):
    """An engine that serves the model."""

    id: str
    object: Literal["engine"]
    created: int = Field(description="Unix time of the last change of `status`.")
    model: str
    status: str = Field(
        description="loading, ready, lost (does not answer), unloading (finishes its requests) or failed."
    )
    error: str = Field(description="Why the engine could not start.")
    pid: int = Field(description="Process id. 0: no process.")
    node: str = Field(description="IP address of the engine's machine. Empty: the server's own.")
    devices: list[str] = Field(description="In the format of --pp-devices.")


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
    models: list[str] = Field(description="Values of `model` that name this state.")
    digest: str = Field(description="Digest of the state's values.")
    file: str = Field(description="The file that the state was loaded from.")
    orientation: Literal["value_key", "key_value", ""] = Field(description="Orientation of the matrices in the file.")
    orientation_reason: str
    created: int = Field(description="Unix time of loading in seconds.")
    mixture: list[MixtureMember] = Field(description="The members, if the state is a named mixture.")
    defaults: dict[str, Any] = Field(description="Decode parameters for requests that name the state and give none.")
    bytes: int
    is_kept: bool = Field(description="Whether the state survives a restart.")
    in_slot: bool = Field(description="Whether a slot holds the state, so that rows start without a copy.")
    error: str = Field(description="Why a stored state cannot be used.")


class TunedStateList(BaseModel):
    """The tuned states."""

    object: Literal["list"]
    data: list[TunedStateEntry]


class AdapterEntry(BaseModel):
    """An adapter that requests may name."""

    name: str
    models: list[str] = Field(description="Values of `model` that name this adapter.")
    digest: str = Field(description="Digest of the adapter's values and scale.")
    file: str = Field(description="The file that the adapter was loaded from.")
    scale: float | None = Field(description="As given. null: from the file.")
    rank: int = Field(description="Largest rank of its matrix pairs.")
    created: int = Field(description="Unix time of loading in seconds.")
    bytes: int = Field(description="Bytes of device memory.")
    is_kept: bool = Field(description="Whether the adapter survives a restart.")
    error: str = Field(description="Why a stored adapter cannot be used after a restart.")


class AdapterList(BaseModel):
    """The adapters that requests may name."""

    object: Literal["list"]
    data: list[AdapterEntry]
