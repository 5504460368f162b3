"""Packs tokenised documents into training batches. Each document begins at a multiple of CHUNK."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from demo import vocabulary
from demo.corpus import mixture
from demo.corpus.documents import Document, text_of
from demo.vocabulary import Compact
from demo.wkv import CHUNK

Rows = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]
Source = Callable[[Random], Document]
UNKNOWN_SHARE = 0.01


def tokenised(document: Document, *, joint: bool) -> tuple[list[int], list[float]]:
    """Return a document's ids and loss weights.

    Tokenises it by segment or, if `joint`, as one text. In one text a token may span two segments (`。` and the newline
    after it). Its weight is 0: the model learns to read such a token, not to write it.
    """
    if not joint:
        ids: list[int] = []
        weights: list[float] = []
        for segment in document:
            piece = vocabulary.encode(segment.text)
            ids += piece
            weights += [segment.weight] * len(piece)
        return ids, weights
    ids = vocabulary.encode(text_of(document))
    table = vocabulary.token_bytes()
    edges = np.cumsum([0] + [len(segment.text.encode()) for segment in document])
    ends = np.cumsum([len(table[t]) for t in ids])
    starts = ends - [len(table[t]) for t in ids]
    first = np.searchsorted(edges, starts, side="right") - 1
    last = np.searchsorted(edges, ends - 1, side="right") - 1
    given = np.array([segment.weight for segment in document])
    first, last = np.minimum(first, len(given) - 1), np.minimum(last, len(given) - 1)
    return ids, [float(w) for w in np.where(first == last, given[first], 0.0)]


def sample(rng: Random, source: Source = mixture.document) -> tuple[list[int], list[float]]:
    """Sample a tokenised document that ends with token 0."""
    document = source(rng)
    ids, weights = tokenised(document, joint=rng.random() < 0.2)
    return [*ids, 0], [*weights, 1.0]


def batch(seed: int, index: int, compact: Compact, rows: int, time: int, source: Source = mixture.document) -> Rows:
    """Return inputs, targets, weights and document begins [rows, time]; `seed` and `index` determine them."""
    rng = Random(f"{seed}/{index}")
    noise = np.random.default_rng([seed, index])
    inputs = np.zeros((rows, time), dtype=np.int64)
    targets = np.zeros((rows, time), dtype=np.int64)
    weights = np.zeros((rows, time), dtype=np.float32)
    begins = np.zeros((rows, time), dtype=np.bool_)
    waiting: list[tuple[list[int], list[float]]] = []
    for row in range(rows):
        at = 0
        begins[row, 0] = True
        while at < time:
            while len(waiting) < 24:
                document = sample(rng, source)
                if len(document[0]) - 1 <= time:
                    waiting.append(document)
            fit = next((i for i, (ids, _) in enumerate(waiting) if len(ids) - 1 <= time - at), None)
            if fit is None:
                begins[row, at] = True
                break
            ids, weight = waiting.pop(fit)
            length = len(ids) - 1
            known = compact.of_id[ids]
            inputs[row, at : at + length] = known[:-1]
            targets[row, at : at + length] = known[1:]
            weights[row, at : at + length] = weight[1:]
            begins[row, at] = True
            at += -(-length // CHUNK) * CHUNK
    blank = noise.random((rows, time)) < UNKNOWN_SHARE * (noise.random((rows, 1)) < 0.3)
    inputs[blank] = compact.unused
    weights[targets == compact.unused] = 0
    return inputs, targets, weights, begins


class Batches(IterableDataset[Rows]):
    """An endless stream of batches from index `first`. It is the same for any number of workers."""

    def __init__(
        self, seed: int, first: int, compact: Compact, rows: int, time: int, source: Source = mixture.document
    ) -> None:
        self.seed, self.first, self.compact, self.rows, self.time = seed, first, compact, rows, time
        self.source = source

    def __iter__(self) -> Iterator[Rows]:
        info = get_worker_info()
        index, stride = (self.first + info.id, info.num_workers) if info else (self.first, 1)
        while True:
            yield batch(self.seed, index, self.compact, self.rows, self.time, self.source)
            index += stride


def used_ids(seed: int, documents: int) -> NDArray[np.int64]:
    """Return the stop ids and ids frequent enough in sampled documents."""
    rng = Random(f"vocabulary/{seed}")
    seen: Counter[int] = Counter()
    for _ in range(documents):
        seen.update(set(sample(rng)[0]))
    known = vocabulary.STOPS | {token for token, count in seen.items() if count > documents // 30_000}
    return np.array(sorted(known), dtype=np.int64)
