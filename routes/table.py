"""All routes of the service. A new group of endpoints adds its ROUTES here."""

from __future__ import annotations

from routes import engines, loaded, models, native_completions, rwkv_infer, score, state, system, web_page
from routes.anthropic import messages
from routes.fine_tuning import jobs
from routes.llama_cpp import completion, tokens
from routes.ollama import generation
from routes.ollama import models as ollama_models
from routes.openai import batches, chat, completions, files, responses
from routes.route import Route
from routes.translation import (
    batch_translate,
    deepl,
    deepl_glossaries,
    document_clients,
    documents,
    glossaries,
    libretranslate,
    memory,
)

ROUTES: tuple[Route, ...] = (
    *native_completions.ROUTES,
    *batch_translate.ROUTES,
    *glossaries.ROUTES,
    *memory.ROUTES,
    *deepl.ROUTES,
    *deepl_glossaries.ROUTES,
    *libretranslate.ROUTES,
    *documents.ROUTES,
    *document_clients.ROUTES,
    *state.ROUTES,
    *loaded.ROUTES,
    *chat.ROUTES,
    *completions.ROUTES,
    *score.ROUTES,
    *responses.ROUTES,
    *messages.ROUTES,
    *generation.ROUTES,
    *ollama_models.ROUTES,
    *models.ROUTES,
    *engines.ROUTES,
    *rwkv_infer.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
    *jobs.ROUTES,
    *completion.ROUTES,
    *tokens.ROUTES,
    *system.ROUTES,
    *web_page.ROUTES,
)
