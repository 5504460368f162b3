"""The command `tune`: data files, results, checkpoints and what it prints."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from PIL import Image

from demo.random_weights import write_random_model
from programs import tune
from routes.fine_tuning.data import MAX_ERRORS, UnknownFields, check_data, read_data, split
from rwkv_batch.errors import StartupError
from rwkv_batch.model.adapters.files import read_adapter
from rwkv_batch.model.adapters.per_row import per_row_adapter
from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.tuned_state import read_tuned_state
from rwkv_batch.model.weights import Weights, open_weights
from rwkv_batch.tokenizer import Tokenizer
from rwkv_batch.tuning import run as tuning_run
from rwkv_batch.tuning import trainer
from rwkv_batch.tuning.curve import _DIGITS, _label, loss_curve
from rwkv_batch.tuning.model import MemoryPlan
from rwkv_batch.tuning.packing import pack
from rwkv_batch.tuning.run import Place, open_model, plan_memory, prepare
from rwkv_batch.tuning.trainer import TuneOptions, Tuning

pytestmark = pytest.mark.slow


def chat(asked: str, answer: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], **fields}


def as_file(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines), encoding="utf-8")
    return path


TWO = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LINES = [chat(f"Say {i}.", f"The number is {i}.") for i in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model") / "m.pth", 2, 64)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restores the signal handlers that the command sets."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(*arguments: object) -> int:
    return tune.main([*map(str, arguments), "--threads", "1", "--batch-tokens", "512"])


def test_a_state_and_a_lora_are_tuned_and_load(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = as_file(tmp_path / "d.jsonl", LINES), tmp_path / "out" / "both"
    assert run(data, "-o", out, "--model-path", model, "--method", "state+lora", "--rank", 4, "--epochs", 3) == tune.OK
    printed = capsys.readouterr()
    assert "held out lines: 2" in printed.out and "before: {'loss'" in printed.out and "loss" in printed.err
    weights = open_weights(model)
    assert read_tuned_state(Path(f"{out}.state.pth"), weights.shape).wkv.abs().sum() > 0
    native, theirs = (
        read_adapter(Path(f"{out}.{ending}"), scale) for ending, scale in (("lora.pth", 1.0), ("peft", None))
    )
    assert per_row_adapter(weights, native).rank == 4 and theirs.scale_of("blocks.1.ffn.key") == 1
    assert native.parts.keys() == theirs.parts.keys()
    assert theirs.config == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": 4, "lora_alpha": 4,
        "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": ["attn.k_proj", "attn.o_proj", "attn.r_proj", "attn.v_proj", "ffn.key", "ffn.value"],
    }  # fmt: skip
    for target, pair in native.parts.items():
        assert all(torch.equal(tensor, theirs.parts[target][name]) for name, tensor in pair.items())
    table = Path(f"{out}.csv").read_text().splitlines()
    assert table[0].startswith("step,train_loss") and float(table[-1].split(",")[1]) < float(table[1].split(",")[1])
    held = {float(row[2]): int(row[0]) for line in table[1:] if (row := line.split(","))[2]}
    assert f"best step: {held[min(held)]}\n" in printed.out and not list(out.parent.glob("*checkpoint*"))
    with Image.open(f"{out}.png") as picture:
        colours = {colour: count for count, colour in picture.convert("RGB").getcolors() or ()}
    assert picture.size == (800, 400) and colours[0xCC, 0x44, 0x00] > colours[0x88, 0xAA, 0xBB] > 300


def test_all_lines_are_trained_on_without_held_out_ones(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = as_file(tmp_path / "d.jsonl", LINES[:6]), tmp_path / "all"
    assert run(data, "-o", out, "--model-path", model, "--held-out", 0, "--epochs", 1) == tune.OK
    printed = capsys.readouterr()
    assert "lines: 6" in printed.out and "held out lines: 0" in printed.out and "nan" not in printed.out + printed.err
    assert "nan" not in Path(f"{out}.csv").read_text()


def test_every_evaluation_is_reported(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last epoch's was not: there is no step after it."""
    data = as_file(tmp_path / "d.jsonl", LINES[:6])
    options = ("--epochs", 1, "--held-out", 0.3, "--json")
    assert run(data, "-o", tmp_path / "x", "--model-path", model, *options) == tune.OK
    events = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [one["step"] for one in events if one["event"] == "evaluation"] == [0, events[0]["steps"]]
    assert [one["event"] for one in events[1:3]] == ["evaluation", "step"]
    assert events[-1]["event"] == "done"


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = as_file(tmp_path / "d.jsonl", [*LINES[:6], LINES[0]])
    assert run(data, "-o", tmp_path / "x", "--model-path", model, "--dry-run", "--json") == tune.OK
    about, plan = map(json.loads, capsys.readouterr().out.splitlines())
    assert about["lines"] == 7 and about["warnings"] == [
        "1 of 7 lines repeat another one",
        "only 6 lines differ; 20 or more make a useful result likely",
    ]
    assert plan["memory_gib"] > 0 and list(tmp_path.iterdir()) == [data]
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_job_whose_service_was_killed_meanwhile_does_not_begin(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    """The kernel ends it with its parent only from then on."""
    monkeypatch.setenv("RWKV_SUPERVISOR", str(os.getppid() + (not is_alive)))
    for name in ("die_with_parent", "lower_process_priority"):
        monkeypatch.setattr(tune, name, lambda: None)
    data = as_file(tmp_path / "data.jsonl", LINES)
    code = run(data, "-o", tmp_path / "x", "--model-path", model, "--background", "--dry-run")
    assert code == (tune.OK if is_alive else tune.STOPPED)


def test_too_little_memory_and_wrong_flags_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = as_file(tmp_path / "d.jsonl", LINES)
    monkeypatch.setattr("rwkv_batch.tuning.run.free_memory", lambda: 1 << 20)
    assert run(data, "-o", tmp_path / "x", "--model-path", model) == 1
    assert "GiB are free; lower --batch-tokens" in capsys.readouterr().err
    assert run(data, "-o", tmp_path / "x", "--rank", 0) == 2
    assert "must be 1 to 128, got 0" in capsys.readouterr().err
    for pair in (("--batch-lines", 4), ("--held-out", 0.1, "--validation", data)):  # `run` gives --batch-tokens
        assert run(data, "-o", tmp_path / "x", *pair) == 2 and "not allowed with" in capsys.readouterr().err


def test_memory_is_planned_for_rows_that_the_data_fills(model: Path, tmp_path: Path) -> None:
    """A step of 1,048,576 tokens was refused for 24 lines."""
    data = as_file(tmp_path / "d.jsonl", LINES)
    documents = read_data(data.read_bytes(), data.name).examples * 40
    place, options = Place(torch.device("cpu"), torch.float32), TuneOptions(batch_tokens=1 << 20)
    rows, time = trainer.batch_shape(documents, [], options, place.device)
    for seed in range(20):
        Random(seed).shuffle(documents)
        every = list(pack(documents, 4096, time))
        assert len(every) == 1 and rows / 2 < len(every[0].inputs) <= rows
    assert trainer.batch_shape(documents[:1], [], options, place.device) == (1, time)


def test_a_second_run_with_the_same_output_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both wrote one checkpoint."""
    data, errors = as_file(tmp_path / "d.jsonl", LINES), []

    def second(*_: object) -> bool:
        monkeypatch.undo()
        monkeypatch.setattr(tune, "lower_process_priority", lambda: None)  # of the tests
        for background in ((), ("--background",)):  # it waited, and trained again
            assert run(data, "-o", tmp_path / "x", "--model-path", model, *background) == 1
        errors.append(capsys.readouterr().err)
        return True

    monkeypatch.setattr(tune._Command, "_on_step", second)
    given = data, "-o", tmp_path / "x", "--model-path", model, "--epochs", 1
    assert run(*given) == tune.OK and "x is used by another run; wait for it, or give another name" in errors[0]
    assert run(*given) == tune.OK and not (tmp_path / "x.lock").exists()


def test_results_do_not_overwrite_what_was_given(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of losses replaced the user's own pairs.csv, and a tuned model its base."""
    data = tmp_path / "pairs.csv"
    data.write_text("prompt,completion\na,b\n")
    assert run(data, "-o", tmp_path / "pairs", "--model-path", model) == 1
    assert "pairs would overwrite" in capsys.readouterr().err and data.read_text().startswith("prompt")
    assert run(data, "-o", model.with_suffix(""), "--model-path", model, "--method", "full") == 1
    assert "m.pth; give another name" in capsys.readouterr().err
    assert run(data, "-o", ".", "--model-path", model) == 1 and "must end with a name" in capsys.readouterr().err
    (tmp_path / "p.peft").mkdir()
    for ending, scale in ((".lora.pth", ":0.5"), (".peft", ""), (".peft/adapter_model.safetensors", ":1")):
        given = "--adapter", f"{tmp_path}/p{ending}{scale}", "--method", "lora"
        assert run(data, "-o", tmp_path / "p", "--model-path", model, *given) == 1
        assert f"would overwrite {tmp_path}/p{ending.partition('/')[0]}" in capsys.readouterr().err
    (tmp_path / "a.state.pth").mkdir()
    (tmp_path / "b.peft").touch()
    for name, kind in (("a", "a.state.pth is a folder"), ("b", "b.peft is a file")):  # known only after the training
        assert run(data, "-o", tmp_path / name, "--model-path", model) == 1 and kind in capsys.readouterr().err
    assert run(data, "-o", tmp_path / "new", "--device", "meta", "--model-path", model) == 1
    assert "give cpu or cuda:0" in capsys.readouterr().err
    assert run(data, "-o", tmp_path / "new", "--device", "mps", "--model-path", model) == 1  # named a PyTorch operator
    assert "--device mps cannot be used (a model is tuned on a CPU or an NVIDIA GPU)" in capsys.readouterr().err


def test_a_result_without_held_out_lines_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = as_file(tmp_path / "d.jsonl", LINES)
    given = (data, "-o", tmp_path / "new", "--model-path", model, "--epochs", "1")
    assert (
        run(*given, "--held-out", "0") == tune.OK and "what the tuning did was not measured" in capsys.readouterr().err
    )
    assert run(*given) == tune.OK and "not measured" not in capsys.readouterr().err


def test_a_run_that_diverged_leaves_no_checkpoint(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same name with a lower rate, as the error advises, was refused."""
    data, checkpoint = as_file(tmp_path / "d.jsonl", LINES), tmp_path / "new.checkpoint"
    given = (data, "-o", tmp_path / "new", "--model-path", model, "--epochs", "6", "--learning-rate")
    backward = trainer.Trainer.backward

    def diverging(self: trainer.Trainer, batch: trainer.Batch) -> float:
        return math.nan if checkpoint.exists() else backward(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "backward", diverging)
        assert run(*given, "0.2") == 1 and not checkpoint.exists()
    assert run(*given, "0.01") == tune.OK


def test_a_full_disk_has_its_own_exit_code(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service tries such a job again; it lost its checkpoint."""

    def full(path: Path, content: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(trainer, "write_synced", full)
    data = as_file(tmp_path / "d.jsonl", LINES)
    assert run(data, "-o", tmp_path / "x", "--model-path", model, "--epochs", 1) == tune.NO_SPACE
    assert f"the disk of {tmp_path / 'x'} is full; free space" in capsys.readouterr().err


TOOLS: list[object] = [{"type": "function", "function": {"name": "f"}}]


def called(name: str, arguments: str, tools: list[object]) -> dict[str, object]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": "a"}, answer], "tools": tools}


BAD = {
    "not json": "3: the line is not JSON: expected ident at its character 2",
    '{"prompt": "a"': "3: the line is not JSON: EOF while parsing an object at its character 14",
    "[]": "3: the line must be a JSON object",
    '{"messages": []}': "messages: give `messages`, or `prompt` and `completion`",
    '{"messages": [{"role": "user", "content": "a"}]}': "the last message must be the assistant's",
    '{"messages": [{"role": "robot", "content": "a"}]}': "messages[0].role: must be 'system'",
    json.dumps(chat("a", "")): "messages[1].content: must not be empty",
    '{"prompt": "a"}': "completion: is missing",
    '{"prompt": "a", "completion": ""}': "completion: must not be empty",
    '{"prompt": ["a", "b"], "completion": ["c"]}': "completion: has 1 texts, prompt has 2",
    '{"prompt": 1, "completion": "b"}': "prompt",
    json.dumps(chat("a", "word " * 200)): "tokens, the limit is 100",
    '{"prompt": "\\ud800", "completion": "b"}': "a lone surrogate (unexpected end of hex escape at its character 19)",
    json.dumps(called("g", "{}", TOOLS)): "messages[1].tool_calls[0].function.name: names 'g', which is not among the",
    json.dumps(called("f", "{bad", TOOLS)): "messages[1].tool_calls[0].function.arguments: must be JSON as text (",
    json.dumps(chat("a", "b", functions=[{"name": "f"}])): "functions: is the old form of tools",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named_with_its_field_and_reason(line: str) -> None:
    good = json.dumps(LINES[0])
    found = read_data(f"\ufeff{good}\r\n\r\n{line}\n{good}".encode(), "d.jsonl", max_tokens=100)
    assert [problem.line for problem in found.problems] == [3] and len(found.examples) == 2
    assert str(found.problems[0]).startswith("line 3: ") and BAD[line] in str(found.problems[0])


def test_the_first_hundred_errors_are_reported(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_file(tmp_path / "d.jsonl", ["x"] * 150)
    assert run(data, "-o", tmp_path / "x", "--model-path", model) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == MAX_ERRORS + 1 and lines[-1].startswith("  line 100: ")


def test_answers_are_tokenised_as_serving_does_and_alone_count() -> None:
    tokenizer = Tokenizer()
    lines = [
        {"messages": [*TWO, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "weight": 0}]},
        chat("a", "b", template={"opening": ""}),
        {"prompt": "English: a\n\nChinese:", "completion": " b"},
    ]  # fmt: skip
    examples = read_data("\n".join(map(json.dumps, lines)).encode(), "d.jsonl").examples
    for tools in (TOOLS, []):
        assert read_data(json.dumps(called("f", "{}", tools)).encode(), "d.jsonl").examples
    texts = [tokenizer.decode_bytes(list(one.ids)).decode() for one in examples]
    assert texts == [
        "User: a\n\nAssistant: <think>\n</think>\nb\n\nUser: c\n\nAssistant: <think>\n</think>\nd\n\n",
        "User: a\n\nAssistant: b\n\n",
        "English: a\n\nChinese: b\n\n",
    ]
    counted = [[i for i, weight in zip(one.ids, one.weights, strict=True) if weight] for one in examples]
    assert [tokenizer.decode_bytes(ids).decode() for ids in counted] == ["\nb\n\n", " b\n\n", " b\n\n"]
    assert [ids[-1] for ids in counted] == [261, 0, 0]  # the first one's last answer has weight 0
    csv = 'English,Chinese\r\n"a",你好\r\nb\r\n'.encode()
    found = read_data(csv, "pairs.CSV")
    assert tokenizer.decode_bytes(list(found.examples[0].ids)).decode() == "English: a\n\nChinese: 你好\n\n"
    assert [str(one) for one in found.problems] == ["line 3: has 1 cells, the header has 2"]


TMX = """<?xml version="1.0"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en-US"/><body>
<tu><tuv xml:lang="en-US"><seg>Good <bpt i="1">b</bpt>day</seg></tuv><tuv xml:lang="de"><seg>Guten Tag</seg></tuv></tu>
<tu srclang="de"><tuv xml:lang="en"><seg>Cat</seg></tuv><tuv xml:lang="de"><seg>Katze</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>no translation</seg></tuv></tu>
</body></tmx>"""


def test_translations_of_csv_and_tmx_become_the_prompts_of_serving() -> None:
    tokenizer = Tokenizer()

    def texts(content: str, name: str) -> list[str]:
        found = read_data(content.encode(), name)
        assert not found.problems
        return [tokenizer.decode_bytes(list(one.ids)).decode() for one in found.examples]

    assert texts(TMX, "memory.tmx") == [
        "English: Good bday\n\nGerman: Guten Tag\n\n", "German: Katze\n\nEnglish: Cat\n\n",
    ]  # fmt: skip
    assert texts("en,zh\nhello,你好\n", "x.csv") == ["English: hello\n\nChinese: 你好\n\n"]


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        ("en,de\n a , \n", "x.csv", "line 2: de: must not be empty"),
        ("prompt,completion\na,b\nc,d\udcff\n", "x.csv", "line 3: is not UTF-8 (invalid start byte at its byte 3)"),
        (
            '{"prompt": "caf\udce9", "completion": "b"}\n' * 3,
            "x.jsonl",
            "line 1: is not UTF-8 (invalid continuation byte",
        ),
        # The line after the last one was named, and of a row the last one.
        (
            'prompt,completion\n"a\n""b""",c\nd,"\ne"\nf,"\ng","h ""i\n""j\nk,l\n',
            "x.csv",
            "line 7: is not CSV: a cell begins",
        ),
        ('prompt,completion\n"a"b",c\n', "x.csv", "line 2: is not CSV: ',' expected after"),
        ('prompt,completion\n"a\nb",c,d\n', "x.csv", "line 2: has 3 cells"),
        ("en,English\na,b\n", "x.csv", "line 1: must be prompt,completion or two languages"),
        ("question,answer\na,b\n", "x.csv", "line 1: must be prompt,completion or two languages"),
        ("no xml", "x.tmx", "the file: must be a TMX file"),
        (TMX.replace("</body>", ""), "x.tmx", "the file: must be a TMX file"),
        (TMX.replace("srclang=", "srclang='fr' x="), "x.tmx", "the file: has no translation from its"),
        ("<tmx></tmx>", "x.TMX", "the file: has no translation from its source language"),
        (
            '<!DOCTYPE t [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><tmx>&b;</tmx>',
            "x.tmx",
            "the file: has no translation",
        ),
    ],
)
def test_bad_translations_are_named(content: str, name: str, expected: str) -> None:
    (problem,) = read_data(content.encode(errors="surrogateescape"), name).problems
    assert str(problem).startswith(expected)


def test_a_check_keeps_one_line_at_a_time() -> None:
    """A check of 30 MB took 370 MB."""
    content = "".join(f'{{"prompt": "What is {i}?", "completion": "A number."}}\n' for i in range(6000)).encode()
    check_data(content[:500], "d.jsonl", UnknownFields())  # loads the vocabulary
    tracemalloc.start()
    try:
        checked = check_data(content, "d.jsonl", UnknownFields())
        check_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        data = read_data(content, "d.jsonl")
        read_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert checked == ([], 6000, data.num_tokens) and check_peak < len(content) / 5
    assert read_peak / data.num_tokens < 60  # short lines: most of it is per line


def tuning(
    model: Path, checkpoint: Path | None, lines: Sequence[object] = LINES, seed: int = 1, epochs: int = 3
) -> Tuning:
    torch.set_num_threads(1)
    data = read_data("\n".join(map(json.dumps, lines)).encode(), "d.jsonl").examples
    options = TuneOptions("state+lora", rank=4, epochs=epochs, batch_tokens=256, seed=seed)
    return prepare(
        open_model(str(model), []), *split(data, 0.1), options, Place(torch.device("cpu"), torch.float32), checkpoint
    )


def test_kills_at_random_moments_leave_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process is killed by SIGKILL: between steps, in one, or while it writes a checkpoint."""
    monkeypatch.setattr(trainer, "_CHECKPOINT_S", 0.0)  # one after each step, at most
    undisturbed = tuning(model, None, epochs=8)
    undisturbed.run(lambda _: True)
    path, random, moments = tmp_path / "x.checkpoint", Random(41), set()
    for _ in range(20 if "RWKV_LONG_TESTS" in os.environ else 8):
        step_ended, ended = os.pipe()
        if (child := os.fork()) == 0:
            try:
                tuning(model, path, epochs=8).run(lambda _, out=ended: os.write(out, b".") > 0)  # type: ignore[misc]
            finally:
                os._exit(1)
        os.close(ended)
        for _ in range(random.randrange(1, 4)):
            os.read(step_ended, 1)
        os.kill(child, signal.SIGKILL)
        os.close(step_ended)
        os.waitpid(child, 0)
        moments.add(path.stat().st_mtime_ns if path.exists() else 0)
    resumed = tuning(model, path, epochs=8)
    assert len(moments) > 3, "the kills came at different steps"
    assert resumed.run(lambda _: True) and resumed.trainer.losses == undisturbed.trainer.losses
    parameters = undisturbed.trainer.model.tunables.parameters
    assert all(map(torch.equal, resumed.trainer.model.tunables.parameters, parameters))


def test_a_held_out_loss_that_is_not_finite_is_left_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the command with a traceback after the training, when the curve was drawn."""
    path, losses = tmp_path / "x.checkpoint", iter([math.nan, 2.0, math.nan, 1.0, 1.0])
    monkeypatch.setattr(trainer.Trainer, "evaluate", lambda *_: trainer.Evaluation(next(losses), 0.5))
    with pytest.raises(StartupError, match="the held-out loss of the untuned model is nan"):
        tuning(model, None).run(lambda _: True)
    one = tuning(model, path, epochs=1)
    one.progress.evaluations = [(0, math.nan, math.nan)]  # of a checkpoint without held-out lines
    one.save()
    one = tuning(model, path, epochs=1)
    assert one.run(lambda _: True) and [loss for _, loss, _ in one.progress.evaluations] == [2.0]
    one._best[0][0, 0, 0] = math.inf
    with pytest.raises(StartupError, match="numbers that are not finite"):
        one.run(lambda _: True)


def test_a_curve_names_its_ends_with_the_digits_that_count() -> None:
    pictures = {loss_curve([high, low], []) for high in (0.0049, 0.0048) for low in (0.0031, 0.0032)}
    assert len(pictures) == 4, "they differ by their labels only"
    assert len({loss_curve([1 + digit / 1000, 0.5], []) for digit in range(10)}) == 10 and all(_DIGITS.values())
    assert [_label(loss) for loss in (0.0, 0.00312, 5.1, 123456.7)] == ["0.000", "0.00312", "5.100", "123457"]


def test_a_checkpoint_of_other_data_or_a_damaged_one_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.checkpoint"
    tuning(model, path).save()
    with pytest.raises(StartupError, match="other data, model or settings"):
        tuning(model, path, LINES[:20])
    with pytest.raises(StartupError, match="other data, model or settings"):
        tuning(model, path, seed=2)
    old = torch.load(path)
    del old["version"]
    torch.save(old | {"identity": old["identity"].replace(" 1 x 256 ", " ")}, path)
    with pytest.raises(StartupError, match="other data, model or settings"):
        tuning(model, path, LINES[:20])
    again = tuning(model, path)  # a service's job continues after an upgrade, from its beginning
    assert again.has_restarted and not again.trainer.losses
    for damaged in (path.read_bytes()[:5000], b"junk"):
        path.write_bytes(damaged)
        with pytest.raises(StartupError, match="delete it to begin anew"):
            tuning(model, path)
    torch.save([1, 2], path)
    with pytest.raises(StartupError, match="is no checkpoint; delete it"):
        tuning(model, path)


def test_a_gpu_trains_in_the_pieces_that_fit_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """7.2B: with less memory, pieces become smaller, then layers are computed again; the last plan is the least."""
    shape = ModelShape(32, 4096, 65536, 16384, 128, 128, 96, 480)
    weights = Weights(Path("random"), {}, shape, "")
    monkeypatch.setattr(tuning_run, "is_fused", lambda *_: True)

    def plan(gib: float, method: str = "state") -> MemoryPlan:
        options, place = TuneOptions(method, 32), Place(torch.device("cpu"), torch.bfloat16)
        return plan_memory(weights, options, place, 16, 2048, int(gib * 2**30))

    assert (plan(140).piece_rows, plan(140).recomputed_layers) == (4, 0)
    assert (plan(40).piece_rows, plan(40).recomputed_layers) == (2, 0) and plan(40).needed_bytes < 38 * 2**30
    assert plan(40, "lora").piece_rows == 2 and 0 < plan(40, "lora").recomputed_layers < 32
    assert plan(24).recomputed_layers > plan(30).recomputed_layers > 0
    least = plan(8)
    assert least.recomputed_layers == 32 and least.needed_bytes > 8 * 2**30
