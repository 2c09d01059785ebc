"""The parts of `openai_client.py` with tools."""

import json

import openai

from openai_chat import QUESTION, City, chat, connect, content, token
from shared import Time, Weather, fails

TEXT = {"type": "string", "maxLength": 12}
RAIN = {"type": "object", "properties": {"city": TEXT, "unit": {"enum": ["C", "F"]}}, "required": ["city", "unit"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_rain", "parameters": {**RAIN, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "get_time"}},
]
# Tools of the SDK are strict.
STRICT = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Time)]


def strict_tools(url, key, model):
    """Tools of the SDK: text is free while the model decides, arguments follow the schema and come in pieces."""
    ask = chat(url, key, model)
    free = [{"type": "function", "function": {**tool["function"], "strict": False}} for tool in STRICT]
    text = content(ask(tools=free))
    assert text and content(ask(tools=STRICT)) == text and content(ask(tools=STRICT, tool_choice="auto")) == text
    settings = dict(model=model, messages=QUESTION, max_completion_tokens=400, temperature=1, tools=STRICT[:1])
    for seed in range(3):
        choice = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        with connect(url, key).chat.completions.stream(**settings, **choice) as stream:
            events = list(stream)
        deltas = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
        [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert len(deltas) > 3 and "".join(deltas) == done.arguments, deltas
        assert done.name == "Weather" and isinstance(done.parsed_arguments, Weather), done


def tools(url, key, model):
    """Tools without `strict`: calls that are required follow the schema too."""
    ask = chat(url, key, model, max_completion_tokens=2000, temperature=1, seed=2, tools=TOOLS)
    named = {"type": "function", "function": {"name": "get_rain"}}
    choice = ask(tool_choice=named).choices[0]
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert choice.finish_reason == "tool_calls" and call.function.name == "get_rain", choice
    assert set(arguments) == {"city", "unit"} and len(arguments["city"]) <= 12 and arguments["unit"] in ["C", "F"], call
    # A line break after a call begins another.
    several = dict(tool_choice="required", logit_bias={token(connect(url, key), "\n"): 2})
    calls = ask(**several).choices[0].message.tool_calls
    assert len(calls) > 1 and len({call.id for call in calls}) == len(calls), calls
    streamed = {}
    for chunk in ask(**several, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            # The first piece has the name, the others have parts of the arguments.
            assert (piece.function.name is None) == (piece.id is None) == (piece.index in streamed), piece
            name, arguments = streamed.get(piece.index, (piece.function.name, ""))
            streamed[piece.index] = (name, arguments + piece.function.arguments)
    assert [*streamed.values()] == [(call.function.name, call.function.arguments) for call in calls], streamed


def allowed_tools(url, key, model):
    ask = chat(url, key, model, max_completion_tokens=400, temperature=1, tools=STRICT, parallel_tool_calls=False)

    def only(mode, name):
        tools = [{"type": "function", "function": {"name": name}}]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    for seed in range(4):
        [call] = ask(tool_choice=only("required", "Time"), seed=seed).choices[0].message.tool_calls
        assert call.function.name == "Time" and Time.model_validate_json(call.function.arguments), call
    short = dict(temperature=0, max_completion_tokens=16)
    assert content(ask(**short, tool_choice=only("auto", "Time"))) == content(ask(**short | {"tools": STRICT[1:]}))
    assert fails(openai.BadRequestError, ask, tool_choice=only("auto", "Rain")).param == "tool_choice"


def tools_or_a_form(url, key, model):
    """With tools and a form, an answer is a call or has the form. A bias on its first letter decides which."""
    client = connect(url, key)
    ask = dict(model=model, messages=QUESTION, max_completion_tokens=400, temperature=0, tools=STRICT[:1], response_format=City)
    for first, kind in {"<": Weather, "{": City}.items():
        bias = {token(client, first): 100}
        message = client.chat.completions.parse(**ask, parallel_tool_calls=False, logit_bias=bias).choices[0].message
        parsed = [call.function.parsed_arguments for call in message.tool_calls or []] or [message.parsed]
        assert [type(value) for value in parsed] == [kind], message
