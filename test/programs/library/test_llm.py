"""LLM answers like the service, in its own process."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from programs.library import LLM, AsyncLLM, LLMError, Piece, SamplingParams, engine_thread
from programs.library.arguments import library_message
from routes.response.generate import call_engine
from rwkv_batch.calls import CountJobs
from test.serving import Service, wait_for

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = ["Hello", "World is", "The cat"]
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, dtype="fp32", devices="cpu", max_running=16) as llm:
        yield llm


def texts(llm: LLM, prompts: Any, **more: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, GREEDY, **more)]


def wait_idle(llm: LLM) -> None:
    def jobs() -> int:
        return llm.engine.wait(call_engine(llm.engine.context, CountJobs("library")))

    wait_for(lambda: not jobs(), 20, "the engine has nothing to do")


def test_answers_are_the_services(llm: LLM, service: Service) -> None:
    plain = {"temperature": 0, "max_tokens": 8}
    unpenalised = {"alpha_presence": 0, "alpha_frequency": 0}  # over HTTP the family's penalties are the default
    over_http = service.post("/openai/v1/completions", {"prompt": PROMPTS, **plain, **unpenalised}).json()
    assert texts(llm, PROMPTS) == [choice["text"] for choice in over_http["choices"]]
    chat = service.post("/openai/v1/chat/completions", {"messages": MESSAGES, **plain, **unpenalised}).json()
    (answered,) = llm.chat(MESSAGES, GREEDY)
    assert answered.outputs[0].text == chat["choices"][0]["message"]["content"]
    body = {"source_lang": "en", "target_lang": "zh", "text_list": ["Hi there", "One"]}
    translated = service.post("/translate/v1/batch-translate", body).json()["translations"]
    assert llm.translate(body["text_list"], "en", "zh") == [one["text"] for one in translated]


def test_scores_are_the_services(llm: LLM, service: Service) -> None:
    body = {"contents": ["One", "Two words"], "candidates": [" a", " bc d"]}
    reported = service.post("/v1/score", {**body, "logprobs": True}).json()["scores"]
    for mine, theirs in zip(llm.score(**body, logprobs=True), reported, strict=True):
        for one, other in zip(mine, theirs["candidates"], strict=True):
            assert one.logprob == pytest.approx(other["logprob"], abs=1e-4)
            assert one.token_logprobs == pytest.approx(other["token_logprobs"], abs=1e-4)
            assert (one.tokens, one.is_greedy) == (other["tokens"], other["is_greedy"])


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"Prompt {i}" for i in range(11)]
    sampled = [[one.text for one in output.outputs] for output in llm.generate(prompts, n=2, seed=3, max_tokens=4)]
    monkeypatch.setattr("programs.library.calls._ROWS_PER_JOB", 4)  # a call of several jobs
    again = llm.generate(prompts, n=2, seed=3, max_tokens=4)
    assert [[one.text for one in output.outputs] for output in again] == sampled
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts and all(output.finished for output in outputs)
    assert [output.outputs[0].text for output in outputs] == [texts(llm, prompt)[0] for prompt in prompts]
    streamed = dict.fromkeys(range(11), "")
    for piece in llm.generate(prompts, GREEDY, stream=True):
        streamed[piece.prompt] += piece.text
    assert list(streamed.values()) == [output.outputs[0].text for output in outputs]


def test_streams_and_callbacks_give_the_same(llm: LLM) -> None:
    whole = llm.generate(PROMPTS, GREEDY)
    reported: list[Piece] = []
    outputs = llm.generate(PROMPTS, GREEDY, callback=reported.append)
    for pieces in (reported, list(llm.generate(PROMPTS, GREEDY, stream=True))):
        for i, output in enumerate(whole):
            own = [piece for piece in pieces if piece.prompt == i]
            assert own[-1].finish_reason == "length"  # how many there are is up to the load
            assert "".join(piece.text for piece in own) == output.outputs[0].text
    assert [output.outputs for output in outputs] == [output.outputs for output in whole]


def test_closing_a_stream_ends_its_rows(llm: LLM) -> None:
    stream = llm.generate("Endless", temperature=0, max_tokens=100_000, ignore_eos=True, stream=True)
    next(stream)
    stream.close()
    wait_idle(llm)


def test_token_ids_and_several_answers(llm: LLM) -> None:
    (output,) = llm.generate("Hello", temperature=0, max_tokens=8, logprobs=1)
    first = output.outputs[0]
    assert first.token_ids is not None and len(first.token_ids) == first.num_tokens == 8
    assert llm.get_tokenizer().decode_bytes(first.token_ids).decode("utf-8", "replace") == first.text
    assert first.cumulative_logprob == pytest.approx(sum(one.logprob for one in first.logprobs or ()))
    assert output.prompt_logprobs is None
    both = llm.generate([{"prompt": "Hello"}, {"prompt": "World is"}], n=2, seed=7, max_tokens=8)
    assert [[one.index for one in output.outputs] for output in both] == [[0, 1], [0, 1]]
    again = llm.generate("World is", n=2, seed=9, max_tokens=8)
    assert [one.text for one in again[0].outputs] == [one.text for one in both[1].outputs]
    ids = llm.get_tokenizer().encode("World is")
    assert texts(llm, ids) == texts(llm, "World is")


def test_prompts_are_scored(llm: LLM) -> None:
    (candidate,) = llm.score("Hello", [" World"], logprobs=True)[0]
    (output,) = llm.generate("Hello World", max_tokens=1, n=2, prompt_logprobs=2)
    ids, scored = output.prompt_token_ids, output.prompt_logprobs
    assert scored is not None and len(scored) == len(ids) and scored[0] is None
    last = scored[-candidate.tokens :]
    assert [one and one.logprob for one in last] == pytest.approx(candidate.token_logprobs, abs=1e-3)
    assert all(one is None or len(one.top) == 2 for one in scored)
    (answer,) = llm.chat([{"role": "user", "content": "Hello"}], max_tokens=1, prompt_logprobs=0)
    assert len(answer.prompt_logprobs or ()) == len(answer.prompt_token_ids)
    with pytest.raises(LLMError, match="prompt_logprobs cannot be combined with stream"):
        list(llm.generate("Hello", stream=True, prompt_logprobs=1))


def test_states_are_values(llm: LLM, tmp_path: Path) -> None:
    state = llm.prefill("Hello")
    more = texts(llm, ["Hello World", "Hello you"])
    assert [texts(llm, [" World", " you"], state=state) for _ in range(2)] == [more, more]
    (first,) = llm.generate(" World", GREEDY, state=state)
    assert first.state is not None
    behind = texts(llm, " end", state=first.state)
    assert behind == texts(llm, "Hello World" + first.outputs[0].text + " end")
    first.state.save(tmp_path / "state.safetensors")
    loaded = llm.load_state(tmp_path / "state.safetensors")
    first.state.delete()
    assert [texts(llm, " end", state=loaded) for _ in range(2)] == [behind, behind]
    assert texts(llm, " end", state=llm.prefill(" World", state=state)) == texts(llm, "Hello World end")
    with pytest.raises(LLMError, match="dialogue"):
        texts(llm, " end", state=first.state)
    assert llm.sessions() == {}


def test_sessions_continue(llm: LLM, tmp_path: Path) -> None:
    llm.chat(MESSAGES, GREEDY, session_id="me")
    assert list(llm.sessions()) == ["me"]
    llm.save_session("me", tmp_path / "me.safetensors")
    assert llm.load_session("you", tmp_path / "me.safetensors") > 0
    turns = [llm.chat([{"role": "user", "content": "More"}], GREEDY, session_id=name) for name in ("me", "you")]
    assert turns[0][0].outputs[0].text == turns[1][0].outputs[0].text
    assert turns[0][0].num_cached_tokens > 0
    assert llm.delete_session("me") and llm.delete_session("you") and not llm.delete_session("me")
    with pytest.raises(LLMError, match="exactly one prompt"):
        llm.generate(PROMPTS, GREEDY, session_id="me")


def test_prompts_may_come_from_a_generator(llm: LLM) -> None:
    prompts = (f"prompt {number}" for number in range(3))
    outputs = llm.generate(prompts, max_tokens=1)  # type: ignore[call-overload]
    assert [output.prompt for output in outputs] == ["prompt 0", "prompt 1", "prompt 2"]


def test_errors_name_the_field(llm: LLM) -> None:
    with pytest.raises(LLMError, match="temperature") as raised:
        llm.generate("Hello", temperature=-1)
    assert (raised.value.status, raised.value.field) == (422, "temperature")
    with pytest.raises(TypeError, match="temprature"):
        llm.generate("Hello", temprature=0)
    with pytest.raises(TypeError, match="not both"):
        llm.generate("Hello", GREEDY, seed=1)
    with pytest.raises(ValueError, match="not both"):
        llm.generate("Hello", GREEDY, stream=True, callback=print)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="token ids"):
        llm.generate([1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        llm.generate(["a", "b\ud800"])
    with pytest.raises(LLMError, match="contents"):
        llm.score([], ["a"])
    schema: dict[str, Any] = {}
    for _ in range(600):
        schema = {"properties": {"a": schema}}
    with pytest.raises(LLMError, match="json_schema: is nested too deeply"):
        llm.generate("Hello", json_schema=schema)
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        LLM("model.pth", tensor_parallel_size=2)
    with pytest.raises(LLMError, match="cannot be read"):
        LLM("no/such/model.pth")


STARTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"threads": "x"}, ValueError, "threads must be a whole number, got 'x'"),
    ({"devices": "cuda:7"}, LLMError, "change devices, for example to cpu"),
    ({"model": "/nope.pth"}, LLMError, "check model$"),
    ({"colour": 1}, TypeError, "LLM has no argument 'colour'; did you mean"),
    ({"max_runing": None}, TypeError, "LLM has no argument 'max_runing'; did you mean 'max_running'"),
    ({"layers": "3,3"}, LLMError, r"^layers=\"3,3\" has 2 numbers for 1 device; give one number per device, or other"),
    ({"strategy": "cpu fp32 *9"}, LLMError, "layers per device, 9, are 9 in total; the model has"),
    ({"states": "poet"}, ValueError, "states must be NAME=FILE"),
    ({"served_adapters": "a=/nope.pth"}, LLMError, 'served_adapters="a=/nope.pth": '),
    ({"state_db": "/tmp"}, ValueError, "state_db must be a file"),
    ({"threads": "-1"}, ValueError, "threads must be 0..4096, got -1"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), STARTS)
def test_errors_of_a_start_name_arguments(
    tiny_model: Path, wrong: dict[str, Any], kind: type[Exception], message: str
) -> None:
    placed = {} if {"devices", "strategy"} & set(wrong) else {"devices": "cpu"}
    for start in (LLM, AsyncLLM):
        with pytest.raises(kind, match=message) as raised:
            start(**{"model": tiny_model, **placed, **wrong})
        assert "--" not in str(raised.value) and "app.py" not in str(raised.value)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("use --dtype int8.", 'use dtype="int8".'),
        ("(--kernels naive)", '(kernels="naive")'),
        ("give --state-db '' or --pp-devices '0;0'", 'give state_db="" or devices="0;0"'),
        ("lower --max-running (now 4), or --threads 3;", "lower max_running (now 4), or threads=3;"),
        ("--pp-devices names 2 engines, --replicas 3", "devices names 2 engines, replicas=3"),
        (
            "load it with --adapter-serve; see python app.py --help",
            "load it with served_adapters; see docs/settings.md",
        ),
        ("pip --user, my--threads", "pip --user, my--threads"),
    ],
)
def test_messages_about_flags_name_arguments(message: str, expected: str) -> None:
    assert library_message(message) == expected


def test_limits_in_errors_of_requests_are_arguments(llm: LLM) -> None:
    with pytest.raises(LLMError, match=r"\(max_tokens_limit\)"):
        llm.generate("Hello", max_tokens=2**31 - 1)


def test_coroutines_get_the_same(llm: LLM) -> None:
    twin = AsyncLLM(llm)

    async def work() -> tuple[list[str], str]:
        outputs = await asyncio.gather(*(twin.generate(prompt, GREEDY) for prompt in PROMPTS))
        streamed = ""
        async for piece in twin.stream("Hello", GREEDY):
            streamed += piece.text
        endless = asyncio.ensure_future(twin.generate("Endless", max_tokens=100_000, ignore_eos=True))
        await asyncio.sleep(0.1)
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)
        (answered,) = await twin.chat(MESSAGES, GREEDY)
        said = [piece.text async for piece in twin.chat_stream(MESSAGES, GREEDY)]
        assert "".join(said) == answered.outputs[0].text == llm.chat(MESSAGES, GREEDY)[0].outputs[0].text
        assert await twin.translate("Hi there", "en", "zh") == llm.translate(["Hi there"], "en", "zh")
        return [output.outputs[0].text for (output,) in outputs], streamed

    outputs, streamed = asyncio.run(work())
    assert outputs == texts(llm, PROMPTS) and streamed == outputs[0]
    wait_idle(llm)


def test_two_in_one_process_and_their_ends(llm: LLM, tiny_model: Path) -> None:
    other = LLM(tiny_model, dtype="fp32", devices="cpu", max_running=4)
    assert texts(other, PROMPTS) == texts(llm, PROMPTS)
    state = other.prefill("Hello")
    with pytest.raises(ValueError, match="belongs to another LLM"):
        texts(llm, " World", state=state)
    before = {thread.name for thread in threading.enumerate()}
    failed: list[Exception] = []

    def endless() -> None:
        try:
            other.generate("Endless", max_tokens=100_000, ignore_eos=True)
        except LLMError as error:
            failed.append(error)

    caller = threading.Thread(target=endless)
    caller.start()
    other.close()
    other.close()
    caller.join(60)
    assert not caller.is_alive() and not other.engine._thread.is_alive() and "library" in before
    with pytest.raises(LLMError, match="closed"):
        other.generate("Hello", GREEDY)
    assert texts(llm, "Hello") == texts(llm, ["Hello"])


def test_a_fork_gets_an_error_and_leaves_its_parent_intact(llm: LLM) -> None:
    """A forked copy has no threads: it would wait forever, and delete the sessions at its end."""
    state = llm.prefill("Hello")
    assert texts(llm, " there", state=state) == texts(llm, " there", state=state)
    child = os.fork()
    if not child:
        code = 1
        try:
            llm.generate("Hello", GREEDY)
        except LLMError as error:
            code = 0 if "before a fork" in str(error) else 2
        del state
        llm.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert texts(llm, " there", state=state) == texts(llm, " there", state=state)
    assert texts(llm, "Turn", session_id="after a fork") and llm.delete_session("after a fork")


def test_a_failed_start_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for wrong in ({"model": "/nowhere.pth"}, {"max_running": -5}):
        with pytest.raises((LLMError, ValueError)):
            LLM(**wrong)
    assert not list(tmp_path.glob("rwkv-library-*"))


def test_requests_during_close_get_an_answer_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended loop would accept the request and never answer it."""

    class NoEngine:
        def __init__(self, *given: object, **named: object) -> None: ...

        async def open(self) -> None: ...

        def stop(self) -> None: ...

    async def answer() -> str:
        return "answered"

    engine = engine_thread.EngineThread(NoEngine(), None)  # type: ignore[arg-type]
    closing = threading.Thread(target=engine.close)
    submit = asyncio.run_coroutine_threadsafe

    def closed_meanwhile(*given: Any) -> Any:
        closing.start()
        closing.join(0.3)
        return submit(*given)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", closed_meanwhile)
    reported = engine.submit_work(answer())
    closing.join(60)
    assert not closing.is_alive() and reported.done()
    assert reported.cancelled() or reported.result() == "answered"
    with pytest.raises(LLMError, match="closed"):
        engine.submit_work(answer())
