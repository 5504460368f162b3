"""The command `tune`: makes a tuned state, a LoRA or a tuned model from a file of examples."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from native.files import write_synced
from native.priority import cores, die_with_parent, lower_process_priority
from programs.settings import CommandParser, parse_settings, reports_errors
from programs.settings.model_file import with_default_model
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.process import set_compute_environment
from rwkv_batch.tuning import COMPACT_DTYPES, Document, paced_path

if TYPE_CHECKING:
    from routes.fine_tuning.data import Data
    from rwkv_batch.tuning.trainer import Tuning

OK, NO_SPACE, STOPPED = 0, 75, 130
"""Exit codes. NO_SPACE: the disk is full. STOPPED: by a signal. The same command continues after both."""
METHODS = ("state", "lora", "state+lora", "full")
_ENDINGS = (".csv", ".png", ".state.pth", ".lora.pth", ".pth", ".peft", ".checkpoint", ".lock")
"""Of the files that a run writes."""
_PADDING = 8
"""Tokens that align a line, about."""


def _between(low: float, high: float, kind: type[int] | type[float] = int) -> Callable[[str], Any]:
    def parse(text: str) -> float:
        number = kind(text)
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"must be {low:g} to {high:g}, got {text}")
        return number

    return parse


def build_parser() -> CommandParser:
    parser = CommandParser(
        "tune",
        "Tunes a model on examples: JSON lines of chats (`messages`) or of `prompt` and `completion`, or a CSV or TMX "
        "of translations. Writes NAME.state.pth for --state, or NAME.lora.pth for --adapter-serve and --adapter.",
        "examples.jsonl -o pirate --model-path model.pth",
    )
    number, share = _between, _between(0, 0.5, float)
    parser.add_argument("data", type=Path, metavar="DATA", help="a .jsonl, .csv or .tmx file")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="NAME", help="start of the results' names")
    parser.add_argument("--model-path", default="", metavar="FILE", help="the model (default: the demo model)")
    parser.add_argument("--adapter", action="append", default=[], metavar="FILE", help="adapter to merge first")
    parser.add_argument("--method", choices=METHODS, default="state", help="what to tune (default: state)")
    parser.add_argument("--rank", type=number(1, 128), default=16, help="of a LoRA (default: 16)")
    parser.add_argument(
        "--dtype", choices=("auto", *COMPACT_DTYPES), default="auto", help="int8, fp8: weights stay so (default: auto)"
    )
    parser.add_argument("--epochs", type=number(1, 1000), default=0, help="passes over the data (default: by its size)")
    step, evaluation = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    step.add_argument("--batch-tokens", type=number(256, 1 << 20), default=0, help="tokens of a step")
    step.add_argument("--batch-lines", type=number(1, 4096), default=0, help="lines of a step, instead of tokens")
    parser.add_argument("--learning-rate", type=number(1e-7, 10, float), default=0.0, help="peak (default: by method)")
    parser.add_argument("--rate-multiplier", type=number(1e-3, 1e3, float), default=1.0, help=argparse.SUPPRESS)
    evaluation.add_argument(
        "--held-out", type=share, default=0.1, help="share of lines to evaluate with (default: 0.1)"
    )
    evaluation.add_argument("--validation", type=Path, metavar="DATA", help="a file of lines to evaluate with instead")
    parser.add_argument("--max-tokens", type=number(16, 1 << 17), default=0, help="of a line (default: 4096)")
    parser.add_argument("--seed", type=number(0, 2**31 - 1), default=0, help="of the order and the LoRA's start")
    parser.add_argument("--device", default="auto", help="cpu, cuda:0 ... (default: auto)")
    parser.add_argument("--threads", type=number(1, 1024), default=0, help="CPU threads (default: all cores)")
    parser.add_argument("--background", action="store_true", help="low CPU priority, and half of the cores by default")
    parser.add_argument("--dry-run", action="store_true", help="check the data; print tokens, memory and time")
    parser.add_argument("--json", action="store_true", help="print progress as JSON lines")
    parser.hide("--adapter", "--batch-tokens", "--batch-lines", "--validation", "--max-tokens", "--seed", "--threads")
    return parser


@reports_errors(StartupError, OSError)
def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code."""
    given, _ = build_parser().parse(arguments)
    try:
        return _Command(given).run()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stderr.write(f"error: the disk of {given.output} is full; free space on it, then run this again\n")
        return NO_SPACE


class _Command:
    """One run: the data, the tuning, and what is printed."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._is_stopped = False
        self._bar: tqdm | None = None
        self._reported = 0

    def run(self) -> int:
        """Tune, and return the exit code. Raises StartupError, OSError."""
        given = self._given
        if given.background:
            if parent := os.environ.get("RWKV_SUPERVISOR"):  # a job of a service
                die_with_parent()
                if os.getppid() != int(parent):  # it was killed meanwhile
                    return STOPPED
            lower_process_priority()
        self._keep_inputs()
        if given.dry_run:
            return self._run()
        given.output.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            return self._run()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other runs from these files. A service's job waits for its earlier process. Raises StartupError."""
        path = self._given.output.with_name(f"{self._given.output.name}.lock")
        is_job = self._given.background and "RWKV_SUPERVISOR" in os.environ
        while True:
            with path.open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | (0 if is_job else fcntl.LOCK_NB))
                except BlockingIOError:
                    message = f"-o {self._given.output} is used by another run; wait for it, or give another name"
                    raise StartupError(message) from None
                if not os.fstat(file.fileno()).st_nlink:  # the other run has just ended
                    continue
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return

    def _run(self) -> int:
        set_compute_environment()
        from rwkv_batch.runner.calibration import MeasuredInputs
        from rwkv_batch.tuning.pacing import Pacer
        from rwkv_batch.tuning.run import choose_place, configure_process, measure_step_s, open_model, prepare
        from rwkv_batch.tuning.trainer import DivergedError, TuneOptions

        given = self._given
        self._refuse_taken_names()
        documents, held_out, warnings = self._documents()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        place = choose_place(given.device)
        configure_process(place, given.threads or (max(1, cores() // 2) if given.background else 0))
        weights = open_model(self._model_path(), given.adapter)
        batch_tokens = given.batch_tokens
        if given.batch_lines:
            batch_tokens = given.batch_lines * (-(-sum(map(len, documents)) // len(documents)) + _PADDING)
        options = TuneOptions(
            given.method, given.rank, given.epochs, batch_tokens, given.learning_rate, given.rate_multiplier,
            given.seed, dtype=given.dtype,
        )  # fmt: skip
        checkpoint = given.output.with_name(f"{given.output.name}.checkpoint")
        is_paced = given.background and place.device.type == "cuda"
        pacer = Pacer(paced_path(given.output), place.device) if is_paced else None
        tuning = prepare(
            weights, documents, held_out, options, place, None if given.dry_run else checkpoint, pacer,
            MeasuredInputs(weights, place.device),
        )  # fmt: skip
        if tuning.has_restarted:
            warnings.append("the checkpoint is of another version of this program; the tuning starts again")
        figures = {
            "lines": len(documents), "held_out_lines": len(held_out), "steps": tuning.steps, "epochs": tuning.epochs,
            "batch_lines": -(-len(documents) // max(1, tuning.batches_per_epoch)),
            "tokens": sum(map(len, documents)), "answer_tokens": int(sum(sum(one.weights) for one in documents)),
        }  # fmt: skip
        self._report("data", {**figures, "warnings": warnings})
        if given.dry_run:
            seconds = measure_step_s(tuning) * tuning.steps
            self._report(
                "plan",
                {
                    "memory_gib": round(tuning.trainer.model.plan.needed_bytes / 2**30, 2),
                    "minutes": round(seconds / 60, 1),
                },
            )
            return OK
        began = time.monotonic()
        try:
            is_done = tuning.run(self._on_step)
        except DivergedError:
            checkpoint.unlink(missing_ok=True)  # a lower rate begins again
            raise
        if not is_done:
            self._close_bar()
            self._report("stopped", {"step": len(tuning.trainer.losses), "checkpoint": str(checkpoint)})
            return STOPPED
        self._close_bar()
        self._finish(tuning, time.monotonic() - began)
        checkpoint.unlink(missing_ok=True)
        return OK

    def _keep_inputs(self) -> None:
        """Raises StartupError if a result would overwrite an input."""
        from rwkv_batch.model.adapters.files import split_scale

        given = self._given
        if given.output.name in ("", ".."):
            raise StartupError(f"-o {given.output} must end with a name, as in results/mine")
        inputs = [given.data, given.validation, given.model_path, *(split_scale(entry)[0] for entry in given.adapter)]
        read = {Path(one).resolve() for one in inputs if one}
        for ending in _ENDINGS:
            path = given.output.with_name(given.output.name + ending)
            if any(path.resolve() in (one, one.parent) for one in read):
                raise StartupError(f"-o {given.output} would overwrite {path}; give another name")

    def _refuse_taken_names(self) -> None:
        """Raises StartupError for a folder where a result is a file, or the other way round."""
        for ending in _ENDINGS:
            path = self._given.output.with_name(self._given.output.name + ending)
            if path.exists() and path.is_dir() is not (ending == ".peft"):
                kind = "folder" if path.is_dir() else "file"
                raise StartupError(f"{path} is a {kind}, where a result is written; move it, or give -o another name")

    def _model_path(self) -> str:
        path: str = self._given.model_path
        if path and Path(path).exists():  # else a name of the hub, or an error
            return path
        arguments = ["--model-path", path] if path else []
        return with_default_model(parse_settings(arguments, os.environ)).engine.model_path

    def _documents(self) -> tuple[list[Document], list[Document], list[str]]:
        """Return the lines to train on, the held-out ones, and warnings. Raises StartupError for a bad file."""
        from routes.fine_tuning.data import MAX_HELD_OUT, split, validation_warnings

        data = self._read(self._given.data)
        if self._given.validation is not None:
            held = self._read(self._given.validation)
            return data.examples, held.examples[:MAX_HELD_OUT], data.warnings + validation_warnings(data, held)
        return *split(data.examples, self._given.held_out), data.warnings

    def _read(self, path: Path) -> Data:
        from routes.fine_tuning.data import MAX_TOKENS, read_data

        data = read_data(path.read_bytes(), path.name, self._given.max_tokens or MAX_TOKENS)
        if data.problems:
            shown = "\n".join(f"  {problem}" for problem in data.problems)
            raise StartupError(f"{path} has errors; correct these lines:\n{shown}")
        return data

    def _stop(self, number: int, frame: object) -> None:
        self._is_stopped = True

    def _on_step(self, tuning: Tuning) -> bool:
        losses = tuning.trainer.losses
        evaluations = tuning.progress.evaluations
        if self._given.json:
            self._report_evaluations(tuning)
            self._report("step", {"step": len(losses), "train_loss": losses[-1]})
        else:
            if self._bar is None:
                self._bar = tqdm(total=tuning.steps, initial=len(losses) - 1, unit="step", file=sys.stderr)
            held_out = {"held_out": f"{evaluations[-1][1]:.3f}"} if evaluations else {}
            self._bar.set_postfix(loss=f"{losses[-1]:.3f}", **held_out, refresh=False)
            self._bar.update()
        return not self._is_stopped

    def _report_evaluations(self, tuning: Tuning) -> None:
        evaluations = tuning.progress.evaluations
        for step, loss, accuracy in evaluations[self._reported :]:
            self._report("evaluation", {"step": step, "valid_loss": loss, "valid_mean_token_accuracy": accuracy})
        self._reported = len(evaluations)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _finish(self, tuning: Tuning, seconds: float) -> None:
        """Write the results and report them."""
        from rwkv_batch.tuning.curve import loss_curve, sparkline
        from rwkv_batch.tuning.files import loss_table, write_results

        losses, evaluations = tuning.trainer.losses, tuning.progress.evaluations
        paths = write_results(tuning.trainer.model, self._given.output, self._given.method == "full")
        table = loss_table(losses, evaluations).encode()
        for suffix, content in ((".csv", table), (".png", loss_curve(losses, evaluations))):
            paths.append(self._given.output.with_name(self._given.output.name + suffix))
            write_synced(paths[-1], content)
        result: dict[str, Any] = {"files": [str(path) for path in paths], "steps": len(losses)}
        result |= {"trained_tokens": tuning.progress.trained_tokens, "seconds": round(seconds, 1), "warnings": []}
        if tuning.final is not None:
            _, before, accuracy = evaluations[0]
            result["best_step"] = min(evaluations, key=lambda one: one[1])[0]
            result["before"] = {"loss": round(before, 4), "token_accuracy": round(accuracy, 4)}
            result["after"] = {
                "loss": round(tuning.final.loss, 4), "token_accuracy": round(tuning.final.accuracy, 4)
            }  # fmt: skip
            if tuning.final.loss >= before:
                result["warnings"].append("the held-out lines got no better; give more lines or a lower learning rate")
        else:
            result["warnings"].append("no lines were held out: what the tuning did was not measured")
        if self._given.json:
            self._report_evaluations(tuning)
        else:
            sys.stderr.write(f"loss {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f}\n")
        self._report("done", result)

    def _report(self, event: str, values: dict[str, Any]) -> None:
        if self._given.json:
            sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
            sys.stdout.flush()
            return
        for warning in values.pop("warnings", ()):
            sys.stderr.write(f"warning: {warning}\n")
        for name, value in values.items():
            sys.stdout.write(f"{name.replace('_', ' ')}: {', '.join(value) if isinstance(value, list) else value}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
