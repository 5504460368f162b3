"""Jump-forward decoding: appends tokens that a grammar leaves no choice about, without sampling.

If the grammar allows exactly one next token, the row appends it. This repeats until there is a choice. The steps then
read these tokens like a prompt.

The output and the token counts are the same as with sampling, but each token saves a step. If a step samples for the
row meanwhile, its token is discarded: it is the first one appended.
"""

from __future__ import annotations

import time

from rwkv_batch.core.scheduler import Scheduler
from rwkv_batch.core.sequence import PENDING, Sequence
from rwkv_batch.request import Delta, FinishReason, TokenLogprob
from rwkv_batch.tokenizer import END_OF_TEXT
from sampling.grammar.required_text import AnyMatcher


class JumpForward:
    """Processes the tokens of constrained rows. Engine thread."""

    def __init__(self, scheduler: Scheduler, byte_table: list[bytes]) -> None:
        self._scheduler = scheduler
        self._byte_table = byte_table
        self.max_rows = scheduler.limits.jump_forward_max_rows
        self.num_tokens = 0
        """tokens appended without sampling since the start"""

    def process_token(
        self, sequence: Sequence, matcher: AnyMatcher, token: int, logprob: TokenLogprob | None
    ) -> FinishReason | Delta | None:
        """Process a token sampled under a grammar.

        Returns as `RowOutput.process_token`. Raises GrammarError if the grammar cannot continue.
        """
        output, token = sequence.output, matcher.resolve(token)
        at = sequence.prompt_end + len(output.tokens)
        reason = output.append_token(token, logprob)
        if reason is None:
            sequence.token_ids[at] = token
        if reason is not FinishReason.STOP or token == END_OF_TEXT:
            reason = self._advance(sequence, matcher, token, reason)
        return output.pop_delta() if reason is None else reason

    def _advance(
        self, sequence: Sequence, matcher: AnyMatcher, token: int, reason: FinishReason | None
    ) -> FinishReason | None:
        """Advance the grammar by a sampled token, then jump forward. Returns why the row ends, if it does."""
        started = time.perf_counter()
        if matcher.advance(token):
            return FinishReason.STOP
        if reason is not None:
            return reason
        before = len(sequence.output.tokens)
        if self._scheduler.running_rows <= self.max_rows:
            reason = jump_forward(sequence, matcher, self._byte_table)
        num_jumped = len(sequence.output.tokens) - before
        self.num_tokens += num_jumped
        self._scheduler.mask_time.charge(sequence, time.perf_counter() - started, num_jumped)
        return reason


def jump_forward(sequence: Sequence, matcher: AnyMatcher, byte_table: list[bytes]) -> FinishReason | None:
    """Append the tokens that the grammar determines. Returns why the row ends, if it does.

    Raises GrammarError if the grammar cannot continue.
    """
    output, ids, sampling = sequence.output, sequence.token_ids, sequence.request.sampling
    is_sampling = ids[-1] == PENDING
    if sampling.filters is not None and (sampling.filters.bad_words or sampling.filters.mirostat):
        return None  # only sampling knows which tokens bad words ban, and Mirostat learns from every sampled token
    tokens = matcher.jump_forward_tokens()
    if len(tokens) < 1 + is_sampling or any(sampling.logit_bias.get(token) == float("-inf") for token in tokens):
        return None  # no step is saved, or sampling must find that every allowed token is banned
    if is_sampling:
        ids.pop()
        sequence.discarded_sample_step = sequence.last_sample_step
    for token in tokens:
        reason = output.append_token(token, _forced_logprob(byte_table[token], sampling.top_logprobs))
        ids.append(token)
        sequence.uncounted_ids.append(token)
        if reason is FinishReason.STOP or matcher.advance(token):
            return FinishReason.STOP
        if reason is not None:
            return reason
    return None


def _forced_logprob(token: bytes, top: int | None) -> TokenLogprob | None:
    return None if top is None else TokenLogprob(token, 0.0, [(token, 0.0)][:top])
