"""deploy/: names in the files exist."""

from __future__ import annotations

import json
import re

from programs.settings import FLAGS, parse_settings
from test.serving import ROOT, Service

DEPLOY = ROOT / "deploy"
_PART = re.compile(r"_(bucket|sum|count)$")


def test_the_grafana_dashboard_uses_existing_metrics(service: Service) -> None:
    service.post("/v1/chat/completions", {"contents": ["abc"], "max_tokens": 3, "stream": True})
    text = service.get("/metrics").text
    reported = {_PART.sub("", name) for name in re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)}
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text("utf-8"))
    asked = {name for panel in dashboard["panels"] for one in panel["targets"] for name in names_in(one["expr"])}
    assert len(asked) > 15
    assert asked - reported - {"rwkv_device_power_watts"} == set()
    assert "Value of " not in text  # every gauge has a help text of its own
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def names_in(expression: str) -> set[str]:
    return {_PART.sub("", name) for name in re.findall(r"\brwkv_\w+", expression)}


def test_flags_and_variables_exist() -> None:
    for name in ("rwkv-batch.service", "Dockerfile", "compose.yml"):
        text = (DEPLOY / name).read_text("utf-8")
        names = set(re.findall(r"\b(RWKV_[A-Z_]+)[=:]", text))
        assert names, name
        for variable in names:
            assert is_known(f"--{variable.removeprefix('RWKV_').lower().replace('_', '-')}"), variable
    for name in ("nginx.conf", "Caddyfile", "haproxy.cfg"):
        for flag in re.findall(r"(--[a-z-]+)", (DEPLOY / name).read_text("utf-8")):
            assert is_known(flag), flag


def is_known(flag: str) -> bool:
    others = {"--password-file", "--build-dir"}  # the latter is a variable alone: native.files
    return flag in {one.option for flags in FLAGS.values() for one in flags} | others


def test_the_settings_for_the_proxies_are_valid() -> None:
    made = parse_settings(["--front", "none", "--trusted-proxies", "172.16.0.0/12"], {})
    assert made.service.front == "none"
