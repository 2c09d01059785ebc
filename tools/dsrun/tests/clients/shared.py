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


class Weather(pydantic.BaseModel):
    """The arguments of `weather`."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


class Time(pydantic.BaseModel):
    """The arguments of another tool."""

    zone: int = pydantic.Field(ge=-12, le=12)


def fails(kind, call, **fields):
    """The error of a call that has to fail."""
    try:
        call(**fields)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected of {fields}")


def run(*parts, by_name=()):
    """Calls each part with the arguments of the script: the server's URL, a key, and the model's name. If the names of parts follow,
    it calls those instead; some are called only by name, as they need another model."""
    url, key, model, *names = sys.argv[1:]
    every = {part.__name__: part for part in [*parts, *by_name]}
    for part in [every[name] for name in names] if names else parts:
        part(url, key, model)
        print(f"{part.__name__}: ok", flush=True)
