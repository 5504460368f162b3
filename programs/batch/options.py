"""The command line of `batch`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from programs.batch import progress
from programs.batch.formats import FORMAT_NAMES
from programs.batch.sidecar import SUFFIX
from programs.batch.tasks import OUT_FIELDS, TASKS, TaskOptions
from programs.settings import CommandParser, SettingsError
from rwkv_batch.translation.documents import FORMATS

ERRORS_SUFFIX = ".errors.jsonl"
_DECODE: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "maximum generated tokens per line"),
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "0 switches it off"),
    "top_p": (float, "1 switches it off"),
    "alpha_presence": (float, "presence penalty"),
    "alpha_frequency": (float, "frequency penalty"),
    "alpha_decay": (float, "factor by which the counts of generated tokens decay"),
    "seed": (int, "line i uses seed + i; default: random"),
}
"""Body fields. docs/api.md has their limits and defaults."""
_FLAGS = {"stop_tokens": "--stop", "enable_think": "--think"}
_RARE = (
    *("--out-field", "--id-field", "--format", "--top-k", "--top-p", "--alpha-presence", "--alpha-frequency"),
    *("--alpha-decay", "--seed", "--stop", "--order", "--retry", "--errors", "--dedupe", "--shard", "--progress"),
    *("--max-in-flight", "--think", "--source-lang", "--fresh", "--glossary"),
)
"""Flags that only --help-all shows."""
_SERVICE_FLAGS = ("--password", "--password-file", "--log-format", "--log-level")
"""Settings that are allowed with --url."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that `batch` and `translate` share. The engine's flags are settings."""

    input: str
    output: str = ""
    form: str = ""
    """Input format. "": by the input's name."""
    glossary: str = ""
    limit: int = 0
    url: str = ""
    """URL of a service. "": an engine in this process."""
    max_in_flight: int = 0
    retry: int = 8
    fresh: bool = False
    progress: str = "auto"


class Options(RunOptions, frozen=True, kw_only=True):
    """Options of a run over lines."""

    task_options: TaskOptions
    out_field: str
    id_field: str = ""
    order: str = "keep"
    errors: str = ""
    dedupe: bool = False
    shard: tuple[int, int] = (1, 1)
    dry_run: bool = False


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"must be i/n with 1 <= i <= n, got {text!r}")
    return int(part), int(parts)


def _unescaped(text: str) -> str:
    r"""Replaces \n by a line break and \t by a tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _template(text: str) -> str:
    """Returns the template, read from a file if the text is @FILE."""
    if not text.startswith("@"):
        return _unescaped(text)
    try:
        with open(text[1:], encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot be read: {error}") from None


def build_parser() -> CommandParser:
    """Returns the parser of `batch`. Other flags are the service's."""
    parser = CommandParser(
        "batch",
        "Answers every line of a file. Give the same command again to resume a stopped run. Takes the engine's flags "
        "of serve too: --model-path, --pp-devices, --dtype ...",
        "lines.txt -o lines.zh.txt --target-lang zh\nquestions.csv -o answers.csv --task chat --field question",
        takes_settings=True,
    )
    parser.add_argument(
        "input",
        metavar="INPUT",
        help="JSONL, CSV, TSV or text, also .gz or .zst, or a document to translate; -: standard input",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUTPUT",
        help="output file, in the input's format or .jsonl; -: standard output",
    )
    _add_task(parser)
    _add_decoding(parser)
    _add_running(parser)
    parser.hide(*_RARE)
    return parser


def build_translate_parser() -> CommandParser:
    """Return the parser of `translate`. Other flags are the service's."""
    parser = CommandParser(
        "translate",
        "Translates a file. Give the same command again to resume a stopped run. Takes the engine's flags too: "
        "--model-path, --pp-devices, --dtype ...",
        "report.docx -t zh\nbook.epub -t en -o book.en.epub --url http://127.0.0.1:8000",
        takes_settings=True,
    )
    add = parser.add_argument
    add("input", metavar="INPUT", help=f"a file: {', '.join(FORMATS)}")
    add("-t", "--target-lang", required=True, help="ISO code or English name of the language to translate into")
    add(
        "-o",
        "--output",
        default="",
        metavar="OUTPUT",
        help="output file; -: standard output; default: book.epub gives book.zh-CN.epub",
    )
    add("-s", "--source-lang", default="auto", help="ISO code or name; default: auto, detected for each text")
    add("--bilingual", action="store_true", help="keep each text, with its translation after it")
    add("--column", default="", help="column of a CSV or TSV file; default: text, or the only one")
    add("--instruction", default="", help='instruction for the model, like "Use short sentences."')
    add("--formality", choices=("default", "more", "less"), default="default", help="more or less formal")
    add(
        "--review",
        default="",
        metavar="FILE",
        help="write a CSV with each text, its translation and what may be wrong with it",
    )
    add("--encoding", default="", help="encoding of a text file; default: detected")
    _add_shared(add, FORMATS)
    parser.hide("--format", "--encoding", "--limit", "--max-in-flight", "--retry", "--progress")
    return parser


def _add_shared(add: Callable[..., Any], formats: Sequence[str]) -> None:
    """Add the flags of `RunOptions`."""
    about = "input format, if the name does not show it"
    add("--format", choices=formats, default="", dest="form", metavar="FORMAT", help=about)
    add("--glossary", default="", metavar="FILE", help="terms and translations: JSON, or CSV or TSV with two columns")
    add("--limit", type=count, default=0, help="number of lines or texts to process")
    about = "running service to use instead of an engine in this process; --password-file FILE has its password or key"
    add("--url", default="", help=about)
    about = "requests in flight; 0: 256 to a service, by memory for an engine in this process"
    add("--max-in-flight", type=count, default=0, help=about)
    add("--retry", type=count, default=8, help="retries while the service is busy or unreachable; default: 8")
    add("--fresh", action="store_true", help=f"start over: overwrite OUTPUT and OUTPUT{SUFFIX}")
    about = "auto: a bar on a terminal, otherwise plain lines"
    add("--progress", choices=progress.PROGRESS_FORMATS, default="auto", help=about)


def _add_task(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("task").add_argument
    add("--task", choices=TASKS, default="translate", help="default: translate")
    add("--source-lang", default="auto", help="ISO code or name; default: auto, detected per line")
    add("--target-lang", default="", help="required by translate")
    add("--field", default="text", help="field or column of the text; default: text")
    add("--out-field", default="", help="field or column of the answer; default: by the task")
    add("--id-field", default="", help="field that identifies a line in the error file")
    add(
        "--template",
        type=_template,
        default="",
        help="prompt with fields, e.g. 'Summarise: {text}'; @FILE reads a file",
    )


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling parameters (not for translate); defaults: docs/api.md")
    for name, (kind, text) in _DECODE.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    group.add_argument(
        "--stop", action="append", type=_unescaped, help="text that ends an answer (\\n: a line break); may be repeated"
    )
    group.add_argument("--think", action="store_true", help="enable thinking (chat)")


def _add_running(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the run").add_argument
    _add_shared(add, FORMAT_NAMES)
    add("--order", choices=("keep", "done"), default="keep", help="order of the output; done: as lines finish")
    add("--errors", default="", metavar="FILE", help=f"JSON lines of the failures; default: OUTPUT{ERRORS_SUFFIX}")
    add("--dedupe", action="store_true", help="answer equal lines once")
    add("--shard", type=_shard, default=(1, 1), help="i/n: every n-th line, starting at the i-th")
    add("--dry-run", action="store_true", help="count lines and tokens, and estimate the time from a sample")


def flag_of(name: str) -> str:
    """Returns the flag of a body field."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def parse_options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Returns the options and the arguments that are service settings. Raises SettingsError."""
    given, rest = build_parser().parse(arguments)
    decode = {name: value for name in _DECODE if (value := getattr(given, name)) is not None}
    if given.stop:
        decode["stop_tokens"] = [0, *given.stop]
    if given.think:
        decode["enable_think"] = True
    task_options = TaskOptions(
        task=given.task,
        field=given.field,
        template=given.template,
        source_lang=given.source_lang,
        target_lang=given.target_lang,
        decode=decode,
    )
    _check(given, task_options)
    names = {field.name for field in msgspec.structs.fields(Options)} - {"out_field"}
    values = {name: value for name, value in vars(given).items() if name in names}
    return Options(
        **values, task_options=task_options, out_field=given.out_field or OUT_FIELDS[task_options.task]
    ), rest


def _check(given: argparse.Namespace, task_options: TaskOptions) -> None:
    """Checks that no flags conflict. Raises SettingsError."""
    if task_options.task == "translate" and not task_options.target_lang:
        raise SettingsError("--target-lang must be given: the language to translate into")
    if task_options.task in ("translate", "score") and task_options.decode:
        name = flag_of(next(iter(task_options.decode)))
        raise SettingsError(f"{name} has no effect for {task_options.task}, which is deterministic; leave it out")
    for flag, is_given, tasks in (
        ("--glossary", given.glossary, ("translate",)),
        ("--source-lang", task_options.source_lang != "auto", ("translate",)),
        ("--target-lang", task_options.target_lang, ("translate",)),
        ("--think", given.think, ("chat",)),
        ("--template", task_options.template, ("translate", "chat", "complete", "score")),
    ):
        if is_given and task_options.task not in tasks:
            raise SettingsError(f"{flag} is for {', '.join(tasks)}, not for {task_options.task}; leave it out")
    if given.errors == "-":
        raise SettingsError(
            "--errors must name a file, got -; with --output - failures go to standard error without it"
        )


def check_settings(url: str, rest: Sequence[str]) -> None:
    """Checks that no engine settings are given with --url. Raises SettingsError."""
    names = [argument.partition("=")[0] for argument in rest if argument.startswith("--")]
    if url and (other := next((name for name in names if name not in _SERVICE_FLAGS), None)):
        raise SettingsError(f"{other} is a setting of an engine in this process, but --url asks a service; give one")
