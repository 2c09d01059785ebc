"""Anthropic's Python client: answers, streams, tools, typed answers, errors, counts of tokens.

Usage: anthropic_client.py URL KEY MODEL
"""

import anthropic

from shared import CITIES, QUESTION, City, run, weather

MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": CITIES}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}


def connect(url, key):
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=120)


def answers(url, key, model):
    client = connect(url, key)
    ask = dict(model=model, max_tokens=30, messages=MESSAGES, extra_body={"temperature": 0})
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(**ask, system=system)
    assert answer.content[0].text and answer.usage.output_tokens <= 30, answer
    with client.messages.stream(**ask, system=system) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == answer.content[0].text and final.stop_reason == answer.stop_reason, (text, answer)
    counted = client.messages.count_tokens(model=model, messages=MESSAGES, system=system)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0), counted
    history = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "Why?"}]
    assert client.messages.create(**{**ask, "messages": history}).content
    assert [listed.id for listed in client.models.list()] == [model]


def tools(url, key, model):
    client = connect(url, key)
    ask = dict(model=model, max_tokens=300, extra_body={"temperature": 0})
    for strict in [False, True]:
        tool = {**TOOL, "strict": True} if strict else TOOL
        for choice in [{"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}]:
            messages = list(MESSAGES)
            for _ in range(2):
                with client.messages.stream(**ask, messages=messages, tools=[tool], tool_choice=choice) as stream:
                    answer = stream.get_final_message()
                assert answer.stop_reason == "tool_use", answer
                uses = [block for block in answer.content if block.type == "tool_use"]
                results = [
                    {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": weather(**use.input)}]}
                    for use in uses
                ]
                messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
            assert client.messages.create(**ask, messages=messages, tools=[tool]).content


def typed(url, key, model):
    client = connect(url, key)
    ask = dict(model=model, max_tokens=300, messages=MESSAGES, output_format=City, extra_body={"temperature": 0})
    answer = client.messages.parse(**ask)
    assert isinstance(answer.parsed_output, City), answer


def errors(url, key, model):
    for client, fields, kind in [
        (connect(url, "wrong"), {}, anthropic.AuthenticationError),
        (connect(url, key), {"model": "other"}, anthropic.NotFoundError),
        (connect(url, key), {"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
    ]:
        try:
            client.messages.create(**({"model": model, "max_tokens": 5, "messages": MESSAGES} | fields))
        except kind as error:
            assert error.body["error"]["message"], error.body
        else:
            raise AssertionError(f"{kind.__name__} was expected")


if __name__ == "__main__":
    run(answers, tools, typed, errors)
