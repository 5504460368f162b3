"""Frameworks on top of OpenAI's package: instructor, pydantic-ai, LangChain.

Each test is skipped unless its framework is installed:

pip install --target /tmp/agents instructor 'pydantic-ai-slim[openai]' langchain langchain-openai
PYTHONPATH=/tmp/agents python -m pytest test/routes/test_agents.py
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from test.serving import Service

MODEL = "rwkv7"
CALL = '```json\n{"name": "get_weather", "arguments": {"unit": "c"}}\n```'


class Order(BaseModel):
    """An order."""

    model_config = ConfigDict(extra="forbid")
    drink: Literal["tea", "coffee"]
    cups: int = Field(ge=1, le=9)


def needs(framework: str) -> pytest.MarkDecorator:
    """Skip a test without its framework, before it starts a service."""
    return pytest.mark.skipif(find_spec(framework) is None, reason=f"{framework} is not installed")


@pytest.fixture(scope="module")
def url(service: Service) -> str:
    return f"{service.url}/openai/v1"


@pytest.fixture(scope="module")
def echo_url(fake: Service) -> str:
    """The address of a service that echoes the user message's text."""
    return f"{fake.url}/openai/v1"


def weather_tool(units: list[str]) -> Callable[..., str]:
    """A function that records its calls."""

    def get_weather(unit: Literal["c", "f"]) -> str:
        """The weather."""
        units.append(unit)
        return "say sunny"

    return get_weather


@needs("instructor")
@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON"])
def test_instructor(url: str, mode: str) -> None:
    import instructor

    client = instructor.from_openai(
        OpenAI(base_url=url, api_key="none", max_retries=0), mode=getattr(instructor.Mode, mode)
    )
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Two cups of tea, please."}], "max_tokens": 200}
    if mode == "JSON":  # constrained to JSON: a random model would not produce any
        with pytest.raises(Exception, match=r"Order|max_tokens|incomplete"):
            client.chat.completions.create(model=MODEL, response_model=Order, max_retries=0, **asked)
        return
    order = client.chat.completions.create(model=MODEL, response_model=Order, max_retries=0, **asked)
    assert isinstance(order, Order)


@needs("pydantic_ai")
def test_pydantic_ai(url: str, echo_url: str) -> None:
    import pydantic_ai as agents
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers import openai as providers

    for kind in (models.OpenAIChatModel, models.OpenAIResponsesModel):
        model = kind(MODEL, provider=providers.OpenAIProvider(base_url=url, api_key="none"))
        agent = agents.Agent(model, output_type=Order, retries=0)
        assert isinstance(agent.run_sync("Two cups of tea, please.").output, Order)
        model = kind(MODEL, provider=providers.OpenAIProvider(base_url=echo_url, api_key="none"))
        agent = agents.Agent(model, model_settings={"max_tokens": 64})
        units: list[str] = []

        agent.tool_plain(weather_tool(units))
        agent.run_sync(f"say {CALL}")
        assert units == ["c"]


@needs("langchain_openai")
def test_langchain(url: str, echo_url: str) -> None:
    import langchain_openai as chat_models
    from langchain import agents

    for use_responses in (False, True):
        options: dict[str, Any] = {"model": MODEL, "api_key": "none", "use_responses_api": use_responses}
        chat = chat_models.ChatOpenAI(base_url=url, max_tokens=200, **options)
        for method in ("function_calling", "json_schema"):
            order = chat.with_structured_output(Order, method=method).invoke("Two cups of tea, please.")
            assert isinstance(order, Order)
        units: list[str] = []

        chat = chat_models.ChatOpenAI(base_url=echo_url, max_tokens=64, **options)
        agent = agents.create_agent(chat, [weather_tool(units)])
        said = agent.invoke({"messages": [{"role": "user", "content": f"say {CALL}"}]})["messages"]
        assert units == ["c"] and [message.type for message in said] == ["human", "ai", "tool", "ai"]
