"""Images, compose files and the systemd unit run with few rights. Linters pass where they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from test.serving import ROOT

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text("utf-8"))
MOST_EXPOSED = 3.0
"""systemd's figure: 0 for a unit without rights, 10 for one with all."""


def stages() -> dict[str, str]:
    """Name -> text of each stage."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_images_run_as_their_own_user_and_say_whether_they_are_well() -> None:
    runtime = stages()["runtime"]
    (user,) = re.findall(r"^USER (\d+):\d+$", runtime, re.MULTILINE)
    assert int(user) > 0 and "HEALTHCHECK" in runtime and "/readyz" in runtime and "VOLUME /data" in runtime
    for name in ("cpu", "gpu"):
        assert f"FROM runtime AS {name}\n" in DOCKERFILE and not re.search("^(USER|RUN)", stages()[name], re.MULTILINE)
    assert list(stages())[-1] == "cpu"


def test_the_cpu_image_takes_nothing_of_cuda() -> None:
    made = stages()
    assert re.findall(r"-r (\S+)\.lock", made["cpu-packages"]) == ["cpu"]
    assert re.findall(r"-r (\S+)\.lock", made["gpu-packages"]) == ["gpu"]
    assert "--from=cpu-packages" in made["cpu"] and "gpu" not in made["cpu"]
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]
    assert all("--require-hashes" in line or "--no-deps /wheels" in line for line in installs)


def test_the_build_context_has_what_is_copied_and_no_secrets() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    let_in = {line.removeprefix("!").partition("/")[0] for line in ignored if line.startswith("!")}
    product = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"test", "examples"}
    assert "*" in ignored and product | {"setup.py", "pyproject.toml", "requirements", "app.py"} <= let_in
    assert "deploy/secrets" in ignored and not let_in & {".git", ".venv", ".build", "test"}


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_services_have_limits_and_few_rights(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"mem_limit", "cpus", "pids_limit"} <= set(service)
    assert not service["image"].endswith(":latest") and ":" in service["image"]
    for variable, value in service.get("environment", {}).items():
        assert "PASSWORD" not in variable or str(value).startswith("/run/secrets/"), variable
    for volume in service.get("volumes", ()):
        source = volume.partition(":")[0]
        assert source in COMPOSE["volumes"] or (source.startswith("./") and volume.endswith(":ro")), volume
        assert not source.startswith("./") or source == "./models" or (DEPLOY / source).is_file(), volume
    for secret in service.get("secrets", ()):
        assert secret in COMPOSE["secrets"]


def test_the_gpu_file_only_changes_services_that_there_are() -> None:
    more = yaml.safe_load((DEPLOY / "compose.gpu.yml").read_text("utf-8"))
    assert set(more["services"]) <= set(COMPOSE["services"])
    assert more["services"]["rwkv"]["build"]["target"] in stages()


def test_the_password_that_prometheus_sends_is_the_secret_of_compose() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    secret = job["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    assert secret in COMPOSE["services"]["prometheus"]["secrets"]


def test_the_dockerfile_passes_its_linter() -> None:
    for name, lines in stages().items():  # what it found once, also where it is not installed
        assert len(re.findall("^CMD", lines, re.MULTILINE)) <= 1, name
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(ROOT / ".build/release/bin"))
    if program is None:
        pytest.skip("hadolint is not installed; make release brings it")
    done = subprocess.run([program, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_unit_has_few_rights() -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    unit = str(DEPLOY / "rwkv-batch.service")
    done = subprocess.run([program, "security", "--offline=true", unit], capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    if found is None:
        pytest.skip(f"this systemd rates no units offline: {done.stderr.strip()}")
    assert float(found[1]) <= MOST_EXPOSED, done.stdout
    checked = subprocess.run([program, "verify", unit], capture_output=True, text=True, check=False)
    lines = [line for line in checked.stderr.splitlines() if "rwkv-batch" in line and "is not executable" not in line]
    assert not lines, "\n".join(lines)
