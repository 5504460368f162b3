"""Weights that a request gives for the members of a named mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from routes.request.bodies import MixedState, MixtureFields
from rwkv_batch.errors import invalid

Mixing = TypeVar("Mixing", bound=MixtureFields)


def with_mixture_weights(body: Mixing, mixture: Sequence[tuple[str, float]]) -> Mixing:
    """Return the body with its weights applied to `mixture`, a list of (name, weight). Raises ServiceError."""
    weights = body.mrss_gatingweight
    if len(weights) != len(mixture):
        what = f"the mixture's {len(mixture)} states" if mixture else "a mixture that `model` or `state` names"
        raise invalid("mrss_gatingweight", f"must be a weight for each of {what}, got {len(weights)}", weights)
    members = [MixedState(name=name, weight=weight) for (name, _), weight in zip(mixture, weights, strict=True)]
    return body.model_copy(update={"states": members, "state": None})
