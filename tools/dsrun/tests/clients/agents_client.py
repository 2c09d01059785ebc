"""OpenAI's Agents SDK, over Responses (its default) and chat completions: tools, sessions, typed answers, streams.

Usage: agents_client.py URL KEY MODEL
"""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from shared import QUESTION, City, run, weather

WEATHER = function_tool(weather)


def models(url, key, model):
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    yield OpenAIResponsesModel(model=model, openai_client=client)
    yield OpenAIChatCompletionsModel(model=model, openai_client=client)


def agent(model, **settings):
    """An agent whose answers are the same every time. One call at a time: models of tests may go on to call until the limit."""
    limits = {"max_tokens": 200, "temperature": 0, "parallel_tool_calls": False} | settings.pop("limits", {})
    return Agent(name="Guide", instructions="Be brief.", model=model, model_settings=ModelSettings(**limits), **settings)


async def streamed(agent, question, **settings):
    result = Runner.run_streamed(agent, question, **settings)
    kinds = {event.type async for event in result.stream_events()}
    assert "raw_response_event" in kinds, kinds
    return result


async def conversation(url, key, model):
    """The SDK requires the first call, and lets the model decide from then on."""
    for served in models(url, key, model):
        guide = agent(served, tools=[WEATHER], limits={"tool_choice": "required"})
        for go in [Runner.run, streamed]:
            session = SQLiteSession("visit")
            result = await go(guide, QUESTION, session=session)
            kinds = [item.type for item in result.new_items]
            assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
            again = await go(guide, "And in Rome?", session=session)
            assert len(again.to_input_list()) > len(result.to_input_list()), again
            # A history may also be given by the caller, as the SDK dumps it.
            history = [*result.to_input_list(), {"role": "user", "content": "Why?"}]
            assert (await go(guide, history)).final_output


async def typed(url, key, model):
    for served in models(url, key, model):
        for go in [Runner.run, streamed]:
            result = await go(agent(served, output_type=City), QUESTION)
            assert isinstance(result.final_output, City), result


async def handed_over(url, key, model):
    """An agent hands over to another, which is a tool call for the server."""
    for served in models(url, key, model):
        other = agent(served, output_type=City)
        first = agent(served, handoffs=[other], limits={"tool_choice": "required"})
        result = await Runner.run(first, QUESTION)
        assert result.last_agent is other and isinstance(result.final_output, City), result


async def stored(url, key, model):
    """The server keeps the conversation."""
    served = next(models(url, key, model))
    guide = agent(served)
    result = await Runner.run(guide, QUESTION)
    again = await Runner.run(guide, "Why?", previous_response_id=result.last_response_id)
    alone = await Runner.run(guide, "Why?")
    tokens = lambda result: result.raw_responses[0].usage.input_tokens
    assert again.final_output and tokens(again) > tokens(alone), (again, alone)


def all_parts(url, key, model):
    async def each():
        for part in [conversation, typed, handed_over, stored]:
            await part(url, key, model)
            print(f"{part.__name__}: ok", flush=True)

    asyncio.run(each())


if __name__ == "__main__":
    os.environ.setdefault("OPENAI_API_KEY", "none")
    set_tracing_disabled(True)
    run(all_parts)
