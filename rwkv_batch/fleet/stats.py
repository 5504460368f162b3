"""Merges statistics of several engines: one /status with an entry per engine, /metrics with an engine label."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rwkv_batch.fleet.member import Member

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
"""Prefixes of metrics that belong to the service. Any engine may count them."""


def merged_status(answers: list[tuple[Member, dict[str, Any]]], all_members: list[Member]) -> dict[str, Any]:
    """The result has the first engine's status with summed counters, and an entry per engine."""
    merged = dict(answers[0][1])
    info = {member.name: stats for member, stats in answers}
    if len(answers) > 1:
        for name in _SUMMED:
            if name in merged:
                merged[name] = round(sum(stats.get(name, 0) for _, stats in answers), 1)
        for name in _LARGEST:
            merged[name] = max(stats.get(name, 0.0) for _, stats in answers)
        labels = {label for _, stats in answers for label in stats.get("jobs", {})}
        merged["jobs"] = {label: sum(stats["jobs"].get(label, 0) for _, stats in answers) for label in labels}
        merged["draining"] = all(stats.get("draining") for _, stats in answers)
    merged["engines"] = [_engine_status(member, info.get(member.name)) for member in all_members]
    return merged


def _engine_status(member: Member, stats: dict[str, Any] | None) -> dict[str, Any]:
    """stats: None if the engine does not answer"""
    report = member.report
    status: dict[str, Any] = {
        "engine": member.name,
        "status": "ready" if member.is_available else "lost" if member.info.status == "ready" else member.info.status,
        "pid": member.info.pid,
        "node": member.info.node,
        "error": member.info.error,
        "rows": report.rows,
        "queued_prompt_tokens": report.prompt_tokens,
        "devices": [],
        "sessions": 0,
    }
    if stats is not None:
        status["devices"] = stats.get("devices", [])
        status["sessions"] = stats.get("pool", {}).get("sessions", 0)
        status["generated_tokens_per_s"] = stats.get("generated_tokens_per_s", 0.0)
    return status


def merged_metrics(answers: list[tuple[Member, str]]) -> str:
    """Samples of a family stay together, each with its engine's name."""
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
    """Yield metric families: their comment lines, then samples as (name and labels, value)."""
    headers: list[str] = []
    samples: list[tuple[str, float]] = []
    for line in text.splitlines():
        if line.startswith("#"):
            if line.startswith("# HELP") and headers:  # the previous family may have no samples
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
