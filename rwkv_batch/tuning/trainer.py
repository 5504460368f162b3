"""Trains and evaluates on documents, with checkpoints.

On a CPU, a run that continues from one gives the same bits.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from native.files import write_synced
from rwkv_batch.errors import StartupError
from rwkv_batch.tuning import Document
from rwkv_batch.tuning.files import load_checkpoint, saved
from rwkv_batch.tuning.model import TrainingModel, Tunables, new_tunables, parameters_of
from rwkv_batch.tuning.packing import Batch, aligned, pack

STATE, LORA, BOTH, FULL = "state", "lora", "state+lora", "full"
_STATE_RATE = 0.1
_LORA_RATE = 1.0
"""Divided by the width."""
_FULL_RATE = 0.05
"""Divided by the width."""
_FLOOR = 0.005
"""Last learning rate as a share of the peak."""
_AUTO_BATCHES, _MAX_AUTO_EPOCHS = 150, 25
_CHECKPOINT_S = 30.0
_VERSION = 3
"""of checkpoints and of what a step computes. The first one had no number."""
_ROW_TOKENS = 256
_CPU_BATCH, _GPU_BATCH = 512, 16384
"""Tokens of a step. On a CPU small steps are as fast, and more steps learn more from the same tokens."""


# torch's optimizers import torch._dynamo for two seconds, only to keep it from compiling these methods.
for _name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    _method: Any = inspect.unwrap(getattr(torch.optim.Optimizer, _name))
    _method.__dynamo_disable = _method
_ADAMW_STEP = inspect.unwrap(torch.optim.AdamW.step)


class DivergedError(StartupError):
    """The learning rate was too high: numbers are not finite."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rates: warm-up, plateau, then cosine decay."""

    steps: int
    warm_up: int
    plateau: float = 0.0
    """share of the steps before the decay"""

    def progress(self, step: int) -> float:
        """Return the share of the training that is done."""
        return step / self.steps

    def share(self, step: int) -> float:
        """Return the share of the peak learning rate at a step."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        falling = min(max((self.progress(step) - self.plateau) / (1 - self.plateau), 0.0), 1.0)
        return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * falling))


class Trainer:
    """AdamW steps over batches."""

    def __init__(
        self, model: TrainingModel, groups: list[dict[str, Any]], schedule: Schedule, dtype: torch.dtype
    ) -> None:
        """groups: AdamW's, each with its peak `lr`. dtype: of the products; bf16 runs them in autocast."""
        self.model, self.schedule, self._dtype = model, schedule, dtype
        self._peaks = [group["lr"] for group in groups]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.97), eps=1e-12)
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self.losses: list[float] = []

    def step(self, batch: Batch) -> float:
        """Train on a batch; return its loss. Raises DivergedError if that is not finite."""
        share = self.schedule.share(len(self.losses))
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * share
        loss = self.backward(batch)
        if not math.isfinite(loss):
            raise DivergedError(f"the loss of step {len(self.losses) + 1} is {loss}; give a lower learning rate")
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        with torch.no_grad():
            _ADAMW_STEP(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss)
        return self.losses[-1]

    def backward(self, batch: Batch) -> float:
        """Add a batch's gradients, piece by piece; return its loss."""
        total, loss = float(batch.weights.sum()), 0.0
        for piece in batch.pieces(self.model.plan.piece_rows):
            if (own := float(piece.weights.sum())) == 0:
                continue
            part = self.loss(piece) * (own / total)
            part.backward()
            loss += float(part.detach())
        return loss

    def loss(self, batch: Batch) -> Tensor:
        """Return a batch's loss [] with its graph."""
        loss: Tensor = self._with_counted(batch, self.model.loss)
        return loss

    def _with_counted(self, batch: Batch, function: Callable[..., Any]) -> Any:
        """Call a function with the tokens that count in the loss.

        It gets hidden [N, C], targets [N] and weights [N].
        """
        batch = batch.to(self.model.device)
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._dtype is torch.bfloat16):
            hidden = self.model.hidden(batch.inputs, batch.begins)
            counts = batch.weights > 0
            return function(hidden[counts], batch.targets[counts], batch.weights[counts])

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """Return the loss of batches, and the share of right tokens.

        A token is right if greedy sampling would choose it.
        """
        losses, right, total = 0.0, 0.0, 0.0
        for batch in (piece for one in batches for piece in one.pieces(self.model.plan.piece_rows)):

            def scored(hidden: Tensor, targets: Tensor, weights: Tensor) -> tuple[float, float, float]:
                loss, is_right = self.model.scores(hidden, targets)
                return float((loss * weights).sum()), float((is_right * weights).sum()), float(weights.sum())

            found = self._with_counted(batch, scored)
            losses, right, total = losses + found[0], right + found[1], total + found[2]
        return Evaluation(losses / max(total, 1e-9), right / max(total, 1e-9))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of held-out answers."""

    loss: float
    """mean cross-entropy of a token, nats"""
    accuracy: float
    """share of tokens that are the most likely one"""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """How documents are tuned. Zeros are chosen from the data, the model and the device."""

    method: str = STATE
    rank: int = 16
    epochs: int = 0
    batch_tokens: int = 0
    learning_rate: float = 0.0
    rate_multiplier: float = 1.0
    seed: int = 0
    patience: int = 3
    """evaluations without a better one after which the tuning ends"""
    dtype: str = "auto"
    """int8, fp8: the large matrices stay quantised; auto: the device's dtype"""


@dataclass(slots=True)
class Progress:
    """What a tuning has done. It is in the checkpoint."""

    epoch: int = 0
    batch: int = 0
    """next batch of the epoch"""
    best: float = math.inf
    """lowest loss of held-out documents"""
    stale: int = 0
    """evaluations since then"""
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    """(steps, loss, accuracy) of the held-out documents"""
    trained_tokens: int = 0
    is_done: bool = False


class Tuning:
    """Tunes a state, a LoRA or all weights on documents."""

    def __init__(
        self,
        model: TrainingModel,
        documents: Sequence[Document],
        held_out: Sequence[Document],
        options: TuneOptions,
        dtype: torch.dtype,
        identity: str,
        checkpoint: Path | None = None,
    ) -> None:
        """identity: of model and data, with which a checkpoint must agree. Raises StartupError."""
        self._documents, self._options, self._checkpoint = documents, options, checkpoint
        self._rows, self._time = batch_shape(documents, held_out, options, model.device)
        self._data_identity = identity
        self._identity = f"{identity} {asdict(options)} {self._rows} x {self._time} {model.device.type} {dtype}"
        self._held_out = list(pack(held_out, self._rows, self._time))
        epochs = options.epochs or auto_epochs(self.batches_per_epoch)
        self.steps = epochs * self.batches_per_epoch
        self.epochs = epochs
        model.tunables = new_tunables(model.shape, options.method, options.rank, model.device, options.seed)
        self._parameters = list(parameters_of(model, options.method == FULL))
        groups = _groups(model, options, self._parameters)
        self.trainer = Trainer(model, groups, Schedule(self.steps, min(20, -(-self.steps // 10))), dtype)
        self.progress = Progress()
        self.final: Evaluation | None = None
        """of the held-out documents with the best parameters, after the run"""
        self._best: list[Tensor] = [parameter.detach().clone() for parameter in self._parameters]
        self.has_restarted = False
        """whether the checkpoint is one of another version, which cannot be continued"""
        self._saved = time.monotonic()
        if checkpoint is not None and checkpoint.exists():
            self._resume(checkpoint)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of the first epoch."""
        return sum(1 for _ in self._batches(0))

    def first_batch(self) -> Batch:
        """Return the first batch of the first epoch."""
        return next(self._batches(0))

    def _batches(self, epoch: int) -> Iterator[Batch]:
        """Yield an epoch's batches; seed and epoch determine their order."""
        order = list(self._documents)
        Random(f"{self._options.seed}/{epoch}").shuffle(order)
        return pack(order, self._rows, self._time)

    def run(self, on_step: Callable[[Tuning], bool]) -> bool:
        """Train to the end. Returns whether it was reached. Raises DivergedError for numbers that are not finite.

        `on_step` is called after each step; False stops the training.
        """
        state = self.progress
        if not state.evaluations:
            self._evaluate()
        while not state.is_done:
            for index, batch in enumerate(self._batches(state.epoch)):
                if index < state.batch:
                    continue
                self.trainer.step(batch)
                state.batch = index + 1
                state.trained_tokens += int((batch.weights > 0).sum())
                if time.monotonic() - self._saved > _CHECKPOINT_S:
                    self.save()
                if not on_step(self):
                    self.save()
                    return False
            state.epoch, state.batch = state.epoch + 1, 0
            self._evaluate()
            state.is_done = state.epoch >= self.epochs or state.stale >= self._options.patience
            self.save()
        if not all(bool(value.isfinite().all()) for value in self._best):
            raise DivergedError("the last step made numbers that are not finite; give a lower learning rate")
        self._set_parameters([value.bfloat16() for value in self._best])  # as they are written
        self.final = self.trainer.evaluate(self._held_out) if self._held_out else None
        return True

    def _evaluate(self) -> None:
        state = self.progress
        found = self.trainer.evaluate(self._held_out) if self._held_out else None
        if found is not None and math.isfinite(found.loss):
            state.evaluations.append((len(self.trainer.losses), found.loss, found.accuracy))
        elif found is not None and not state.evaluations:
            raise StartupError(f"the held-out loss of the untuned model is {found.loss}; use another model")
        if found is None or found.loss < state.best:
            state.best, state.stale = found.loss if found is not None else state.best, 0
            self._best = [parameter.detach().clone() for parameter in self._parameters]
        else:
            state.stale += 1

    def _set_parameters(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)

    def save(self) -> None:
        """Write a checkpoint, synced before it gets its name. Raises OSError."""
        self._saved = time.monotonic()
        if self._checkpoint is None:
            return
        content = {
            "version": _VERSION,
            "identity": self._identity,
            "parameters": [parameter.detach() for parameter in self._parameters],
            "best": self._best,
            "optimizer": self.trainer.optimizer.state_dict(),
            "losses": self.trainer.losses,
            "progress": asdict(self.progress),
        }
        write_synced(self._checkpoint, saved(content))

    def _resume(self, path: Path) -> None:
        found = load_checkpoint(path, self.trainer.model.device)
        identity = found.get("identity")
        is_same_data = isinstance(identity, str) and identity.startswith(f"{self._data_identity} ")
        if is_same_data and found.get("version") != _VERSION:
            self.has_restarted = True
            return
        if identity != self._identity:
            raise StartupError(
                f"{path} is the checkpoint of a tuning with other data, model or settings; give another name, or "
                "delete the file to begin anew"
            )
        self._set_parameters(found["parameters"])
        self._best = found["best"]
        self.trainer.optimizer.load_state_dict(found["optimizer"])
        self.trainer.losses = found["losses"]
        self.progress = Progress(**found["progress"])
        self.progress.evaluations = [one for one in self.progress.evaluations if math.isfinite(one[1])]


def batch_shape(
    documents: Sequence[Document], held_out: Sequence[Document], options: TuneOptions, device: torch.device
) -> tuple[int, int]:
    """Return the rows of a batch and the tokens of a row. No more rows than the documents can fill."""
    longest = max(len(document) for document in [*documents, *held_out])
    row_tokens = max(_ROW_TOKENS, aligned(longest))
    batch_tokens = options.batch_tokens or (_CPU_BATCH if device.type == "cpu" else _GPU_BATCH)
    # A row ends where the next row's first document did not fit: any two have more than `row_tokens`.
    whole_rows = -(-sum(aligned(len(document)) for document in documents) // row_tokens)
    return max(1, min(batch_tokens // row_tokens, len(documents), 2 * whole_rows - 1)), row_tokens


def auto_epochs(batches: int) -> int:
    """Return the passes over the data: about 150 steps, 1 to 25 epochs."""
    return max(1, min(_MAX_AUTO_EPOCHS, -(-_AUTO_BATCHES // max(batches, 1))))


def _groups(model: TrainingModel, options: TuneOptions, parameters: list[Tensor]) -> list[dict[str, Any]]:
    """Return AdamW's groups with their peak learning rates."""
    width = model.shape.width

    def group(params: list[Tensor], rate: float) -> dict[str, Any]:
        peak = (options.learning_rate or rate) * options.rate_multiplier
        return {"params": params, "lr": peak, "weight_decay": 0.01}

    if options.method == FULL:
        return [group(parameters, _FULL_RATE / width)]
    tunables: Tunables = model.tunables
    pairs = [one for pair in tunables.pairs.values() for one in pair]
    found = [(tunables.states, _STATE_RATE), (pairs, _LORA_RATE / width)]
    return [group(params, rate) for params, rate in found if params]
