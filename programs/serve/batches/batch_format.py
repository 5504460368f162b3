"""A batch's lines as OpenAI writes them: `{"custom_id", "url", "body"}` in, `{"custom_id", "response"}` out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from programs.backends.handlers import BY_PATH
from programs.batch.formats import FileFormat, Jsonl
from programs.batch.inputs import Line
from programs.batch.lines import OK, Outcome
from programs.batch.tasks import TaskRequest
from programs.record import LineError, Record, json_line
from routes.request.json_body import check_num_values
from rwkv_batch.errors import ServiceError

MAX_LINES = 100_000
MAX_ERRORS = 100
"""Maximum errors of a file that are reported."""
_NATIVE_FIELDS = ("contents", "prefix")
_OPENAI = "/openai"


def path_of(url: str, body: dict[str, Any]) -> str:
    """Return the path of a line's route: OpenAI's route of that url if there is one, unless the body is native."""
    is_native = url in BY_PATH and any(name in body for name in _NATIVE_FIELDS)
    return _OPENAI + url if _OPENAI + url in BY_PATH and not is_native else url


class BatchTask:
    """See Task."""

    def request(self, record: Record) -> TaskRequest:
        """See Task."""
        body = record.fields["body"]
        path = path_of(record.fields["url"], body)
        if path not in BY_PATH:
            raise LineError(f"no such url: {path}")
        return TaskRequest(path, body)

    def text(self, answer: Any) -> str:
        """Return the whole body as JSON."""
        return json.dumps(answer, ensure_ascii=False)


@dataclass
class BatchFormat(FileFormat):
    """A line's id has the batch's id and the line's number, so it stays the same after a restart."""

    batch_id: str
    max_tokens: int
    """Maximum number of token ids in a line."""

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        return Jsonl("", "", check=self._size_problem).read(lines)

    def _size_problem(self, data: bytes) -> str:
        """Return why a line is too large. Parsing too many values would stop all batches for seconds."""
        try:
            check_num_values(data, self.max_tokens)
        except ServiceError as error:
            return f"is too large: {error.info.message}"
        return ""

    def write(self, record: Record, answer: str | None) -> str:
        if answer is None:
            return ""
        response = {"status_code": OK, "request_id": self._id(record), "body": json.loads(answer)}
        return self._line(record, response, None)

    def error(self, record: Record, outcome: Outcome) -> str:
        """Return a failed line's entry in the error file."""
        if outcome.reply is None:
            return self._line(record, None, {"code": outcome.code or "invalid_request", "message": outcome.problem})
        response = {"status_code": outcome.status, "request_id": self._id(record), "body": outcome.reply}
        return self._line(record, response, None)

    def _id(self, record: Record) -> str:
        return f"batch_req_{self.batch_id.removeprefix('batch_')}_{record.index}"

    def _line(self, record: Record, response: Any, error: Any) -> str:
        custom_id = record.fields.get("custom_id")
        line = {"id": self._id(record), "custom_id": custom_id, "response": response, "error": error}
        return json_line(line)


def validate_lines(records: Iterator[Record], endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """Return a batch file's number of lines and its errors. Errors are in OpenAI's form."""
    count, errors, seen = 0, [], set()
    for record in records:
        count += 1
        problem = _line_error(record, endpoint)
        key = hash(record.fields.get("custom_id")) if not problem else None
        if key is not None and key in seen:
            problem = "custom_id", "is that of another line too; it must be unique"
        seen.add(key)
        if problem:
            param, message = problem
            errors.append(
                error_entry("invalid_json_line" if not param else "invalid_request", message, param, record.line)
            )
        if len(errors) >= MAX_ERRORS:
            break
        if count > MAX_LINES:
            errors.append(
                error_entry("too_many_lines", f"the file has more than {MAX_LINES} lines; send several batches")
            )
            break
    if not count:
        errors.append(error_entry("empty_file", "the file has no lines"))
    return count, errors


def _line_error(record: Record, endpoint: str) -> tuple[str | None, str] | None:
    fields = record.fields
    if record.problem:
        return None, f"the line {record.problem}"
    if not isinstance(fields.get("custom_id"), str) or not 0 < len(fields["custom_id"]) <= 512:
        return "custom_id", "must be a text of 1 to 512 characters"
    if fields.get("method") != "POST":
        return "method", f"must be POST, got {fields.get('method')!r:.40}"
    if fields.get("url") != endpoint:
        return "url", f"must be the batch's endpoint {endpoint}, got {fields.get('url')!r:.100}"
    if not isinstance(fields.get("body"), dict):
        return "body", "must be a JSON object"
    return None


def error_entry(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
