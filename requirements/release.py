"""Builds a release into dist/: wheels, source distribution, an SBOM (CycloneDX), checksums. `make release` runs it.

Arguments: the folder of compiled libraries (prebuild.py), then lock files; the SBOM lists what they install.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).parents[1]
DIST = TOP / "dist"
LICENCES = TOP / "requirements" / "licences.md"


def main(prebuilt: Path, locks: list[str]) -> int:
    """Build, describe, sum up."""
    shutil.rmtree(DIST, ignore_errors=True)
    describe = ["git", "-C", str(TOP), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST), str(TOP)]
    environment = {**os.environ, "SOURCE_COMMIT": commit}  # the wheel is built without git
    subprocess.run(build, check=True, env=environment)
    for folder in sorted(prebuilt.iterdir()):
        own = {"PREBUILT": str(folder.resolve()), "PLATFORM": folder.name}
        subprocess.run([*build, "--wheel"], check=True, env=environment | own)
    version = next(DIST.glob("*.whl")).name.split("-")[1]
    for lock in locks:
        sbom(Path(lock), version, DIST / f"rwkv-batch-{version}.{Path(lock).stem}.cdx.json")
    files = sorted(file for file in DIST.iterdir() if file.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (DIST / "SHA256SUMS").write_text("".join(sums), "utf-8")
    sys.stdout.write("".join(sums))
    return 0


def sbom(lock: Path, version: str, target: Path) -> None:
    """A lock as a CycloneDX document. Adds what a lock does not say: our version, licences, who needs whom."""
    command = ["cyclonedx-py", "requirements", str(lock), "--pyproject", str(TOP / "pyproject.toml")]
    command += ["--output-format", "JSON", "--output-file", str(target)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    document = json.loads(target.read_text("utf-8"))
    own = {
        "version": version,
        "purl": f"pkg:pypi/rwkv-batch@{version}",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    document["metadata"]["component"] |= own
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", LICENCES.read_text("utf-8"), re.MULTILINE)
    named = {name: licence for name, _, licence in rows}
    for component in document["components"]:
        if (licence := named.get(component["name"])) and licence != "not named":
            component["licenses"] = [{"license": {"name": licence}}]
        component.pop("description", None)  # the lock's line, hashes and all
    refs = [component["bom-ref"] for component in document["components"]]
    document["dependencies"] = [{"ref": document["metadata"]["component"]["bom-ref"], "dependsOn": refs}]
    target.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
