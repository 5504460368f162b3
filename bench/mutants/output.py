"""Mutants of what becomes of drawn tokens: text, and its end."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of

WORLDS = "test/simulation/test_simulation.py"
SINGLE_WORLDS = f"{WORLDS}::test_worlds_that_found_something"
OUTPUT = (
    "test/engine/test_output.py",
    SINGLE_WORLDS,
    f"{WORLDS}::test_worlds[0]",
    "test/engine/test_engine_sessions.py",
    WORLDS,
)

MUTANTS: list[Mutant] = [
    *of(
        "rwkv_batch/core/output.py",
        OUTPUT,
        [
            (
                "            self._end = logprob\n        self._release(len(self._tail))\n",
                "            self._end = logprob\n",
                "held text is lost at a stop id",
                "test/engine/test_output.py::test_text_that_is_held_is_shown_with_the_token_that_ends_the_row",
            ),
            (
                "        if found is not None:\n            length",
                "        if found is not None and len(tokens) < self._max_tokens:\n            length",
                "the length is judged before a stop that the last allowed token completes",
                "test/engine/test_output.py::test_a_stop_that_the_last_allowed_token_completes_is_a_stop",
            ),
            (
                "        self._release(len(self._tail) - node.depth)\n",
                "        self._release(len(self._tail))\n",
                "the beginning of a stop is shown",
                "test/engine/test_output.py::test_stop_string_across_tokens",
            ),
            (
                "self._release(len(self._tail) - (length - self._cut))",
                "self._release(len(self._tail))",
                "a stop is shown",
            ),
            (
                "if len(tokens) >= self._max_tokens:",
                "if len(tokens) > self._max_tokens:",
                "one token too many",
            ),
            (
                "            self._release(len(self._tail))\n            return FinishReason.LENGTH",
                "            return FinishReason.LENGTH",
                "held text is kept in the session and shown late at the limit",
                "test/engine/test_output.py::test_text_that_is_held_is_shown_with_the_token_that_ends_the_row",
            ),
            (
                "whole = bisect_right(self._ends, self._cut)",
                "whole = len(self.tokens) - 1",
                "tokens of the stop stay in the session",
            ),
            (
                "return self.tokens[:whole], partial",
                'return self.tokens[:whole], b""',
                "the shown part of a cut token is forgotten",
            ),
            (
                "        self._gathered = 0\n        return Delta(self.row, text, gathered, finish",
                "        return Delta(self.row, text, gathered, finish",
                "token counts of deltas add up to too much",
            ),
            (
                'else b"".join(ready)\n        ready.clear()\n',
                'else b"".join(ready)\n',
                "text is sent again and again",
            ),
            (
                "begun = [entry for entry in self._logprobs if entry[0] < shown]",
                "begun = list(self._logprobs)",
                "log-probabilities of a stop are shown",
            ),
            (
                "return chunk if request.sampling.top_logprobs is None else min(chunk, LOGPROBS_CHUNK)",
                "return chunk",
                "log-probabilities of a whole answer are gathered in the engine",
            ),
            (
                "self._cut = length - len(text) + found",
                "self._cut = length - len(text) + max(0, found)",
                "a stop that began in an earlier token is shown in part",
            ),
            (
                "or len(tokens) + 1 >= self._max_tokens\n",
                "",
                "a row of plain text has no last token",
                "test/engine/test_output.py::test_what_is_taken_is_what_is_pushed_and_then_worth_sending",
            ),
            (
                "(self._tail or self._node.depth or text.translate(None, self._firsts) != text)",
                "text.translate(None, self._firsts) != text",
                "text overtakes what is held back before it",
                "test/engine/test_output.py::test_what_is_taken_is_what_is_pushed_and_then_worth_sending",
            ),
        ],
        ci=(1, 2),
    ),
    *of(
        "rwkv_batch/core/stops.py",
        OUTPUT,
        [
            (
                'if len(byte_table[i]) > 1 and not byte_table[i].strip(b"\\n")',
                'if not byte_table[i].strip(b"\\n")',
                "a single-newline stop id cuts merged tokens",
            ),
            (
                "self.automaton = StopAutomaton(blank | set(request.stop_strings))",
                "self.automaton = StopAutomaton(blank or set(request.stop_strings))",
                "a stop string is lost beside a blank-line stop id",
                "test/engine/test_output.py::test_a_stop_string_beside_a_blank_line_stop_id",
            ),
            ("            ids.discard(END_OF_TEXT)\n", "            pass\n", "ignore_eos does not"),
            ("            ids.add(END_OF_TEXT)\n", "            pass\n", "the end of the text is shown as text"),
            (
                "fallback = self.root if parent is self.root else self._step(self._fallbacks[parent], byte)",
                "fallback = self.root",
                "a stop inside the failed beginning of another is missed",
            ),
            (
                "        child.longest = child.longest or fallback.longest\n",
                "",
                "a stop at the end of another's beginning is missed",
            ),
            (
                "if node.longest and (found is None or end - node.longest < found):",
                "if node.longest:",
                "the last of several stops counts instead of the first",
            ),
            (
                "key = (request.ignore_eos, frozenset(request.stop_ids), frozenset(request.stop_strings))",
                "key = (request.ignore_eos, frozenset(request.stop_ids))",
                "rows share the stop strings of others",
            ),
        ],
        ci=(1,),
    ),
]
