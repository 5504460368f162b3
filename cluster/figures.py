"""Figures of several engines as one document: /status with each engine, /metrics with its name as a label."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.member import Member

_SUMMED = (
    "running_rows",
    "waiting_rows",
    "paused_rows",
    "free_slots",
    "max_running",
    "steps",
    "queued_prompt_tokens",
    "generated_tokens",
    "computed_tokens",
    "generated_tokens_per_s",
    "computed_tokens_per_s",
    "drawn_tokens",
    "read_tokens",
    "drawn_tokens_per_s",
    "read_tokens_per_s",
)
_LARGEST = ("prompt_backlog_s",)
_OF_THE_SERVICE = ("rwkv_http_", "rwkv_client_")
"""Counted in whichever engine is told: no engine's own."""


def merged_status(answers: list[tuple[Member, dict[str, Any]]], every: list[Member]) -> dict[str, Any]:
    """The first engine's figures, with the sums of those that add up, and what is to be known of each engine."""
    merged = dict(answers[0][1])
    told = {member.name: figures for member, figures in answers}
    if len(answers) > 1:
        for name in _SUMMED:
            if name in merged:
                merged[name] = round(sum(figures.get(name, 0) for _, figures in answers), 1)
        for name in _LARGEST:
            merged[name] = max(figures.get(name, 0.0) for _, figures in answers)
        labels = {label for _, figures in answers for label in figures.get("jobs", {})}
        merged["jobs"] = {label: sum(figures["jobs"].get(label, 0) for _, figures in answers) for label in labels}
        merged["draining"] = all(figures.get("draining") for _, figures in answers)
    merged["engines"] = [_about(member, told.get(member.name)) for member in every]
    return merged


def _about(member: Member, figures: dict[str, Any] | None) -> dict[str, Any]:
    """One engine; `figures`: its own status, None while it does not answer."""
    report = member.report
    about: dict[str, Any] = {
        "engine": member.name,
        "status": "ready" if member.takes_work else "lost" if member.told.status == "ready" else member.told.status,
        "pid": member.told.pid,
        "node": member.told.node,
        "error": member.told.error,
        "rows": report.rows,
        "queued_prompt_tokens": report.prompt_tokens,
        "devices": [],
        "sessions": 0,
    }
    if figures is not None:
        about["devices"] = figures.get("devices", [])
        about["sessions"] = figures.get("pool", {}).get("sessions", 0)
        about["generated_tokens_per_s"] = figures.get("generated_tokens_per_s", 0.0)
    return about


def merged_metrics(answers: list[tuple[Member, str]]) -> str:
    """Prometheus' text form of all engines: a family's samples stand together, each with its engine's name."""
    families: dict[str, tuple[list[str], dict[str, float]]] = {}
    for member, text in answers:
        for headers, samples in _families(text):
            known = families.setdefault(headers[0], (headers, {}))[1]
            for name, value in samples:
                key = name if name.startswith(_OF_THE_SERVICE) else _labelled(name, member.name)
                known[key] = known.get(key, 0.0) + value
    lines = []
    for headers, samples_of in families.values():
        lines += [*headers, *(f"{name} {value!r}" for name, value in samples_of.items())]
    return "\n".join([*lines, ""])


def _families(text: str) -> Iterator[tuple[list[str], list[tuple[str, float]]]]:
    """Families of figures: their lines of comment, then samples as (name and labels, value)."""
    headers: list[str] = []
    samples: list[tuple[str, float]] = []
    for line in text.splitlines():
        if line.startswith("#"):
            if line.startswith("# HELP") and headers:  # the family before it may have no samples yet
                yield headers, samples
                headers, samples = [], []
            headers.append(line)
        elif line:
            name, _, value = line.rpartition(" ")
            samples.append((name, float(value)))
    if headers:
        yield headers, samples


def _labelled(name: str, engine: str) -> str:
    if name.endswith("}"):
        return f'{name[:-1]},engine="{engine}"}}'
    return f'{name}{{engine="{engine}"}}'
