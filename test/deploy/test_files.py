"""deploy/, requirements/ and SECURITY.md: what they name exists, locks have hashes, Ray's manifests fit its schema."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

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


LOCKS = ROOT / "requirements"
OF_LIST = {
    "requirements.txt": ["cpu", "cuda"],
    "requirements-nvcc.txt": ["nvcc"],
    "requirements-gpu.txt": ["gpu"],
    "requirements-cluster.txt": ["cpu cluster", "gpu cluster"],
    "requirements-dev.txt": ["cpu dev"],
    "requirements-release.txt": ["release"],
}


def entries(lock: str) -> dict[str, str]:
    """Return package -> its text, for a lock and its included locks."""
    text = (LOCKS / f"{lock}.lock").read_text("utf-8")
    found = {name: whole for whole, name in re.findall(r"^(([a-z][\w.-]*)==(?:.*\\\n)+.*)$", text, re.MULTILINE)}
    for named in re.findall(r"^-r (\w+)\.lock$", text, re.MULTILINE):
        found = {**entries(named), **found}
    return found


def pins(list_: str) -> dict[str, str]:
    """Return package -> version, for a list and its included lists."""
    text = (ROOT / list_).read_text("utf-8")
    found = dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)$", text, re.MULTILINE))
    for named in re.findall(r"^-r (\S+)$", text, re.MULTILINE):
        found |= pins(named)
    return found


def test_every_list_has_a_lock() -> None:
    assert {path.name for path in ROOT.glob("requirements*.txt")} == set(OF_LIST)
    named = {lock for sets in OF_LIST.values() for set_ in sets for lock in set_.split()}
    assert {path.stem for path in LOCKS.glob("*.lock")} == named | {"common"}


@pytest.mark.parametrize(("list_", "locks"), [(list_, set_) for list_, sets in OF_LIST.items() for set_ in sets])
def test_a_lock_has_the_versions_of_its_list_with_hashes(list_: str, locks: str) -> None:
    locked: dict[str, str] = {}
    for lock in locks.split():
        locked |= entries(lock)
    expected = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins(list_).items()}
    assert expected
    for name, version in expected.items():
        pinned = re.match(r"\S+==([^+\s]+)", locked.get(name, ""))
        assert pinned and pinned[1] == version, f"{name}=={version} of {list_} is not in {locks}: make lock"
    for text in locked.values():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", text), text


def test_the_cpu_set_has_nothing_of_cuda() -> None:
    names = set(entries("cpu"))
    assert "torch" in names and not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]
    assert {"triton", "nvidia-cudnn-cu13"} <= set(entries("cuda"))


def test_every_package_has_a_licence_in_the_table() -> None:
    table = (LOCKS / "licences.md").read_text("utf-8")
    named = dict(re.findall(r"^\| (\S+) \| \S+ \| (.+) \|$", table, re.MULTILINE))
    service = {**entries("gpu"), **entries("cluster"), **entries("cpu")}
    other_systems = {name for name, text in service.items() if "win32'" in text.partition("\\")[0]}
    assert set(service) - set(named) - other_systems == set()
    assert not {name for name in service if re.search(r"\bA?GPL", named.get(name, ""))}


WHO = "stranger page holder neighbour giver local"


def test_every_threat_has_a_test_or_is_called_open() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8").partition("## Threat model")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 20 and all(len(row) == 4 for row in rows)
    for who in WHO.split():
        assert any(who in row[0] for row in rows), who
    for _, threat, holds, tests in rows[2:]:
        named = re.findall(r"`(test/[^`]+)`", tests)
        assert named or "**open**" in holds, threat
        for path in named:
            assert (ROOT / path).exists(), f"SECURITY.md names {path}, which is gone"


def test_the_version_is_the_same_everywhere() -> None:
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "rwkv_batch/version.py").read_text("utf-8"), re.MULTILINE)
    assert version is not None
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"## [{version[1]}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


FOLDER = ROOT / "deploy" / "cluster"
CLUSTER = FOLDER / "ray.yaml"
KUBERNETES = FOLDER / "kuberay.yaml"


def documents() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8"))}


def flags_in(text: str) -> list[str]:
    """Return the flags of the serve command; its lines may be continued and commented."""
    joined = re.sub(r"\\\n#?\s*", " ", text)
    (command,) = re.findall(r"(?:app\.py|rwkv-batch serve) ([^\n&]+)", joined)
    return shlex.split(command)


@pytest.mark.cluster
def test_the_cluster_matches_rays_schema() -> None:
    ray = pytest.importorskip("ray")
    jsonschema = pytest.importorskip("jsonschema")
    config = yaml.safe_load(CLUSTER.read_text(encoding="utf-8"))
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(config, json.loads(schema.read_text(encoding="utf-8")))
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert "RAY_AUTH_MODE=token" in commands[-1] and "RAY_USAGE_STATS_ENABLED=0" in commands[-1]


@pytest.mark.parametrize("file", [CLUSTER, KUBERNETES], ids=lambda file: file.name)
def test_its_service_starts_with_existing_flags(file: Path, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    flags = [str(password) if flag == "FILE" else flag for flag in flags_in(file.read_text(encoding="utf-8"))]
    settings = parse_settings(flags, {"RWKV_STATE_DB": "postgresql://user@host/db", "RWKV_PASSWORD": "secret"})
    assert settings.service.cluster == "auto" and settings.http.password == "secret" and settings.http.host == "0.0.0.0"
    assert settings.engine.pool.state_db.startswith("postgresql://") and settings.service.replicas > 1


def test_kubernetes_pods_match_the_service() -> None:
    cluster, service = documents()["RayCluster"], documents()["Service"]
    (group,) = cluster["spec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert service["spec"]["selector"].items() <= group["template"]["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    assert "KUBERAY_GEN_RAY_START_CMD" in container["args"][0] and "--port 8000" in container["args"][0]
    assert {one["name"] for one in container["env"]} >= {"RWKV_STATE_DB", "RWKV_PASSWORD", "RAY_USAGE_STATS_ENABLED"}
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * group["replicas"]
    (asked,) = re.findall(r"--replicas (\d+)", container["args"][0])
    assert int(asked) == gpus
    pinned = (ROOT / "requirements-cluster.txt").read_text(encoding="utf-8")
    assert f"ray=={cluster['spec']['rayVersion']}" in pinned
