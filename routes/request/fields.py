"""What all pydantic models of requests have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and len(value) <= 32 else value


Number = Annotated[float, BeforeValidator(_number)]
"""A number that scripts also write as text."""


class Fields(BaseModel):
    """Strict, forgiving only of what it does not know and of null."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        return {name: given for name, given in value.items() if given is not None} if isinstance(value, dict) else value
