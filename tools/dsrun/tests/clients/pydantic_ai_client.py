"""pydantic-ai, over chat completions and Responses: tools, typed answers, histories, streams.

Usage: pydantic_ai_client.py URL KEY MODEL
"""

import asyncio
from typing import Literal

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from shared import QUESTION, City, run, weather

SETTINGS = {"max_tokens": 300, "temperature": 0, "timeout": 120}


def models(url, key, model):
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    yield OpenAIChatModel(model, provider=openai)
    yield OpenAIResponsesModel(model, provider=openai)


def answers(url, key, model):
    for served in models(url, key, model):
        agent = Agent(served, instructions="Be brief.", model_settings={**SETTINGS, "max_tokens": 20})
        first = agent.run_sync(QUESTION)
        assert first.output and first.usage.output_tokens <= 20, first
        second = agent.run_sync("Why?", message_history=first.all_messages())
        assert len(second.all_messages()) == 4, second

        async def streamed():
            async with agent.run_stream(QUESTION) as stream:
                return await stream.get_output()

        assert asyncio.run(streamed()) == first.output


def typed(url, key, model):
    """The answer is the arguments of a tool, or follows a form."""
    for served in models(url, key, model):
        for output in [ToolOutput(City), ToolOutput(City, strict=True), NativeOutput(City)]:
            agent = Agent(served, output_type=output, model_settings=SETTINGS)
            assert isinstance(agent.run_sync(QUESTION).output, City)


def tools(url, key, model):
    """A tool has to be called; its result is sent back with the call, until the answer is there."""
    for served in models(url, key, model):
        agent = Agent(served, model_settings={**SETTINGS, "max_tokens": 1000, "temperature": 1})
        calls = []

        @agent.tool_plain(strict=True)
        def look(city: Literal["Paris", "Rome"], unit: Literal["C", "F"]) -> str:
            """The weather of a city."""
            calls.append(city)
            # From now on the model decides.
            choice["tool_choice"] = "auto"
            return weather(city, unit)

        choice = {"tool_choice": "required"}
        result = agent.run_sync(QUESTION, model_settings=lambda _: {**SETTINGS, "max_tokens": 1000, "temperature": 1, **choice})
        assert calls and isinstance(result.output, str), result
        again = agent.run_sync("Why?", message_history=result.all_messages())
        assert len(again.all_messages()) > len(result.all_messages())


if __name__ == "__main__":
    run(answers, typed, tools)
