"""LiteLLM: a loop of several turns with tools, streams, and messages sent back as it dumps them.

Usage: litellm_client.py URL KEY MODEL
"""

import json

import litellm

from shared import CITIES, QUESTION, City, run, weather

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": CITIES}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]


def settings(url, key, model):
    return dict(model=f"openai/{model}", api_base=f"{url}/v1", api_key=key, max_tokens=200, temperature=0, num_retries=0)


def answers(url, key, model):
    ask = settings(url, key, model)
    messages = [{"role": "user", "content": QUESTION}]
    answer = litellm.completion(**ask, messages=messages)
    text = answer.choices[0].message.content
    assert text, answer
    chunks = list(litellm.completion(**ask, messages=messages, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text, chunks
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text


def turns(url, key, model):
    """Each turn sends back the whole dump of the answers before it."""
    ask = settings(url, key, model)
    for stream in [False, True]:
        messages = [{"role": "user", "content": QUESTION}]
        for turn in range(3):
            choice = "required" if turn < 2 else "auto"
            answer = litellm.completion(**ask, messages=messages, tools=TOOLS, tool_choice=choice, stream=stream)
            if stream:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            message = answer.choices[0].message
            messages.append(message.model_dump())
            assert bool(message.tool_calls) or turn == 2, answer
            for call in message.tool_calls or []:
                result = weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
        messages.append({"role": "user", "content": "And in Rome?"})
        assert litellm.completion(**ask, messages=messages, tools=TOOLS).choices


def forms(url, key, model):
    ask = {**settings(url, key, model), "max_tokens": 200}
    answer = litellm.completion(**ask, messages=[{"role": "user", "content": QUESTION}], response_format=City)
    City.model_validate_json(answer.choices[0].message.content)


def other_interfaces(url, key, model):
    """LiteLLM translates its own Responses and Messages calls to what it takes the server to speak."""
    ask = settings(url, key, model)
    common = dict(model=ask["model"], api_base=ask["api_base"], api_key=key)
    response = litellm.responses(**common, input=QUESTION, max_output_tokens=20)
    assert response.status in ["completed", "incomplete"], response
    vectors = litellm.embedding(**common, input=["Paris", "Rome"])
    assert len(vectors.data) == 2, vectors


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    run(answers, turns, forms, other_interfaces)
