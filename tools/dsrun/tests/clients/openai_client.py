"""The official Python client against a server, as it comes: answers, fields, histories, forms, tools, vectors, errors.

Usage: openai_client.py URL KEY MODEL [PART..]

`reasoning` is a part only for a model that reasons until the token `</think>`.
"""

import asyncio
import inspect
import secrets

import openai

from openai_chat import MORE, QUESTION, City, chat, connect, content, token
from openai_tools import STRICT, TOOLS, allowed_tools, strict_tools, tools, tools_or_a_form
from shared import CITIES, Weather, fails, run


def answers(url, key, model):
    client, ask = connect(url, key), chat(url, key, model)
    assert [listed.id for listed in client.models.list()] == [model]
    answer = ask()
    text = content(answer)
    assert text and answer.usage.completion_tokens <= 16, answer
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    # The second answer may find its prompt in the cache, which the details of the usage say.
    counts = lambda usage: (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    assert counts(chunks[-1].usage) == counts(answer.usage), (chunks[-1].usage, answer.usage)
    several = ask(temperature=1, seed=5, n=3)
    assert len({choice.message.content for choice in several.choices}) == 3, several
    completion = client.completions.create(model=model, prompt=["a", "b"], max_tokens=4, temperature=0)
    assert [choice.index for choice in completion.choices] == [0, 1]
    stopped = ask(stop=text[3]).choices[0]
    assert stopped.message.content == text[: text.index(text[3])] and stopped.finish_reason == "stop", stopped


def usage(url, key, model):
    # A cache of its own, in which nothing is found at first.
    salt = {"cache_salt": secrets.token_hex(8)}
    ask = chat(url, key, model, messages=[{"role": "user", "content": "Where is it raining? " * 10}], extra_body=salt)
    first, again = ask(), ask()
    assert first.usage.prompt_tokens_details.cached_tokens == 0, first.usage
    assert 200 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens, again.usage
    assert first.system_fingerprint.startswith("fp_") and again.system_fingerprint == first.system_fingerprint
    assert connect(url, key).get("/../health", cast_to=object)["status"] == "ready"
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert {chunk.system_fingerprint for chunk in chunks} == {first.system_fingerprint}, chunks
    assert chunks[-1].usage.prompt_tokens_details == again.usage.prompt_tokens_details, chunks[-1]


def without_effect(url, key, model):
    """Fields that the server documents to have no effect: the answer is the one without them."""
    ask = chat(url, key, model)
    openais = dict(
        store=True, metadata={"run": "1"}, service_tier="auto", prompt_cache_key="k", prompt_cache_retention="24h",
        safety_identifier="s", user="u", verbosity="low", modalities=["text"], reasoning_effort="low", top_logprobs=0,
    )
    others = dict(best_of=1, cache_prompt=True, skip_special_tokens=True, spaces_between_special_tokens=True)
    text = content(ask())
    assert content(ask(**openais, extra_body=others)) == text
    options = {"include_usage": False, "include_obfuscation": False, "continuous_usage_stats": False}
    chunks = ask(**openais, extra_body=others, stream=True, stream_options=options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    # They have none only with these values.
    for name, value in {"best_of": 2, "skip_special_tokens": False, "modalities": ["text", "audio"]}.items():
        assert fails(openai.BadRequestError, ask, extra_body={name: value}).param == name


def nulls(url, key, model):
    """`null` in each field that the SDK knows is as if it were absent."""
    client = connect(url, key)
    chatting = dict(messages=QUESTION, max_completion_tokens=8, temperature=0)
    for create, given, part in [
        (client.chat.completions.create, chatting, lambda answer: content(answer)),
        (client.completions.create, dict(prompt="ab", max_tokens=8, temperature=0), lambda answer: answer.choices[0].text),
        (client.embeddings.create, dict(input="ab"), lambda answer: len(answer.data[0].embedding)),
    ]:
        names = [name for name in inspect.signature(create).parameters if name not in {"model", *given} and "extra" not in name]
        absent = part(create(model=model, **given))
        assert absent and part(create(model=model, **given, **dict.fromkeys(names))) == absent, names


def histories(url, key, model):
    """An answer is sent back as it came, or as the SDK or others dump it: the next answer is that to its text alone."""
    ask = chat(url, key, model)
    message = ask().choices[0].message
    dump = message.model_dump()
    assert {"refusal", "annotations", "audio", "function_call", "tool_calls"} <= {name for name in dump if dump[name] is None}
    parts = [{"type": "text", "text": message.content, "annotations": [], "cache_control": {"type": "ephemeral"}}]
    forms = [
        message, dump, dump | {"annotations": [], "parsed": None}, dump | {"content": parts},
        dump | {"provider_specific_fields": {"refusal": None}, "thinking_blocks": []},
        dump | {"reasoning": "hm", "reasoning_content": None, "reasoning_details": []},
    ]
    plain = content(ask(messages=[*QUESTION, {"role": "assistant", "content": message.content}, MORE]))
    for form in forms:
        assert content(ask(messages=[*QUESTION, form, MORE])) == plain, form
    parse = connect(url, key).chat.completions.parse
    called = parse(model=model, messages=QUESTION, tools=STRICT[:1], tool_choice="required", parallel_tool_calls=False, temperature=0)
    message = called.choices[0].message
    [call] = message.tool_calls
    function = {"name": call.function.name, "arguments": call.function.arguments}
    least = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain"}
    plain = content(ask(messages=[*QUESTION, least, result], tools=STRICT))
    for form in [message, message.model_dump(), message.model_dump() | {"tool_calls": [call.model_dump() | {"index": 0}]}]:
        assert content(ask(messages=[*QUESTION, form, result], tools=STRICT)) == plain, form


def probabilities(url, key, model):
    client, ask = connect(url, key), chat(url, key, model, max_completion_tokens=8)
    answer = ask(logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace") == content(answer)
    for each in tokens:
        assert len(each.top_logprobs) == 3 and each.top_logprobs[0].logprob == each.logprob <= 0, each
    assert content(ask(logit_bias={token(client, "z"): 100})) == "zzzzzzzz"


def forms(url, key, model):
    parse = connect(url, key).chat.completions.parse
    for seed in range(3):
        parsed = parse(model=model, messages=QUESTION, max_completion_tokens=400, temperature=1, seed=seed, response_format=City)
        assert isinstance(parsed.choices[0].message.parsed, City), parsed
    ask = chat(url, key, model, max_completion_tokens=400, temperature=1, seed=1)
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{5}-[0-9]{3}"}
    letters, digits = content(ask(extra_body={"response_format": grammar})).split("-")
    assert len(letters) == 5 and set(letters) <= set("abc") and len(digits) == 3 and digits.isdigit(), (letters, digits)
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    assert fails(openai.BadRequestError, ask, response_format=wrong).param == "response_format"


def of_vllm(url, key, model):
    """Forms and tokens that stop, by the names of vLLM."""
    client, ask = connect(url, key), chat(url, key, model, max_completion_tokens=200, temperature=1, seed=1)
    letters = lambda text: len(text) == 3 and set(text) <= set("abc")
    schema = City.model_json_schema()
    for name, value, follows in [
        ("choice", CITIES, CITIES.__contains__),
        ("json", schema, City.model_validate_json),
        ("regex", "[a-c]{3}", letters),
        ("grammar", "start: /[a-c]{3}/", letters),
    ]:
        for fields in [{"structured_outputs": {name: value}}, {f"guided_{name}": value}]:
            text = content(ask(extra_body=fields))
            assert follows(text), (fields, text)
    both = {"guided_regex": "a", "structured_outputs": {"regex": "a"}}
    assert fails(openai.BadRequestError, ask, extra_body=both).param == "structured_outputs.regex"
    complete = lambda **fields: client.completions.create(
        model=model, prompt="ab", max_tokens=12, temperature=0, extra_body={"return_token_ids": True, **fields}
    ).choices[0]
    tokens = complete().token_ids
    stopped = complete(stop_token_ids=[tokens[6]])
    assert stopped.token_ids == tokens[: tokens.index(tokens[6])] and stopped.finish_reason == "stop", stopped
    assert stopped.text == complete().text[: len(stopped.token_ids)], stopped


def reasoning(url, key, model):
    """Reasoning is apart from the answer, may be streamed and sent back, and comes before a form or a call."""
    ask = chat(url, key, model)
    message = ask().choices[0].message
    assert message.reasoning_content and message.content == "", message
    deltas = [chunk.choices[0].delta for chunk in ask(stream=True)]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning_content, deltas
    assert ask(messages=[*QUESTION, message, MORE]).choices[0].message.reasoning_content
    # The bias ends reasoning soon, but not always at once.
    client = connect(url, key)
    ask = dict(model=model, messages=QUESTION, max_completion_tokens=600, temperature=1, logit_bias={token(client, "</think>"): 4})
    for fields in [{"response_format": City}, {"tools": STRICT[:1], "tool_choice": "required"}]:
        thoughts = [client.chat.completions.parse(**ask, **fields, seed=seed).choices[0].message for seed in range(4)]
        for message in thoughts:
            called = [call.function.parsed_arguments for call in message.tool_calls or []]
            assert [type(value) for value in called] == [Weather] if "tools" in fields else isinstance(message.parsed, City), message
        assert any(getattr(message, "reasoning_content", "") for message in thoughts), thoughts


def vectors(url, key, model):
    client = connect(url, key)
    embed = lambda texts=["Paris", "London", "Paris"], **fields: client.embeddings.create(model=model, input=texts, **fields)
    answer = embed()
    assert [item.index for item in answer.data] == [0, 1, 2] and answer.usage.prompt_tokens == 16, answer.usage
    first, second, third = (item.embedding for item in answer.data)
    assert abs(sum(value * value for value in first) - 1) < 1e-5 and first == third and first != second
    close = lambda a, b: all(abs(a - b) < 1e-6 for a, b in zip(a, b, strict=True))
    # The client asks for base64 unless it is told otherwise.
    assert close(first, embed(encoding_format="float").data[0].embedding)
    assert len(embed([[1, 2, 3]], extra_body={"pooling": "last"}).data[0].embedding) == len(first)
    # The model was trained for shorter vectors, which are the beginnings of the others, but only of some lengths.
    length = sum(value * value for value in first[:8]) ** 0.5
    assert close([value / length for value in first[:8]], embed(dimensions=8).data[0].embedding)
    assert fails(openai.BadRequestError, embed, dimensions=2).param == "dimensions"


def errors(url, key, model):
    ask = chat(url, key, model)
    error = fails(openai.BadRequestError, ask, temperature=-1)
    assert error.param == "temperature" and error.type == "invalid_request_error", error
    # Unknown fields are refused wherever they are.
    assert fails(openai.BadRequestError, ask, extra_body={"stores": True}).param == "stores"
    fails(openai.BadRequestError, ask, messages=[{**QUESTION[0], "weight": 1}])
    fails(openai.BadRequestError, ask, tools=[{**TOOLS[1], "cost": 1}])
    fails(openai.BadRequestError, ask, stream=True, stream_options={"speed": 1})
    assert fails(openai.NotFoundError, ask, model="other").code == "model_not_found"
    fails(openai.AuthenticationError, chat(url, "wrong", model))


def many(url, key, model):
    async def together():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:

            async def one(number):
                ask = dict(model=model, prompt=f"Question {number}", max_tokens=12, temperature=0, stream=True)
                return "".join([chunk.choices[0].text async for chunk in await client.completions.create(**ask)])

            return await asyncio.gather(*(one(number % 4) for number in range(16)))

    assert len(set(asyncio.run(together()))) <= 4, "equal prompts have equal answers"


PARTS = [answers, usage, without_effect, nulls, histories, probabilities, forms, of_vllm, strict_tools, tools]
if __name__ == "__main__":
    run(*PARTS, allowed_tools, tools_or_a_form, vectors, errors, many, by_name=[reasoning])
