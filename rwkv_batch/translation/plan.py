"""A request for translations: its segments, the texts that a model must translate, and the results.

A caller translates the texts of `missing` and passes the answers to `add_answers`, until nothing is missing. A text
with markers is translated as a whole first, and the sampler keeps the markers. If the model ended its answer without
them, the texts around the markers are translated instead. A wrong translation is sampled once more.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rwkv_batch.translation.checks import problem
from rwkv_batch.translation.context import CHUNK_SEGMENTS, ContextMode, Example, History, digest, extended
from rwkv_batch.translation.glossary import Glossary, GlossaryMode, before_full_stop, enforced
from rwkv_batch.translation.languages import Detected, detect_languages, join_sentences, language_code, language_name
from rwkv_batch.translation.markers import MARK, MarkerOptions, Segment, no_markers
from rwkv_batch.translation.memory import CacheUse, Key, Memory, Origin
from rwkv_batch.translation.segments import Split, has_letters, split_text
from sampling.grammar.constraint import RequiredText

CACHE_KEY = "translations"
"""Key of the cache in `Context.shared`."""
AUTO = "auto"
"""Source language with which each text's language is detected."""
_MAX_CACHED_CHARACTERS = 4000
_MAX_MARKERS_IN_PROMPT = 64
"""A segment with more is split around them at once."""


@dataclass(frozen=True, slots=True)
class Query:
    """A text for the model."""

    source: str
    target: str
    text: str
    context: str = ""
    """Text that the model reads and does not translate."""
    history: History = ()
    """Translations that the model reads after the context."""
    examples: tuple[Example, ...] = ()
    """Approved translations of similar texts, which the model reads after the history."""
    attempt: int = 0
    """0: the most likely translation. An odd one is sampled because the one before it is wrong."""
    terms: tuple[tuple[str, str], ...] = ()
    """Terms in the text, and the translations that the answer must have."""
    required: RequiredText | None = None
    """What the sampler keeps in the answer."""

    mode: GlossaryMode = GlossaryMode.CHECK

    @property
    def prompt_terms(self) -> tuple[tuple[str, str], ...]:
        """Terms whose translations the prompt has. At first none, if the terms are only checked."""
        return () if self.mode is GlossaryMode.CHECK and not self.attempt % 2 else self.terms

    @property
    def text_with_terms(self) -> str:
        """The text with the translations of `prompt_terms` in their places."""
        if not self.prompt_terms:
            return self.text
        markers = self.required.markers if self.required is not None else ()
        parts = re.split(f"({'|'.join(map(re.escape, markers))})", self.text) if markers else [self.text]
        parts[::2] = map(Glossary(dict(self.terms)).apply, parts[::2])
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's translation of a query."""

    text: str
    problem: str = ""
    """What is wrong with it."""
    missing_terms: str = ""
    """Terms whose translation is missing, like "the term row = Zeile"."""
    was_completed: bool = False
    """Whether the sampler added required markers or terms at its end."""

    @property
    def problems(self) -> list[str]:
        """What is wrong with it, missing terms first."""
        return [one for one in (self.missing_terms and f"lacks {self.missing_terms}", self.problem) if one]


class TranslationCache:
    """The most recently used translations, separately for each tenant. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[str, Query], Answer] = OrderedDict()

    def get(self, tenant: str, query: Query) -> Answer | None:
        key = (tenant, _short(query))
        with self._lock:
            if key not in self._answers:
                return None
            self._answers.move_to_end(key)
            return self._answers[key]

    def put(self, tenant: str, query: Query, answer: Answer) -> None:
        """Cache a translation, unless its texts are too long."""
        known = [(query.text, answer.text), *query.terms, *((one.text, one.translation) for one in query.examples)]
        if sum(len(text) + len(to) for text, to in known) <= _MAX_CACHED_CHARACTERS:
            with self._lock:
                self._answers[tenant, _short(query)] = answer
                while len(self._answers) > self._size:
                    self._answers.popitem(last=False)


def _short(query: Query) -> Query:
    """Return the query with a digest of its context."""
    if not (query.context or query.history):
        return query
    return replace(query, context=digest(query.context, query.history), history=())


class TooManySegmentsError(ValueError):
    """A request has more segments than its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationRequest:
    """Texts to translate, with the same options."""

    texts: Sequence[str]
    source: str = AUTO
    """Code or name of a language, or AUTO."""
    target: str
    split: Split = Split.NEWLINES
    markers: MarkerOptions = field(default_factory=MarkerOptions)
    mode: ContextMode = ContextMode.PAGE
    context: str = ""
    """Text that the model reads and does not translate."""
    history: History = ()
    """Translations of what came before, for ContextMode.ROLLING."""
    document: str = ""
    """Id of the client's document, whose context and history are kept."""
    glossary: Glossary = field(default_factory=lambda: Glossary({}))
    glossary_mode: GlossaryMode = GlossaryMode.CHECK
    style: str = ""
    """Instructions for the model, before the context."""
    glossaries: Mapping[str, Glossary] = field(default_factory=dict)
    """Glossaries by the code of a text's language, which replace `glossary` for it."""
    cache: CacheUse = CacheUse.USE
    variant: int = 0
    """Number of an alternative translation. 0: the most likely one."""


@dataclass(frozen=True, slots=True)
class Translation:
    """The translation of a text."""

    text: str
    source: str
    """Language of the text."""
    source_probability: float
    """1 if the language was given, 0 if the text has no letters."""
    problems: list[str]
    """Ends of sentences like "the translation repeats itself", for warnings."""
    origin: Origin
    """The last one in Origin's order of any segment."""


@dataclass(slots=True)
class _Unit:
    """A segment of a text."""

    segment: Segment
    source: str
    history: History = ()
    is_started: bool = False


@dataclass(frozen=True, slots=True)
class _Result:
    """A segment's translation."""

    text: str
    said: str
    """The model's answer, before the markers were put back."""
    problems: list[str]
    origin: Origin = Origin.MODEL


class TranslationPlan:
    """The state of one request."""

    def __init__(
        self, request: TranslationRequest, max_segments: int, cache: TranslationCache, tenant: str = ""
    ) -> None:
        """Split the texts. Raises TooManySegmentsError and TooManyMarkersError."""
        self.history = request.history
        """The last translations, for the next request of the document."""
        self._request = request
        self._context = "\n".join(filter(None, (request.style, request.context)))
        self._cache = cache
        self._tenant = tenant
        self._memory = Memory()
        self._from_cache: set[Query] = set()
        self._answers: dict[Query, Answer] = {}
        self._missing: dict[Query, None] = {}
        texts = request.texts
        is_auto = request.source.lower() == AUTO
        found = detect_languages(texts) if is_auto else [Detected(request.source, 1.0)] * len(texts)
        self._sources = [one.code or AUTO for one in found]
        self._probabilities = [one.probability for one in found]
        self._pieces: list[list[str | _Unit]] = []
        segments = 0
        for text, source in zip(texts, self._sources, strict=True):
            pieces: list[str | _Unit] = []
            is_kept = source == AUTO or language_name(source) == language_name(request.target)
            for piece in [text] if is_kept else split_text(text, request.markers, request.split, source):
                if isinstance(piece, Segment):
                    segments += 1 if len(piece.markers) <= _MAX_MARKERS_IN_PROMPT else len(piece.markers)
                if segments > max_segments:
                    raise TooManySegmentsError
                pieces.append(_Unit(piece, source, self.history) if isinstance(piece, Segment) else piece)
            self._pieces.append(pieces)
        self._units = [piece for pieces in self._pieces for piece in pieces if isinstance(piece, _Unit)]
        self._num_done = 0

    @property
    def keys(self) -> list[Key]:
        """Source languages and texts of the segments, for the memory."""
        return list(dict.fromkeys((unit.source, unit.segment.shown()) for unit in self._units))

    def use_memory(self, memory: Memory) -> None:
        """Use approved translations. Call it before `missing`."""
        self._memory = memory

    def missing(self) -> list[Query]:
        """Return the texts to translate next, without duplicates. Empty at the end."""
        self._missing = {}
        is_rolling = self._request.mode is ContextMode.ROLLING
        while self._num_done < len(self._units):
            size = min(CHUNK_SEGMENTS, max(1, self._num_done)) if is_rolling else len(self._units)
            chunk = self._units[self._num_done : self._num_done + size]
            for unit in chunk:
                unit.history, unit.is_started = self.history, True
            results = [self._translated(unit) for unit in chunk]
            if self._missing:
                break
            self._num_done += len(chunk)
            if is_rolling:
                self._extend_history(chunk, results)
        return list(self._missing)

    def _extend_history(self, units: Sequence[_Unit], results: Sequence[_Result | None]) -> None:
        """Add the translations without problems to the history."""
        pairs = zip(units, results, strict=True)
        self.history = extended(
            self.history,
            (
                Example(language_name(unit.source), unit.segment.shown(), result.said)
                for unit, result in pairs
                if result is not None and not result.problems
            ),
        )

    def add_answers(
        self,
        answers: Mapping[Query, str],
        cut: frozenset[Query] = frozenset(),
        completed: frozenset[Query] = frozenset(),
    ) -> None:
        """Add the model's answers.

        cut: queries whose answers reached the token limit
        completed: queries whose answers ended without required markers or terms, which the sampler then added
        """
        for query, answer in answers.items():
            required = query.required if query in completed else None
            text = before_full_stop(answer, required) if required else answer
            wrong = problem(query.text, text, query.source, query.target, is_cut=query in cut)
            is_checked = query.terms and query.mode is not GlossaryMode.HINT
            terms = Glossary(dict(query.terms)).lack(query.text, text) if is_checked else ""
            wrong = wrong or ("has terms that were added at its end" if required and not required.markers else "")
            self._answers[query] = Answer(text, wrong, terms, query in completed)

    def results(self) -> list[Translation]:
        """Return the translations. Call it when nothing is missing."""
        found = [self.result(index) for index in range(len(self._pieces))]
        complete = [one for one in found if one is not None]
        assert len(complete) == len(found), "a translation is missing"
        return complete

    def result(self, index: int) -> Translation | None:
        """Return the translation of a text. None: some of it is missing."""
        pieces: list[tuple[str, bool]] = []
        problems: list[str] = []
        origins = {Origin.NONE}
        for piece in self._pieces[index]:
            if isinstance(piece, str):
                pieces.append((piece, False))
                continue
            translated = self._translated(piece) if piece.is_started else None
            if translated is None:
                return None
            pieces.append((translated.text, True))
            problems += translated.problems
            origins.add(translated.origin)
        source, origin = self._sources[index], max(origins, key=list(Origin).index)
        text = join_sentences(pieces, self._request.target)
        return Translation(text, source, self._probabilities[index], problems, origin)

    def _translated(self, unit: _Unit) -> _Result | None:
        """Return a segment's translation. None: texts were added to `_missing`."""
        segment, request, shown = unit.segment, self._request, unit.segment.shown()
        approved = self._memory.exact.get((unit.source, shown))
        if approved is not None and (restored := segment.restore(approved)) is not None:
            lack = self._glossary(unit.source).lack(shown, approved)
            is_wrong = lack and request.glossary_mode is not GlossaryMode.HINT
            return _Result(restored, approved, [f"lacks {lack}"] if is_wrong else [], Origin.MEMORY)
        examples = self._memory.examples.get((unit.source, shown), ())
        whole = Query(unit.source, request.target, "", self._context, unit.history, examples, 2 * request.variant)
        if len(segment.markers) > _MAX_MARKERS_IN_PROMPT:
            return self._split_at_markers(segment, whole)
        whole = self._with_text(whole, shown, segment.required())
        first = self._answers.get(whole) if whole.required and whole.required.markers else None
        if first is not None and _restored(segment, first) is None:
            self._keep(whole, first)
            return self._split_at_markers(segment, whole)
        best = self._answer(whole)
        if best is None:
            return None
        restored = _restored(segment, best)
        if restored is None:  # the cache had an answer without the markers, or the second answer lacks them
            return self._split_at_markers(segment, whole)
        origin = Origin.CACHE if whole in self._from_cache else Origin.MODEL
        return _Result(restored, best.text, best.problems, origin)

    def _with_text(self, query: Query, text: str, required: RequiredText | None = None) -> Query:
        request, glossary, plain = self._request, self._glossary(query.source), text
        for name in required.markers if required is not None else ():
            plain = plain.replace(name, MARK)
        terms = glossary.terms_in(plain)
        if request.glossary_mode is GlossaryMode.ENFORCE:
            required = enforced(required, terms.values())
        return replace(query, text=text, terms=tuple(terms.items()), required=required, mode=request.glossary_mode)

    def _glossary(self, source: str) -> Glossary:
        return self._request.glossaries.get(language_code(source), self._request.glossary)

    def _split_at_markers(self, segment: Segment, whole: Query) -> _Result | None:
        parts = [self._part(part, whole) for part in segment.parts]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        joined, count = segment.join([part.text for part in known]), len(segment.markers)
        problem_text = f"was split around {count} marker{'s'[: count > 1]} that the model did not keep"
        return _Result(joined, joined, [problem_text, *dict.fromkeys(one for part in known for one in part.problems)])

    def _part(self, text: str, whole: Query) -> Answer | None:
        """Return the translation of a text between markers.

        It includes the white space around the text.
        """
        if not has_letters(text):
            return Answer(text)
        answer = self._answer(self._with_text(whole, body := text.strip(), no_markers(body)))
        return None if answer is None else replace(answer, text=text.replace(body, answer.text))

    def _answer(self, query: Query) -> Answer | None:
        """Return the better one of at most two answers. None: it was added to `_missing`."""
        first = self._answers.get(query)
        again = replace(query, attempt=query.attempt + 1, required=query.required or no_markers(query.text))
        if first is None:
            if self._request.cache is CacheUse.USE:
                first = self._cache.get(self._tenant, query)
            if first is None:
                self._missing[query] = None
                return None
            self._from_cache.add(query)
            self._answers[query] = self._answers[again] = first
        if not first.problems:
            best = first
        elif (second := self._answers.get(again)) is None:
            self._missing[again] = None
            return None
        else:
            best = min(first, second, key=lambda one: (bool(one.missing_terms), bool(one.problem)))
        if not best.text:
            best = replace(best, text=query.text)
        self._keep(query, best)
        return best

    def _keep(self, query: Query, answer: Answer) -> None:
        if self._request.cache is not CacheUse.OFF:
            self._cache.put(self._tenant, query, answer)


def _restored(segment: Segment, answer: Answer) -> str | None:
    """Return the answer with its markers. None: the model lost or misplaced one."""
    return None if segment.markers and answer.was_completed else segment.restore(answer.text)
