"""`RWKV`, `PIPELINE` and `PIPELINE_ARGS` as the `rwkv` package has them, answered by the batched engine.

from programs.library.pipeline import PIPELINE, PIPELINE_ARGS, RWKV
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from programs.library import calls
from programs.library.llm import LLM
from programs.library.params import SamplingParams
from programs.library.states import State, root
from rwkv_batch.tokenizer import END_OF_TEXT
from sampling.logits_sampling import as_rows, as_tensor, sample_one

WORLD = "rwkv_vocab_v20230424"
_BAN_BIAS = -100.0


class PIPELINE_ARGS:  # noqa: N801 - the name that scripts import
    """How `PIPELINE.generate` draws; names and defaults are the package's."""

    def __init__(
        self,
        temperature: float = 1.0,
        top_p: float = 0.85,
        top_k: int = 0,
        alpha_frequency: float = 0.2,
        alpha_presence: float = 0.2,
        alpha_decay: float = 0.996,
        token_ban: Sequence[int] = (),
        token_stop: Sequence[int] = (),
        chunk_len: int = 256,
    ) -> None:
        """`chunk_len` is of no effect: the engine decides how prompts are cut (prefill_chunk of its settings)."""
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.alpha_frequency = alpha_frequency
        self.alpha_presence = alpha_presence
        self.alpha_decay = alpha_decay
        self.token_ban = token_ban
        self.token_stop = token_stop
        self.chunk_len = chunk_len


class RWKV(LLM):
    """A model as scripts of the package load it."""

    def __init__(self, model: str, strategy: str | None = None, **settings: Any) -> None:
        """`model` with or without `.pth`; `strategy` like "cuda fp16", as the package writes it; see LLM."""
        known = model.endswith((".pth", ".safetensors"))
        super().__init__(model if known else f"{model}.pth", strategy=strategy, **settings)

    def forward(
        self, tokens: int | Sequence[int], state: State | None = None, full_output: bool = False
    ) -> tuple[Any, State]:
        """Read token ids behind `state` (None: behind nothing): the logits behind the last, and the state there.

        Logits: a tensor [V] fp32 in host memory, the caller's own; with `full_output` and several tokens [T, V], which
        costs a call for each token. `state` is not changed, so it may be used again; it is forgotten with the last
        reference to it. Raises ValueError, LLMError.
        """
        ids = _token_ids(tokens)
        if state is not None and not isinstance(state, State):
            raise TypeError(f"state must be what forward or prefill returned, or None, got {type(state).__name__}")
        if full_output and len(ids) > 1:
            rows = []
            for token in ids:
                logits, state = self.forward(token, state)
                rows.append(logits)
            assert state is not None
            return as_rows(rows), state
        told, after = self.engine.wait(calls.forward(self.engine, ids, state))
        return as_tensor(told), after

    def generate_zero_state(self) -> State:
        """Nothing has been read, as None says it too."""
        return root(self.engine)


class PIPELINE:
    """The package's `PIPELINE`. Calls from several threads, and several prompts of one call, run in one batch."""

    def __init__(self, model: LLM, WORD_NAME: str = WORLD) -> None:
        """Raises ValueError for another vocabulary than World's, which RWKV-7 models have."""
        if WORD_NAME != WORLD:
            raise ValueError(f"WORD_NAME must be {WORLD!r}, the vocabulary of RWKV-7's models, got {WORD_NAME!r}")
        self.model = model
        self.tokenizer = model.get_tokenizer()

    def encode(self, x: str) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(x)

    def decode(self, x: list[int]) -> str:
        """Text of token ids; U+FFFD alone if it is not whole."""
        try:
            return self.tokenizer.decode_bytes(x).decode()
        except UnicodeDecodeError:
            return "\ufffd"

    def sample_logits(self, logits: Any, temperature: float = 1.0, top_p: float = 0.85, top_k: int = 0) -> int:
        """A token drawn from logits [V] of `forward`, as docs/generation.md says; `torch.manual_seed` decides which.

        temperature or top_p 0: the likeliest. Raises ValueError.
        """
        return sample_one(logits, temperature, top_p, int(top_k))

    def prefill(self, ctx: str | list[int], state: State | None = None) -> State:
        """What the model has read after `ctx`, for `generate(state=…)`; see LLM.prefill."""
        return self.model.prefill(ctx, state=state)

    def generate(
        self,
        ctx: str | Sequence[str],
        token_count: int = 100,
        args: PIPELINE_ARGS | None = None,
        callback: Callable[[str], None] | None = None,
        state: State | None = None,
    ) -> Any:
        """The text that follows `ctx`; of several prompts, a list of texts.

        callback: gets the text as it is made, of one prompt only. state: from `prefill`, and left as it was.
        Ends at `token_stop` or after `token_count` tokens, as the package does; other ends there are none. Raises
        ValueError for a callback beside several prompts.
        """
        params = _params(args or PIPELINE_ARGS(), token_count)
        is_one = isinstance(ctx, str)
        if callback is None:
            outputs = self.model.generate(ctx, params, state=state)
        elif is_one:
            send = callback
            outputs = self.model.generate(
                ctx, params, state=state, callback=lambda piece: send(piece.text) if piece.text else None
            )
        else:
            raise ValueError("callback is told the text of one prompt: give one ctx, or use LLM.generate(stream=True)")
        texts = [output.outputs[0].text for output in outputs]
        return texts[0] if is_one else texts


def _token_ids(tokens: int | Sequence[int]) -> list[int]:
    """As the package takes them: one, or several."""
    ids = [operator.index(one) for one in tokens] if isinstance(tokens, Sequence) else [operator.index(tokens)]
    if not ids:
        raise ValueError("tokens must have at least one token id, got none")
    return ids


def _params(args: PIPELINE_ARGS, token_count: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=token_count,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        presence_penalty=args.alpha_presence,
        frequency_penalty=args.alpha_frequency,
        penalty_decay=args.alpha_decay,
        stop_token_ids=list(args.token_stop),
        ignore_eos=END_OF_TEXT not in args.token_stop,
        logit_bias=dict.fromkeys(args.token_ban, _BAN_BIAS),
    )
