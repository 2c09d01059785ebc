"""What the scripts of Python clients share: the question, the tools, and how a script is run."""

import sys
from typing import Literal

import pydantic

QUESTION = "What is the weather in Paris?"
CITIES = ["Paris", "Rome"]


class City(pydantic.BaseModel):
    """A form of answers. Its fields are bounded, because the models of tests write anything that the form allows."""

    name: Literal["Paris", "Rome"]
    people: int = pydantic.Field(ge=0, le=1000)
    capital: bool


def weather(city: Literal["Paris", "Rome"], unit: Literal["C", "F"]) -> str:
    """The weather of a city.

    Args:
        city: The city.
        unit: The unit of the temperature.
    """
    assert city in CITIES and unit in ["C", "F"], (city, unit)
    return f"It rains in {city}, at 11 {unit}."


def run(*parts):
    """Calls each part with the arguments of the script: the server's URL, a key, and the model's name."""
    url, key, model = sys.argv[1:]
    for part in parts:
        part(url, key, model)
        print(f"{part.__name__}: ok", flush=True)
