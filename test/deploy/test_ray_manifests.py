"""deploy/cluster/ray.yaml and kuberay.yaml match Ray's schema, and their flags are the service's."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from programs.settings import parse_settings
from test.serving import ROOT

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
