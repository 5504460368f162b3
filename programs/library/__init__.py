"""The engine as a Python library: `from rwkv_batch import LLM`."""

from programs.library.async_llm import AsyncLLM
from programs.library.llm import LLM
from programs.library.outputs import CompletionOutput, Piece, RequestOutput, Score, State
from programs.library.params import LLMError, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "LLMError",
    "Piece",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "State",
]
