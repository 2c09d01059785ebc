"""The official Python client against a server, as it comes: answers, streams, errors.

Usage: openai_client.py URL KEY MODEL
"""

import asyncio
import sys

import openai

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


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
    assert chunks[-1].usage == answer.usage

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


def errors(client, model):
    ask = dict(model=model, messages=QUESTION)
    error = fails(openai.BadRequestError, lambda: client.chat.completions.create(**ask, temperature=-1))
    assert error.param == "temperature" and error.type == "invalid_request_error", error
    error = fails(openai.BadRequestError, lambda: client.chat.completions.create(**ask, store=True))
    assert error.param == "store", error
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
    for part in [answers, errors]:
        part(client, model)
        print(f"{part.__name__}: ok")
    asyncio.run(many(url, key, model))
    print("many: ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
