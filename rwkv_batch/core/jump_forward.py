"""Text in which a grammar leaves no choice: its tokens are read as a prompt's are, instead of drawn one by one.

Where the mask of the next token would allow it alone, and that of the one behind it likewise, a row takes all of them
at once, ends with them where it would have ended, and draws next behind the last. What it says, counts and draws is the
same either way; what is saved is a step for each. A draw that is under way for the row meanwhile would be of the first
of them, and does not count.
"""

from __future__ import annotations

from rwkv_batch.core.sequence import PENDING, Sequence
from rwkv_batch.request import FinishReason, TokenLogprob
from sampling.grammar.matcher import Matcher


def jump_forward(sequence: Sequence, matcher: Matcher, byte_table: list[bytes]) -> FinishReason | None:
    """Take the tokens that are certain behind the last one taken; returns why the row ends with them, if it does.

    Raises GrammarError if the grammar cannot be followed any further.
    """
    output, ids, sampling = sequence.output, sequence.token_ids, sequence.request.sampling
    is_sampling = ids[-1] == PENDING
    tokens = matcher.jump_forward_tokens()
    if len(tokens) < 1 + is_sampling or any(sampling.logit_bias.get(token) == float("-inf") for token in tokens):
        return None  # nothing is saved, or a draw has to find out that nothing is left
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
    """As a draw from one token tells it."""
    return None if top is None else TokenLogprob(token, 0.0, [(token, 0.0)][:top])
