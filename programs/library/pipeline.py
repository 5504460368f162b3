"""`RWKV`, `PIPELINE` and `PIPELINE_ARGS` of the `rwkv` package, on the batched engine.

from programs.library.pipeline import PIPELINE, PIPELINE_ARGS, RWKV
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from programs.library import calls
from programs.library.llm import LLM
from programs.library.outputs import State, root
from programs.library.params import SamplingParams
from rwkv_batch.tokenizer import END_OF_TEXT
from sampling.logits_sampling import as_rows, as_tensor, sample_one

WORLD = "rwkv_vocab_v20230424"
_BAN_BIAS = -100.0


@dataclass
class PIPELINE_ARGS:  # noqa: N801 - the name that scripts import
    """Sampling parameters of `PIPELINE.generate`, with the package's names and defaults."""

    temperature: float = 1.0
    top_p: float = 0.85
    top_k: int = 0
    alpha_frequency: float = 0.2
    alpha_presence: float = 0.2
    alpha_decay: float = 0.996
    token_ban: Sequence[int] = ()
    token_stop: Sequence[int] = ()
    chunk_len: int = 256
    """No effect: the engine splits prompts itself."""


class RWKV(LLM):
    """A model, loaded as with the `rwkv` package."""

    def __init__(self, model: str, strategy: str | None = None, **settings: Any) -> None:
        """`model`: path with or without `.pth`. `strategy`: for example "cuda fp16". See LLM."""
        known = model.endswith((".pth", ".safetensors"))
        super().__init__(model if known else f"{model}.pth", strategy=strategy, **settings)

    def forward(
        self, tokens: int | Sequence[int], state: State | None = None, full_output: bool = False
    ) -> tuple[Any, State]:
        """Reads token ids after `state` (None: empty) and returns the last logits and the new state.

        Logits are a host tensor [V] fp32. With `full_output` and several tokens they are [T, V], which costs one call
        per token. `state` does not change and may be reused. Raises ValueError or LLMError.
        """
        ids = _token_ids(tokens)
        if state is not None and not isinstance(state, State):
            raise TypeError(
                f"state must be a State that forward or prefill returned, or None, got {type(state).__name__}"
            )
        if full_output and len(ids) > 1:
            rows = []
            for token in ids:
                logits, state = self.forward(token, state)
                rows.append(logits)
            assert state is not None
            return as_rows(rows), state
        logits_of_last, after = self.engine.wait(calls.forward(self.engine, ids, state))
        return as_tensor(logits_of_last), after

    def generate_zero_state(self) -> State:
        """Returns the empty state, which None means too."""
        return root(self.engine)


class PIPELINE:
    """The package's `PIPELINE`. Calls from several threads, and several prompts of one call, run in one batch."""

    def __init__(self, model: LLM, WORD_NAME: str = WORLD) -> None:
        """Raises ValueError for a vocabulary other than World."""
        if WORD_NAME != WORLD:
            raise ValueError(f"WORD_NAME must be {WORLD!r}, the vocabulary of RWKV-7's models, got {WORD_NAME!r}")
        self.model = model
        self.tokenizer = model.get_tokenizer()

    def encode(self, x: str) -> list[int]:
        """Returns the token ids of a text."""
        return self.tokenizer.encode(x)

    def decode(self, x: list[int]) -> str:
        """Returns the text of token ids. U+FFFD if it is not complete UTF-8."""
        try:
            return self.tokenizer.decode_bytes(x).decode()
        except UnicodeDecodeError:
            return "\ufffd"

    def sample_logits(self, logits: Any, temperature: float = 1.0, top_p: float = 0.85, top_k: int = 0) -> int:
        """Samples a token from logits [V] of `forward`, as docs/generation.md says.

        `torch.manual_seed` sets the seed. temperature 0 or top_p 0 is greedy. Raises ValueError.
        """
        return sample_one(logits, temperature, top_p, int(top_k))

    def prefill(self, ctx: str | list[int], state: State | None = None) -> State:
        """Reads `ctx` and returns the state for `generate(state=...)`. See LLM.prefill."""
        return self.model.prefill(ctx, state=state)

    def generate(
        self,
        ctx: str | Sequence[str],
        token_count: int = 100,
        args: PIPELINE_ARGS | None = None,
        callback: Callable[[str], None] | None = None,
        state: State | None = None,
    ) -> Any:
        """Returns the text after `ctx`. For several prompts, returns a list of texts.

        callback: gets the streamed text, for one prompt only. state: from `prefill`; it does not change.
        Generation ends at `token_stop` or after `token_count` tokens. Raises ValueError for a callback with several
        prompts.
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
            raise ValueError("callback needs one prompt, got several; give one ctx, or use LLM.generate(stream=True)")
        texts = [output.outputs[0].text for output in outputs]
        return texts[0] if is_one else texts


def _token_ids(tokens: int | Sequence[int]) -> list[int]:
    """Returns a list of one or several token ids."""
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
