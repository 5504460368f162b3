"""A user's program, for type checkers: test/deploy/test_wheel.py checks it with mypy --strict against the wheel."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import assert_type

from rwkv_batch import (
    LLM,
    PIPELINE,
    PIPELINE_ARGS,
    RWKV,
    AsyncLLM,
    CompletionOutput,
    LLMError,
    Piece,
    RequestOutput,
    SamplingParams,
    Score,
    State,
    __version__,
)


def outputs_have_types(llm: LLM) -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=16, stop="\n\n")
    outputs = llm.generate(["a", "b"], params)
    assert_type(outputs, list[RequestOutput])
    assert_type(outputs[0].outputs[0], CompletionOutput)
    assert_type(outputs[0].outputs[0].text, str)
    assert_type(outputs[0].outputs[0].finish_reason, str | None)
    assert_type(outputs[0].num_cached_tokens, int)
    assert_type(llm.chat([{"role": "user", "content": "Hello"}], max_tokens=4), list[RequestOutput])
    assert_type(llm.translate(["Good morning"], "en", "zh"), list[str])
    assert_type(llm.score(["The capital is"], [" Paris"]), list[list[Score]])
    assert_type(llm.score("a", [" b"])[0][0].logprob, float)


def streams_have_types(llm: LLM) -> None:
    pieces = llm.generate("a", stream=True)
    assert_type(pieces, Iterator[Piece])
    assert_type(next(pieces).text, str)
    assert_type(llm.generate("a", callback=lambda piece: print(piece.text)), list[RequestOutput])


def states_have_types(llm: LLM) -> None:
    state = llm.prefill("a")
    assert_type(state, State)
    assert_type(llm.generate("b", state=state)[0].state, State | None)
    state.save("state.pth")
    assert_type(llm.load_state("state.pth"), State)
    assert_type(llm.sessions(), dict[str, str])


async def awaited_calls_have_types(llm: AsyncLLM) -> None:
    assert_type(await llm.generate("a"), list[RequestOutput])
    assert_type(llm.stream("a"), AsyncIterator[Piece])
    assert_type(await llm.score("a", [" b"]), list[list[Score]])
    await llm.close()


def the_packages_names_have_types() -> None:
    pipeline = PIPELINE(RWKV("model", strategy="cpu fp32"), "rwkv_vocab_v20230424")
    assert_type(pipeline.encode("a"), list[int])
    pipeline.generate("a", 8, PIPELINE_ARGS(temperature=0.5))


def errors_have_types() -> str:
    try:
        with LLM("model.pth", dtype="fp32", devices="cpu", max_running=4) as llm:
            outputs_have_types(llm)
    except LLMError as error:
        return str(error)
    return __version__
