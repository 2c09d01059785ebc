"""What the parts of OpenAI's Python client share."""

import openai
import pydantic

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
MORE = {"role": "user", "content": "Why?"}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    people: int = pydantic.Field(ge=0, le=1000)
    capital: bool


def connect(url, key):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def chat(url, key, model, **settings):
    """A function that asks for an answer of few tokens, the same every time, unless told otherwise."""
    create = connect(url, key).chat.completions.create
    settings = dict(model=model, messages=QUESTION, max_completion_tokens=16, temperature=0) | settings
    return lambda **fields: create(**(settings | fields))


def content(answer):
    return answer.choices[0].message.content


def token(client, text):
    [token] = client.post("/../tokenize", body={"prompt": text}, cast_to=object)["tokens"]
    return token
