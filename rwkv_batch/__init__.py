"""The batched RWKV-7 engine: requests in, token events out. No HTTP.

`from rwkv_batch import LLM` imports `programs.library` on first access. This is the only upward import. So importing a
module of the engine does not load the programs above it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rwkv_batch.version import __version__ as __version__

if TYPE_CHECKING:
    from programs.library import (
        LLM,
        AsyncLLM,
        CompletionOutput,
        LLMError,
        Piece,
        RequestOutput,
        SamplingParams,
        Score,
        State,
    )
    from programs.library.pipeline import PIPELINE, PIPELINE_ARGS, RWKV

__all__ = [
    "LLM",
    "PIPELINE",
    "PIPELINE_ARGS",
    "RWKV",
    "AsyncLLM",
    "CompletionOutput",
    "LLMError",
    "Piece",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "State",
]
_PIPELINE_NAMES = frozenset({"PIPELINE", "PIPELINE_ARGS", "RWKV"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        importlib.import_module("programs.library.pipeline" if name in _PIPELINE_NAMES else "programs.library"), name
    )
