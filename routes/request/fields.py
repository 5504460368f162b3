"""Types and the base class of all request models."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_MAX_NUMBER_LENGTH = 32


def _number(value: Any) -> Any:
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_LENGTH:
        with contextlib.suppress(ValueError):  # other text is refused by the field's own check
            return float(value)
    return value


Number = Annotated[float, BeforeValidator(_number)]
"""A number, or text with a number."""


@dataclass(frozen=True)
class OneOf:
    """Restricts a text to one of these names, or "" for the default."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "enum": ["", *self.names]}

    def _check(self, text: str) -> str:
        if text and text not in self.names:
            raise PydanticCustomError("one_of", "must be one of {names}", {"names": ", ".join(self.names)})
        return text


@dataclass(frozen=True)
class Pattern:
    """Restricts a text to a regular expression. Errors show `description`."""

    pattern: str
    description: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "pattern": self.pattern}

    def _check(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise PydanticCustomError("shape", "must be {description}", {"description": self.description})
        return text


Device = Annotated[
    str, Pattern(r"^(auto|cpu|cuda(:[0-9]{1,4})?|[0-9]{1,4})$", "a device like cuda:0, a GPU's number, cpu or auto")
]
"""A device, in the format of --pp-devices."""
NO_NUL = Pattern(r"^[^\x00]*$", "a name without the character U+0000")
"""For session ids: PostgreSQL's text type does not allow U+0000."""
SessionId = Annotated[str, Field(min_length=1, max_length=256), NO_NUL]


class Fields(BaseModel):
    """Base of all request models: strict, but ignores unknown fields and treats null as missing."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        return {name: given for name, given in value.items() if given is not None} if isinstance(value, dict) else value
