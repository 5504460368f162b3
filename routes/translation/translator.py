"""Runs a translation on the engine: prompts, rounds of jobs, and warnings. The routes only convert bodies.

All prompts of a request begin with its context. The engine reads it once and keeps its state in the prefix cache, also
for the next requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from pydantic import Field

from routes.context import Context
from routes.openai.files import call_store, get_store
from routes.request.bodies import ModelFields, PriorityFields
from routes.request.jobs import encode, encode_all, greedy_row, make_job, offload_if_large
from routes.request.model_names import model_not_found, requested_origin
from routes.request.validation import MAX_WARNINGS, nearest_name, report_unknown
from routes.request_context import cache_tenant, current_request, warn
from routes.response.event_stream import DecodedRow, OutputDecoder
from routes.response.generate import call_engine, finished_rows, rows_as_they_finish
from routes.translation import stored
from rwkv_batch.calls import EngineCall, ListAdapters, ListStates
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.request import FinishReason, GenerateRequest, Job
from rwkv_batch.translation.context import ContextMode, History
from rwkv_batch.translation.languages import LANGUAGE_NAMES, is_known_language, language_name
from rwkv_batch.translation.markers import MAX_MARKERS, TooManyMarkersError
from rwkv_batch.translation.plan import (
    AUTO,
    CACHE_KEY,
    Query,
    TooManySegmentsError,
    Translation,
    TranslationCache,
    TranslationPlan,
    TranslationRequest,
)
from rwkv_batch.translation.prompt_forms import prompt_form
from rwkv_batch.translation.prompts import default_style, prompt_stops, shared_prompt, translation_prompt
from rwkv_batch.translation.segments import MAX_TEXT_CHARACTERS
from sampling.grammar.constraint import Constraint, Form, RequiredText
from sampling.params import SamplingParams

_LABELS = ("User", "Assistant", "System", "Traditional Chinese", *LANGUAGE_NAMES.values())
_NEXT_LABEL = re.compile(rf"\n(?:{'|'.join(map(re.escape, _LABELS))}):")
"""Labels that a model may write after a translation. Any word with a colon would cut text lines like `Name: …`."""
_TOKENS_PER_PROMPT_TOKEN = 4
_MIN_TOKENS = 64
_SCAN_COST = 10
"""Splitting a text into segments takes this many times as long as tokenising it."""
_CHECKS_SHARE = 0.1
"""Most of a streamed request's time that is spent on looking for complete texts."""
_UNFINISHED = (FinishReason.TIMEOUT, FinishReason.CANCELLED, FinishReason.ERROR)


ModelName = Annotated[
    str,
    Field(
        max_length=256,
        description="`<model>:<state>` names a tuned state, `<model>+<adapter>` an adapter, `ft:...` what a job tuned.",
    ),
]
OnText = Callable[[int, Translation], None]


class TranslationFields(PriorityFields, ModelFields):
    """Fields of every translation body, for the job."""

    model: ModelName = Field("rwkv7")


CHECK_ERRORS = (ErrorKind.MODEL_NOT_FOUND, ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.ENGINE_LOST)
"""Errors of `check_model`."""


async def check_model(context: Context, model: str) -> None:
    """Raise ServiceError if a model's name has a tuned state or an adapter that is not loaded, or is another key's."""
    state, adapter = requested_origin(TranslationFields.model_validate({"model": model}), context.config)
    calls: tuple[tuple[str, EngineCall[Any]], ...] = ((state, ListStates()), (adapter, ListAdapters()))
    for name, call in calls:
        if not name:
            continue
        await context.readiness.wait_for_engine()
        if not any(one.name == name and not one.error for one in await call_engine(context, call)):
            raise model_not_found(model, [context.config.model_name], "; GET /v1/models lists all names")


async def translate(
    context: Context,
    request: TranslationRequest,
    body: TranslationFields,
    label: str,
    field: str,
    *,
    uses_memory: bool = False,
    on_text: OnText | None = None,
) -> list[Translation]:
    """Translate texts, in order. Raises ServiceError.

    label: route, for logs
    field: request field of the texts, for errors and warnings
    uses_memory: whether approved translations of the key are used
    on_text: called with each text's index and translation when it is complete
    """
    _check_sizes(request.texts, limit := context.config.max_contents, field)
    given = len(request.texts)
    if not request.style:
        request = replace(request, style=default_style(context.config.translation_style, request.target))
    document = await _document(context, request) if request.document else None
    if document is not None:
        request = replace(
            request,
            context=request.context or document.context,
            history=document.histories.get(language_name(request.target), ()) if is_rolling(request) else (),
        )
    # Translations with a tuned state or an adapter are not cached, because the name may later mean another one.
    is_cacheable = not any(requested_origin(body, context.config))
    cache: TranslationCache = context.shared[CACHE_KEY] if is_cacheable else TranslationCache(0)
    characters, tenant = _SCAN_COST * sum(map(len, request.texts)), cache_tenant(context.config)
    if request.source.lower() == AUTO:  # detection is slow even for short texts, and slowest at its first use
        plan = await asyncio.to_thread(make_plan, request, limit, cache, tenant, field)
    else:
        plan = await offload_if_large(characters, make_plan, request, limit, cache, tenant, field)
    if uses_memory:
        owner, message = current_request().owner, "the memory cannot be read"
        memory = await call_store(stored.recall, message, get_store(context), owner, plan.keys, request.target)
        plan.use_memory(memory)
    sender = None if on_text is None else _Sender(plan, on_text, given, characters, field)
    while queries := (await offload_if_large(characters, plan.missing))[:limit]:
        rows = await offload_if_large(characters, _rows, context, queries, body, field)
        if sender is not None:
            await sender.send_complete()
        async for results in _results(context, make_job(rows, body, label), is_streamed=sender is not None):
            await offload_if_large(characters, _add_answers, plan, queries, results)
            if sender is not None:
                await sender.send_complete()
    if sender is not None:
        await sender.send_complete(is_last=True)
    translations = await offload_if_large(characters, plan.results)
    if sender is None and not request.variant:
        _report_problems(translations, field)
    if document is not None:
        await _save_document(context, request, document, plan.history)
    return translations


async def other_translations(
    context: Context,
    request: TranslationRequest,
    body: TranslationFields,
    label: str,
    field: str,
    count: int,
    known: Sequence[str],
) -> list[list[str]]:
    """Return up to `count` other samples of each text's translation, without equal and wrong ones.

    known: the translations of the texts
    """
    variants = [
        await translate(context, replace(request, variant=variant), body, label, field)
        for variant in range(1, count + 1)
    ]
    samples = (
        dict.fromkeys(one.text for one in of_text if not one.problems) for of_text in zip(*variants, strict=True)
    )
    return [[text for text in texts if text != first] for texts, first in zip(samples, known, strict=True)]


def _check_sizes(texts: Sequence[str], limit: int, field: str) -> None:
    """Check number and lengths of a request's texts. Raises ServiceError."""
    given, longest = len(texts), max(map(len, texts), default=0)
    if given > limit:
        raise invalid(field, f"has {given} texts, the limit is {limit} (--max-contents); send several requests", given)
    if longest > MAX_TEXT_CHARACTERS:
        message = f"has a text of {longest} characters, the limit is {MAX_TEXT_CHARACTERS}; send it in parts"
        raise invalid(field, message, longest)


class _Sender:
    """Sends each text of a streamed request when it is complete."""

    def __init__(self, plan: TranslationPlan, on_text: OnText, count: int, characters: int, field: str) -> None:
        self._plan = plan
        self._on_text = on_text
        self._waiting = list(range(count))
        self._characters = characters
        self._field = field
        self._next = 0.0
        """Time of the next check."""

    async def send_complete(self, *, is_last: bool = False) -> None:
        """Send the texts that are complete, unless the last check was too short ago."""
        started = time.monotonic()
        if started < self._next and not is_last:
            return
        found = await offload_if_large(self._characters, lambda: list(map(self._plan.result, self._waiting)))
        complete = {index: one for index, one in zip(self._waiting, found, strict=True) if one is not None}
        self._waiting = [index for index in self._waiting if index not in complete]
        for index, translation in complete.items():
            _report_problem(f"{self._field}[{index}]", translation.problems)
            self._on_text(index, translation)
        ended = time.monotonic()
        self._next = ended + (ended - started) / _CHECKS_SHARE


async def _results(context: Context, job: Job, *, is_streamed: bool) -> AsyncGenerator[dict[int, DecodedRow]]:
    """Yield a job's results by row: all at once, or as they finish."""
    decoder = OutputDecoder(job.num_rows)
    if is_streamed:
        async with contextlib.aclosing(rows_as_they_finish(context, job, decoder)) as finished:
            async for results in finished:
                yield results
    else:
        yield dict(enumerate(await finished_rows(context, job, decoder)))


def is_rolling(request: TranslationRequest) -> bool:
    return request.mode is ContextMode.ROLLING


async def _document(context: Context, request: TranslationRequest) -> stored.Document:
    owner = current_request().owner
    return await call_store(
        stored.find_document, "the document cannot be read", get_store(context), owner, request.document
    )


async def _save_document(
    context: Context, request: TranslationRequest, document: stored.Document, history: History
) -> None:
    """Store a document's context and history, if they changed."""
    histories = document.histories | ({language_name(request.target): history} if is_rolling(request) else {})
    changed = msgspec.structs.replace(document, context=request.context, histories=histories)
    if changed == document:
        return
    owner, message = current_request().owner, "the document cannot be stored"
    if not await call_store(stored.save_document, message, get_store(context), owner, request.document, changed):
        warn("document", "document: another request changed it meanwhile; send the requests of a document in order")


def make_plan(
    request: TranslationRequest, limit: int, cache: TranslationCache, tenant: str, field: str
) -> TranslationPlan:
    """Split a request into segments. Raises ServiceError if there are too many."""
    try:
        return TranslationPlan(request, limit, cache, tenant)
    except TooManySegmentsError:
        message = f"has more than {limit} segments, the limit is {limit} (--max-contents); send several requests"
        raise invalid(field, message, limit + 1) from None
    except TooManyMarkersError:
        message = f"has a text with more than {MAX_MARKERS} placeholders and tags; send it in parts"
        raise invalid(field, message, MAX_MARKERS + 1) from None


def _rows(context: Context, queries: list[Query], body: TranslationFields, field: str) -> list[GenerateRequest]:
    """Return the rows of the first queries that fit into a job."""
    rows: list[GenerateRequest] = []
    tokenizer, config = context.tokenizer, context.config
    form = prompt_form(config.translation_prompt)
    prompts = encode_all(tokenizer, ((field, translation_prompt(query, form)) for query in queries), config)
    shared: dict[tuple[str, str, History], list[int]] = {}
    total = 0
    named = requested_origin(body, config)
    for query, prompt in zip(queries, prompts, strict=True):
        origin = query.source, query.context, query.history
        before = shared.get(origin)
        if before is None:
            text = shared_prompt(query, form)
            before = shared[origin] = encode(tokenizer, text, "context", config) if text else []
        total += len(before) + len(prompt)
        if rows and total > config.max_request_tokens:
            break
        stops = prompt_stops(query, form)
        max_tokens = min(_MIN_TOKENS + _TOKENS_PER_PROMPT_TOKEN * len(prompt), config.max_tokens_limit)
        row = greedy_row([*before, *prompt], max_tokens, stops, *named)
        sampling = _sampling(query) if query.attempt else row.sampling
        ends = stops if "\n" in query.text else ["\n"]
        constraint = None if query.required is None else required_constraint(query.required, ends)
        changes = {"sampling": sampling, "cached_tokens": len(before), "constraint": constraint}
        rows.append(msgspec.structs.replace(row, **changes))
    return rows


def required_constraint(required: RequiredText, ends: list[str]) -> Constraint:
    """Return the constraint that keeps markers and words. `ends`: texts that end an answer."""
    source = msgspec.json.encode(msgspec.structs.replace(required, ends=tuple(ends)))
    return Constraint(form=Form.REQUIRED_TEXT, source=source.decode())


def _sampling(query: Query) -> SamplingParams:
    if query.attempt == 1:
        return SamplingParams(temperature=0.7, top_p=0.7, seed=1)
    # Later alternatives differ more, so that there are some where the model is sure.
    return SamplingParams(temperature=min(0.9 + 0.05 * query.attempt, 1.4), top_p=0.95, seed=query.attempt)


def _add_answers(plan: TranslationPlan, queries: list[Query], results: dict[int, DecodedRow]) -> None:
    """Add the answers to some of the queries, by index."""
    answers, cut, completed = {}, set(), set()
    for index, row in results.items():
        query = queries[index]
        if row.finish is None or row.finish.reason in _UNFINISHED:
            message = "a translation did not end in time; send fewer texts per request, or raise timeout_s"
            raise ServiceError(ErrorKind.TIMEOUT, message)
        answers[query] = clean_answer(row.text, is_line="\n" not in query.text)
        if row.finish.reason is FinishReason.LENGTH:
            cut.add(query)
        if row.finish.was_completed:
            completed.add(query)
    plan.add_answers(answers, frozenset(cut), frozenset(completed))


def clean_answer(text: str, *, is_line: bool = False) -> str:
    """Return the answer up to the next label, without surrounding white space. `is_line`: only its first line."""
    answer = _NEXT_LABEL.split(text, maxsplit=1)[0].strip()
    return answer.partition("\n")[0].rstrip() if is_line else answer


def _report_problems(translations: list[Translation], field: str) -> None:
    """Add a warning per text with a problem, up to a limit."""
    faulty = [(index, one.problems) for index, one in enumerate(translations) if one.problems]
    for index, problems in faulty[:MAX_WARNINGS]:
        _report_problem(f"{field}[{index}]", problems)
    if len(faulty) > MAX_WARNINGS:
        warn(field, f"{field}: {len(faulty) - MAX_WARNINGS} more translations have warnings", is_ignored=False)


def _report_problem(name: str, problems: list[str]) -> None:
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        warn(name, f"{name}: the translation {problems[0]}{more}", is_ignored=False)


def report_unknown_languages(languages: dict[str, str], is_strict: bool) -> None:
    """Add a warning for each unknown language, given by field. Raises ServiceError if `is_strict`."""
    for name, language in languages.items():
        if problem := unknown_language(language):
            report_unknown(name, problem, UNCHANGED, language, is_strict=is_strict)


def check_languages(languages: dict[str, str]) -> None:
    """Check languages for clients that see no warnings. Raises ServiceError for an unknown one."""
    for name, language in languages.items():
        if problem := unknown_language(language):
            raise invalid(name, problem, language)


UNCHANGED = "the prompt has it unchanged"
"""Effect of an unknown language."""


def unknown_language(language: str) -> str:
    """Return what is wrong with a language, or ""."""
    if language.lower() == AUTO or is_known_language(language):
        return ""
    near = nearest_name(language, [*LANGUAGE_NAMES, *LANGUAGE_NAMES.values()])
    return f"unknown language {language!r}; use an ISO code or an English name{near}"
