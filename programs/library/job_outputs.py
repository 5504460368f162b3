"""The outputs of a running job."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from programs.library.arguments import library_message
from programs.library.outputs import CompletionOutput, Piece, RequestOutput
from programs.library.params import LLMError, as_llm_error
from programs.library.prompt_requests import PromptRequest
from routes.context import Context
from routes.response.answer_parser import AnswerParser
from routes.response.event_stream import DecodedRow, EventStream, OutputDecoder
from routes.response.generate import submit
from rwkv_batch.errors import ErrorInfo
from rwkv_batch.request import Finish, Job, TokenLogprob

_READ_WAIT_S = 0.25
LABEL = "library"


class JobOutputs:
    """Outputs of a running job. One reader at a time, on a thread that may block."""

    def __init__(
        self, context: Context, prompt_requests: Sequence[PromptRequest], first: int, stream: EventStream
    ) -> None:
        """`first`: index of the job's first prompt in the call."""
        self._ids = context.tokenizer.id_by_bytes
        self._stream = stream
        self._first = first
        self._prompt_requests = prompt_requests
        self._rows = [
            (i, index) for i, prompt_request in enumerate(prompt_requests) for index in range(prompt_request.row.n)
        ]
        self._decoder = OutputDecoder(len(self._rows))
        self._parsers = [AnswerParser(form) if (form := prompt_requests[i].form) else None for i, _ in self._rows]
        self.outputs = [_output(prompt_request) for prompt_request in prompt_requests]
        self.errors: list[ErrorInfo] = []
        """Errors of failed answers."""
        self.is_done = False

    async def wait_finished(self) -> None:
        """Wait until all answers are finished; `read` then has them. Cancels them if it is cancelled."""
        try:
            await self._stream.wait_finished()
        except BaseException:
            self.close()
            raise

    def read(self) -> list[Piece]:
        """Return new text, after a short wait if there is none. Raises LLMError if the job failed."""
        batch = self._stream.pull(_READ_WAIT_S)
        pieces = [self._take(update) for update in self._decoder.read(batch)]
        if batch and batch[-1].done:
            self.is_done = True
        if self._decoder.error is not None:
            self.is_done = True
            raise as_llm_error(self._decoder.error)
        return pieces

    def close(self) -> None:
        """Cancel unfinished answers."""
        self._stream.close()

    def _take(self, update: DecodedRow) -> Piece:
        i, index = self._rows[update.row]
        request = self.outputs[i]
        output = request.outputs[index]
        text, reasoning, parser = update.text, "", self._parsers[update.row]
        if parser is not None:
            parts = parser.feed(update.text, update.finish is not None)
            text, reasoning = parts.content, parts.reasoning
        output.text += text
        output.reasoning += reasoning
        self._append_logprobs(output, update.logprobs)
        if request.prompt_logprobs is not None and index == 0:
            request.prompt_logprobs += update.prompt_logprobs
        if update.finish is not None:
            self._finish(self._prompt_requests[i], request, output, update.finish)
        return Piece(
            prompt=self._first + i,
            index=index,
            text=text,
            reasoning=reasoning,
            finish_reason=output.finish_reason,
            error=output.error,
            num_tokens=update.num_tokens,
        )

    def _append_logprobs(self, output: CompletionOutput, logprobs: list[TokenLogprob]) -> None:
        if output.logprobs is None or output.token_ids is None:
            return
        output.logprobs += logprobs
        output.token_ids += [self._ids.get(one.token, 0) for one in logprobs]
        output.cumulative_logprob = sum(one.logprob for one in output.logprobs)

    def _finish(
        self, prompt_request: PromptRequest, request: RequestOutput, output: CompletionOutput, finish: Finish
    ) -> None:
        output.finish_reason, output.num_tokens = str(finish.reason), finish.completion_tokens
        request.num_cached_tokens = finish.cached_tokens
        request.finished = all(one.finish_reason is not None for one in request.outputs)
        if finish.error is not None:
            output.error = library_message(finish.error.message)
            self.errors.append(finish.error)
        elif prompt_request.source is not None:
            request.state = prompt_request.source.after(finish)


def _output(prompt_request: PromptRequest) -> RequestOutput:
    row = prompt_request.row
    outputs = [CompletionOutput(index=index) for index in range(row.n)]
    if row.sampling.top_logprobs is not None:
        for output in outputs:
            output.token_ids, output.logprobs = [], []
    return RequestOutput(
        request_id=uuid.uuid4().hex,
        prompt=prompt_request.prompt,
        prompt_token_ids=row.prompt,
        outputs=outputs,
        prompt_logprobs=None if row.prompt_logprobs is None else [None],
    )


async def submit_work(
    context: Context, prompt_requests: Sequence[PromptRequest], first: int, timeout_s: float | None
) -> JobOutputs:
    """Submit the requests to the engine as one job. Raises ServiceError if it is rejected."""
    job = Job(
        job_id=uuid.uuid4().hex,
        rows=[prompt_request.row for prompt_request in prompt_requests],
        timeout_s=timeout_s,
        label=LABEL,
    )
    return JobOutputs(context, prompt_requests, first, await submit(context, job))


def all_failed(answers: Sequence[JobOutputs]) -> LLMError | None:
    """Return the error if every answer failed, else None: failed answers then carry their own errors."""
    errors = [error for one in answers for error in one.errors]
    count = sum(len(output.outputs) for one in answers for output in one.outputs)
    return as_llm_error(errors[0]) if errors and len(errors) == count else None
