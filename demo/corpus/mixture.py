"""The mixture of all kinds of documents that the model is trained on."""

from __future__ import annotations

from random import Random

from demo.corpus import arithmetic, chat, infill, translation
from demo.corpus.document import Document

SOURCES = (translation.document, chat.document, arithmetic.document, infill.document)
SHARES = (0.74, 0.18, 0.04, 0.04)


def document(rng: Random) -> Document:
    """One training document."""
    return rng.choices(SOURCES, SHARES)[0](rng)
