"""Training batches of sampled documents over the compact vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat
from multiprocessing import Pool
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from demo.corpus import mixture
from demo.corpus.documents import Document, text_of
from demo.vocabulary import STOPS, Compact
from rwkv_batch.tokenizer import Tokenizer
from rwkv_batch.tuning import Document as TokenDocument
from rwkv_batch.tuning.packing import Batch, pack

Source = Callable[[Random], Document]
UNKNOWN_SHARE = 0.01
MAX_IDS = 9_650
"""Ids with a row of their own. The size of the shipped file depends on it."""
_COUNTED_TOGETHER = 1000
_tokenizer = Tokenizer()


def tokenised(document: Document, *, joint: bool) -> tuple[list[int], list[float]]:
    """Return a document's ids and loss weights.

    Tokenises it by segment or, if `joint`, as one text. In one text a token may span two segments (`。` and the newline
    after it). Its weight is 0: the model learns to read such a token, not to write it.
    """
    if not joint:
        ids: list[int] = []
        weights: list[float] = []
        for segment in document:
            piece = _tokenizer.encode(segment.text)
            ids += piece
            weights += [segment.weight] * len(piece)
        return ids, weights
    ids = _tokenizer.encode(text_of(document))
    table = _tokenizer.byte_table
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


def batch(seed: int, index: int, compact: Compact, rows: int, time: int) -> Batch:
    """Return a batch [rows, time] of table rows; `seed` and `index` determine it."""
    rng = Random(f"{seed}/{index}")
    samples = (sample(rng) for _ in repeat(None))
    found = next(pack((TokenDocument(compact.of_id[ids].tolist(), weights) for ids, weights in samples), rows, time))
    noise = np.random.default_rng([seed, index])
    blank = noise.random((rows, time)) < UNKNOWN_SHARE * (noise.random((rows, 1)) < 0.3)
    found.inputs[torch.from_numpy(blank)] = compact.unused
    found.weights[found.targets == compact.unused] = 0
    return found


class Batches(IterableDataset[Batch]):
    """An endless stream of batches. It is the same for any number of workers."""

    def __init__(self, seed: int, compact: Compact, rows: int, time: int) -> None:
        self.seed, self.compact, self.rows, self.time = seed, compact, rows, time

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        index, stride = (info.id, info.num_workers) if info else (0, 1)
        while True:
            yield batch(self.seed, index, self.compact, self.rows, self.time)
            index += stride


def used_ids(seed: int, documents: int, workers: int = 0) -> NDArray[np.int64]:
    """Return the stop ids and the most frequent ids of sampled documents, at most MAX_IDS."""
    seen: Counter[int] = Counter()
    parts = [f"vocabulary/{seed}/{start}" for start in range(0, documents, _COUNTED_TOGETHER)]
    if workers:
        with Pool(workers) as pool:
            counts = pool.map(_seen, parts)
    else:
        counts = [*map(_seen, parts)]
    for count in counts:
        seen.update(count)
    frequent = [token for token, count in seen.most_common() if count > documents // 30_000]
    known = sorted({*STOPS, *frequent[: MAX_IDS - len(STOPS)]})
    return np.array(known, dtype=np.int64)


def _seen(name: str) -> Counter[int]:
    """Count the documents of each id, in a sample."""
    rng = Random(name)
    seen: Counter[int] = Counter()
    for _ in range(_COUNTED_TOGETHER):
        seen.update(set(sample(rng)[0]))
    return seen
