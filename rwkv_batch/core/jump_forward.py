"""Jump-forward decoding: appends tokens that a grammar leaves no choice about, without sampling.

If the grammar allows exactly one next token, the row appends it. This repeats until there is a choice. The steps then
read these tokens like a prompt.

The output and the token counts are the same as with sampling, but each token saves a step. If a step samples for the
row meanwhile, its token is discarded: it is the first one appended.
"""

from __future__ import annotations

from rwkv_batch.core.sequence import PENDING, Sequence
from rwkv_batch.request import FinishReason, TokenLogprob
from sampling.grammar.required_text import AnyMatcher


def jump_forward(sequence: Sequence, matcher: AnyMatcher, byte_table: list[bytes]) -> FinishReason | None:
    """Append the tokens that the grammar determines. Returns why the row ends, if it does.

    Raises GrammarError if the grammar cannot continue.
    """
    output, ids, sampling = sequence.output, sequence.token_ids, sequence.request.sampling
    is_sampling = ids[-1] == PENDING
    if sampling.filters is not None and sampling.filters.bad_words:
        return None  # only sampling knows which tokens they ban
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
