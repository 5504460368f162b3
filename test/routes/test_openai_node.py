"""OpenAI's SDK for Node against the service, if it is installed.

npm install --prefix /tmp/sdk openai@6.49.0
RWKV_OPENAI_NODE=/tmp/sdk python -m pytest test/routes/test_openai_node.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from test.serving import Service

SDK = os.environ.get("RWKV_OPENAI_NODE", "")
SCRIPT = Path(__file__).with_name("openai_node.mjs")
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (Path(SDK) / "node_modules" / "openai").is_dir(),
    reason="needs node and RWKV_OPENAI_NODE, a folder with node_modules/openai",
)


@pytest.fixture(scope="module")
def output(service: Service) -> dict[str, Any]:
    command = ["node", str(SCRIPT), str(Path(SDK).resolve()), f"{service.url}/openai/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_text_complete_and_streamed(output: dict[str, Any]) -> None:
    assert output["chat"]["content"] == output["stream"]["content"]
    assert output["chat"]["usage"]["completion_tokens"] == output["stream"]["usage"]["completion_tokens"] == 8
    assert output["responseStream"]["text"] == output["response"]
    assert output["responseStream"]["last"] in ("response.completed", "response.incomplete")
    assert output["models"] == ["rwkv7"] and output["scored"] > 1


def test_json_with_a_schema(output: dict[str, Any]) -> None:
    assert output["formed"]["reason"] == "stop" and set(json.loads(output["formed"]["content"])) == {"city"}


def test_calls_complete_and_streamed(output: dict[str, Any]) -> None:
    (call,) = output["called"]["calls"]
    assert output["called"]["reason"] == "tool_calls" and call["type"] == "function"
    assert call["function"]["name"] == "get_weather" and set(json.loads(call["function"]["arguments"])) == {"city"}
    (streamed,) = output["calledInStream"]["calls"]
    assert streamed["function"]["arguments"] == call["function"]["arguments"]
    assert output["calledInStream"]["events"] == [{"name": "get_weather", "arguments": call["function"]["arguments"]}]


def test_an_error_names_its_field(output: dict[str, Any]) -> None:
    assert output["refused"] == {"name": "BadRequestError", "status": 400, "param": "regex"}
