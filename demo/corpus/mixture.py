"""The mixture of all kinds of documents that the model is trained on."""

from __future__ import annotations

from random import Random

from demo.corpus import arithmetic, chat, copying, infill, structured, tools, translation
from demo.corpus.document import Document

SOURCES = (
    translation.document, chat.document, arithmetic.document, infill.document, tools.document, structured.document, copying.document
)  # fmt: skip
SHARES = (0.65, 0.16, 0.035, 0.03, 0.06, 0.045, 0.02)


def document(rng: Random) -> Document:
    """One training document."""
    return rng.choices(SOURCES, SHARES)[0](rng)
