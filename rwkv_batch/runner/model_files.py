"""A model's files: opened with what is merged into them, and checked for a model that is to take another's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rwkv_batch.calls import CheckModel, Reply
from rwkv_batch.core.error_mapping import error_translator
from rwkv_batch.core.file_thread import FileThread
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.model.adapters.files import read_adapter, split_scale
from rwkv_batch.model.adapters.merge import merge_adapters
from rwkv_batch.model.weights import Weights, WeightsError, open_weights

_to_service_error = error_translator("the file could not be checked")


def with_adapters(weights: Weights, adapters: Sequence[str]) -> Weights:
    """The weights under adapters ("file" or "file:scale"), in that order; nothing is computed yet.

    Raises FileError: one line naming the file and what is wrong.
    """
    return merge_adapters(weights, [read_adapter(*split_scale(one)) for one in adapters]) if adapters else weights


class ModelChecks:
    """Opens files that requests name, on a thread of its own."""

    def __init__(self, refusal: Callable[[], ServiceError]) -> None:
        """`refusal`: why nothing is checked any more."""
        self._thread = FileThread("model-files", refusal, _to_service_error)

    def check(self, call: CheckModel, reply: Reply[str]) -> None:
        """Replies what the file holds, in words, or what is wrong with it or with an adapter."""
        self._thread.run(reply, lambda: _description(call), reply)

    def close(self) -> None:
        """Begin to open nothing more."""
        self._thread.close()


def _description(call: CheckModel) -> str:
    try:
        weights = open_weights(call.file)
    except (WeightsError, ValueError) as error:
        raise _invalid_field("file", error) from error
    try:
        return with_adapters(weights, call.adapters).shape.describe()
    except ValueError as error:
        raise _invalid_field("adapters", error) from error


def _invalid_field(field: str, error: Exception) -> ServiceError:
    return ServiceError(ErrorKind.INVALID_FIELD, f"{field}: {error}", field=field)
