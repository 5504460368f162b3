"""Connects to a model that was loaded at run time."""

from __future__ import annotations

import dataclasses

import msgspec

from routes.context import Context, Readiness
from rwkv_batch.fleet.fleet import Fleet
from rwkv_batch.fleet.quota_ledger import QuotaLedger
from rwkv_batch.fleet.routing import FleetLimits
from rwkv_batch.ipc.served_model import ServedModel
from rwkv_batch.translation.plan import CACHE_KEY, TranslationCache
from rwkv_batch.translation.prompt_forms import prompt_form


def connect_model(context: Context, model: ServedModel, name: str, quotas: QuotaLedger) -> tuple[Context, Fleet]:
    """Connect to a ready model and return its context and its engines.

    name: this process's name in the engine's status
    quotas: the ledger that counts API keys' limits over all models
    """
    readiness = Readiness(context.config.engine_wait_s)
    limits = FleetLimits(context.config.resubmit, context.config.engine_wait_s)
    fleet = Fleet(limits, readiness.engine_changed, quotas)
    fleet.update([model])
    fleet.start(name)
    form = prompt_form("auto", model.spec.file)
    config = msgspec.structs.replace(context.config, model_name=model.spec.name, translation_prompt=form)
    shared = {**context.shared, CACHE_KEY: TranslationCache(config.translate_cache)}
    return (
        dataclasses.replace(
            context, engine=fleet, readiness=readiness, config=config, shared=shared, defaults=model.spec.defaults
        ),
        fleet,
    )
