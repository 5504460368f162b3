"""The engine in a program of one's own: `from library import LLM`."""

from library.async_llm import AsyncLLM
from library.errors import LLMError
from library.llm import LLM
from library.outputs import CompletionOutput, Piece, RequestOutput, Score
from library.params import SamplingParams
from library.states import State

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
