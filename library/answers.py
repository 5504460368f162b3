"""A job's answers while they are made, and when they are."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from library.errors import LLMError, as_llm_error
from library.outputs import CompletionOutput, Piece, RequestOutput
from library.questions import Question
from routes.context import Context
from routes.response.answer_parts import AnswerParting
from routes.response.event_stream import EventStream, submit
from routes.response.transcript import RowUpdate, Transcript
from rwkv_batch.errors import ErrorInfo
from rwkv_batch.request import Finish, Job, TokenLogprob

_PATIENCE_S = 0.25
LABEL = "library"


class Answers:
    """Of a job under way. One reader at a time, on a thread that may wait."""

    def __init__(self, context: Context, questions: Sequence[Question], first: int, stream: EventStream) -> None:
        """`first`: number of the first question in its call."""
        self._ids = context.tokenizer.id_by_bytes
        self._stream = stream
        self._first = first
        self._questions = questions
        self._places = [(at, index) for at, question in enumerate(questions) for index in range(question.row.n)]
        self._transcript = Transcript(len(self._places))
        self._partings = [AnswerParting(form) if (form := questions[at].form) else None for at, _ in self._places]
        self.outputs = [_output(question) for question in questions]
        self.errors: list[ErrorInfo] = []
        """Of the answers that failed."""
        self.is_done = False

    async def wait_finished(self) -> None:
        """Until all answers are made; `read` then has them. Cancelled, it cancels them."""
        try:
            await self._stream.wait_finished(None)
        except BaseException:
            self.close()
            raise

    def read(self) -> list[Piece]:
        """What is new; waits for a moment if nothing is. Raises LLMError if the job failed."""
        batch = self._stream.pull(_PATIENCE_S)
        pieces = [self._take(update) for update in self._transcript.read(batch)]
        if batch and batch[-1].done:
            self.is_done = True
        if self._transcript.error is not None:
            self.is_done = True
            raise as_llm_error(self._transcript.error)
        return pieces

    def close(self) -> None:
        """Cancel what is not made yet."""
        self._stream.close()

    def _take(self, update: RowUpdate) -> Piece:
        at, index = self._places[update.row]
        request = self.outputs[at]
        output = request.outputs[index]
        text, reasoning, parting = update.text, "", self._partings[update.row]
        if parting is not None:
            parts = parting.feed(update.text, update.finish is not None)
            text, reasoning = parts.content, parts.reasoning
        output.text += text
        output.reasoning += reasoning
        self._add_logprobs(output, update.logprobs)
        if update.finish is not None:
            self._finish(self._questions[at], request, output, update.finish)
        return Piece(
            prompt=self._first + at,
            index=index,
            text=text,
            reasoning=reasoning,
            finish_reason=output.finish_reason,
            error=output.error,
            num_tokens=update.num_tokens,
        )

    def _add_logprobs(self, output: CompletionOutput, logprobs: list[TokenLogprob]) -> None:
        if output.logprobs is None or output.token_ids is None:
            return
        output.logprobs += logprobs
        output.token_ids += [self._ids.get(one.token, 0) for one in logprobs]
        output.cumulative_logprob = sum(one.logprob for one in output.logprobs)

    def _finish(self, question: Question, request: RequestOutput, output: CompletionOutput, finish: Finish) -> None:
        output.finish_reason, output.num_tokens = str(finish.reason), finish.completion_tokens
        request.num_cached_tokens = finish.cached_tokens
        request.finished = all(one.finish_reason is not None for one in request.outputs)
        if finish.error is not None:
            output.error = finish.error.message
            self.errors.append(finish.error)
        elif question.source is not None:
            request.state = question.source.after(finish)


def _output(question: Question) -> RequestOutput:
    row = question.row
    outputs = [CompletionOutput(index=index) for index in range(row.n)]
    if row.sampling.top_logprobs is not None:
        for output in outputs:
            output.token_ids, output.logprobs = [], []
    return RequestOutput(
        request_id=uuid.uuid4().hex, prompt=question.prompt, prompt_token_ids=row.prompt, outputs=outputs
    )


async def begin(context: Context, questions: Sequence[Question], first: int, timeout_s: float | None) -> Answers:
    """Hand the questions to the engine as one job. Raises ServiceError if it is refused."""
    job = Job(job_id=uuid.uuid4().hex, rows=[question.row for question in questions], timeout_s=timeout_s, label=LABEL)
    return Answers(context, questions, first, await submit(context, job))


def all_failed(answers: Sequence[Answers]) -> LLMError | None:
    """Why nothing came of a call; None if something did: then what failed says so itself."""
    errors = [error for one in answers for error in one.errors]
    count = sum(len(output.outputs) for one in answers for output in one.outputs)
    return as_llm_error(errors[0]) if errors and len(errors) == count else None
