"""The official Python client against a server, as it comes: answers, streams, forms, tools, errors.

Usage: openai_client.py URL KEY MODEL
"""

import asyncio
import json
import sys

import openai
import pydantic

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    people: int = pydantic.Field(ge=0, le=1000)
    capital: bool


def fails(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def answers(client, model):
    assert [listed.id for listed in client.models.list()] == [model]
    ask = dict(model=model, messages=QUESTION, max_completion_tokens=16, temperature=0)
    answer = client.chat.completions.create(**ask)
    text = answer.choices[0].message.content
    assert text and answer.usage.completion_tokens <= 16, answer

    stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    # The second answer may find its prompt in the cache, which the details of the usage say.
    counts = lambda usage: (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    assert counts(chunks[-1].usage) == counts(answer.usage), (chunks[-1].usage, answer.usage)

    with client.chat.completions.stream(**ask) as events:
        events.until_done()
        final = events.current_completion_snapshot
    assert final.choices[0].message.content == text

    # What was answered can be sent back as it is.
    conversation = [*QUESTION, answer.choices[0].message, {"role": "user", "content": "Why?"}]
    assert client.chat.completions.create(**{**ask, "messages": conversation}).choices

    several = client.chat.completions.create(**{**ask, "temperature": 1, "seed": 5}, n=3)
    assert len({choice.message.content for choice in several.choices}) == 3, several

    completion = client.completions.create(model=model, prompt=["a", "b"], max_tokens=4, temperature=0)
    assert [choice.index for choice in completion.choices] == [0, 1]
    stopped = client.chat.completions.create(**ask, stop=text[3])
    assert stopped.choices[0].message.content == text[: text.index(text[3])]
    assert stopped.choices[0].finish_reason == "stop"


def probabilities(client, model):
    ask = dict(model=model, messages=QUESTION, max_completion_tokens=8, temperature=0)
    answer = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace") == answer.choices[0].message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob <= 0, token
    chosen = int(next(iter(client.post("/../tokenize", body={"prompt": "z"}, cast_to=object)["tokens"])))
    biased = client.chat.completions.create(**ask, logit_bias={chosen: 100})
    assert biased.choices[0].message.content == "zzzzzzzz", biased


def forms(client, model):
    ask = dict(model=model, messages=QUESTION, max_completion_tokens=400, temperature=1, seed=1)
    for seed in range(3):
        parsed = client.chat.completions.parse(**{**ask, "seed": seed}, response_format=City)
        assert isinstance(parsed.choices[0].message.parsed, City), parsed
    made = client.chat.completions.create(
        **ask, extra_body={"response_format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]{5}-[0-9]{3}"}}
    )
    letters, digits = made.choices[0].message.content.split("-")
    assert len(letters) == 5 and set(letters) <= set("abc") and len(digits) == 3 and digits.isdigit(), made
    fails(openai.BadRequestError, lambda: client.chat.completions.create(
        **ask, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    ))


def tools(client, model):
    ask = dict(model=model, messages=QUESTION, max_completion_tokens=400, temperature=1, seed=2, tools=[WEATHER, TIME])
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = client.chat.completions.create(**ask, tool_choice=named).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and set(arguments) == {"city", "unit"}, call

    one = client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False).choices[0]
    [call] = one.message.tool_calls
    assert call.function.name in {"get_weather", "get_time"}, call

    deltas = [
        chunk.choices[0].delta.tool_calls
        for chunk in client.chat.completions.create(**ask, tool_choice=named, stream=True)
        if chunk.choices and chunk.choices[0].delta.tool_calls
    ]
    pieces = [piece for delta in deltas for piece in delta]
    assert all(piece.index == 0 for piece in pieces) and pieces[0].function.name == "get_weather", pieces
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces)) == arguments, pieces

    back = [*QUESTION, choice.message, {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "Rain"}]
    free = client.chat.completions.create(**{**ask, "messages": back, "max_completion_tokens": 8})
    assert free.choices[0].message.content is not None, free


def vectors(client, model):
    texts = ["Paris", "London", "Paris"]
    answer = client.embeddings.create(model=model, input=texts)
    assert [item.index for item in answer.data] == [0, 1, 2] and answer.usage.prompt_tokens == 16, answer.usage
    first, second, third = (item.embedding for item in answer.data)
    assert abs(sum(value * value for value in first) - 1) < 1e-5 and first == third and first != second
    # The client asks for base64 unless it is told otherwise.
    plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
    assert all(abs(a - b) < 1e-6 for a, b in zip(first, plain.data[0].embedding, strict=True))
    last = client.embeddings.create(model=model, input=[[1, 2, 3]], extra_body={"pooling": "last"})
    assert len(last.data[0].embedding) == len(first)
    error = fails(openai.BadRequestError, lambda: client.embeddings.create(model=model, input=texts, dimensions=2))
    assert error.param == "dimensions", error


def errors(client, model):
    ask = dict(model=model, messages=QUESTION)
    error = fails(openai.BadRequestError, lambda: client.chat.completions.create(**ask, temperature=-1))
    assert error.param == "temperature" and error.type == "invalid_request_error", error
    error = fails(openai.BadRequestError, lambda: client.chat.completions.create(**ask, extra_body={"stores": True}))
    assert error.param == "stores", error
    error = fails(openai.NotFoundError, lambda: client.chat.completions.create(**{**ask, "model": "other"}))
    assert error.code == "model_not_found", error
    stranger = client.with_options(api_key="wrong")
    fails(openai.AuthenticationError, lambda: stranger.models.list())


async def many(url, key, model):
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        async def one(number):
            prompt = f"Question {number}"
            stream = await client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(one(number % 4) for number in range(16)))
        assert len(set(texts)) <= 4, "equal prompts have equal answers"


def main(url, key, model):
    url = f"{url}/v1"
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)
    for part in [answers, errors, probabilities, forms, tools, vectors]:
        part(client, model)
        print(f"{part.__name__}: ok")
    asyncio.run(many(url, key, model))
    print("many: ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
