"""Opens model files with their adapters, and loads the pipeline. Checks files for a model switch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rwkv_batch.calls import CheckModel, Reply
from rwkv_batch.config import EngineConfig
from rwkv_batch.core.error_mapping import error_translator
from rwkv_batch.core.file_thread import FileThread
from rwkv_batch.errors import ServiceError, StartupError, invalid
from rwkv_batch.model.adapters.files import read_adapter, split_scale
from rwkv_batch.model.adapters.merge import merge_adapters
from rwkv_batch.model.weights import Weights, WeightsError, open_weights
from rwkv_batch.runner.pipeline import Pipeline, replica_devices, resolve_backends
from rwkv_batch.tokenizer import VOCAB_SIZE

PILE_ROWS = (50277, 50304)
"""tokens without and with padding"""
_to_service_error = error_translator("the file could not be checked")


def open_model(path: str) -> Weights:
    """Open a model with an embedding row per token of the vocabulary. Raises WeightsError."""
    weights = open_weights(path)
    if (rows := weights.shape.vocab) < VOCAB_SIZE:
        pile = ", as models with the Pile vocabulary have" if rows in PILE_ROWS else ""
        raise WeightsError(
            f"model file {path} is a {weights.shape.version} with {rows} rows of tokens{pile}; the World "
            f"vocabulary has {VOCAB_SIZE}: use 'World' weights"
        )
    return weights


def with_adapters(weights: Weights, adapters: Sequence[str]) -> Weights:
    """Return weights with adapters ("file" or "file:scale") merged in order, on demand.

    Raises FileError with one line: the file and the reason.
    """
    return merge_adapters(weights, [read_adapter(*split_scale(one)) for one in adapters]) if adapters else weights


def load_pipeline(config: EngineConfig) -> tuple[Weights, Pipeline]:
    """Open the weights and load the layers. Raises StartupError."""
    try:
        weights = with_adapters(open_model(config.model_path), config.adapters)
        devices = replica_devices(config.devices, config.replica)
        backends = resolve_backends(weights.shape.version, devices, config)
        pipeline = Pipeline(
            weights,
            devices,
            config.dtype,
            backends["kernels"],
            backends["wkv_state"],
            config.layers,
            resident=config.resident,
            activation_bits=config.activation_bits,
            deterministic=config.deterministic,
        )
    except (WeightsError, ValueError) as error:
        raise StartupError(str(error)) from error
    return weights, pipeline


class ModelChecks:
    """Opens the model files that requests name. Uses a separate thread."""

    def __init__(self, refusal: Callable[[], ServiceError]) -> None:
        self._thread = FileThread("model-files", refusal, _to_service_error)

    def check(self, call: CheckModel, reply: Reply[str]) -> None:
        """Reply with a description of the file's model. The error of a reply names the file or an adapter."""
        self._thread.run(reply, lambda: _description(call), reply)

    def close(self) -> None:
        self._thread.close()


def _description(call: CheckModel) -> str:
    try:
        weights = open_model(call.file)
    except (WeightsError, ValueError) as error:
        raise invalid("file", str(error), None) from error
    try:
        return with_adapters(weights, call.adapters).shape.describe()
    except ValueError as error:
        raise invalid("adapters", str(error), None) from error
