"""Instructor: typed answers by each of its modes, streams of partial answers and of lists, repeated questions.

Usage: instructor_client.py URL KEY MODEL
"""

import instructor
import openai

from shared import QUESTION, City, run

MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]
ASK = dict(messages=[{"role": "user", "content": QUESTION}], max_tokens=300, temperature=0, max_retries=0)


def client(url, key, mode):
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120), mode=mode)


def typed(url, key, model):
    for mode in MODES:
        answer, completion = client(url, key, mode).chat.completions.create_with_completion(
            model=model, response_model=City, **ASK
        )
        assert isinstance(answer, City) and completion.usage.total_tokens > 0, (mode, answer)


def partial(url, key, model):
    for mode in MODES:
        answers = list(client(url, key, mode).chat.completions.create_partial(model=model, response_model=City, **ASK))
        City.model_validate(answers[-1].model_dump())


if __name__ == "__main__":
    run(typed, partial)
