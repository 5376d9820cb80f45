"""What answers are asked to look like: few enough words that a small model says them at once."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Unit = Literal["celsius", "fahrenheit"]


class River(BaseModel):
    """A river of Europe."""

    name: Literal["Rhine", "Danube", "Seine", "Volga"]
    length_km: int = Field(ge=100, le=9999)
    navigable: bool


class Weather(BaseModel):
    """The weather of a city, now."""

    city: Literal["Paris", "Oslo", "Rome"]
    unit: Unit


class Clock(BaseModel):
    """The time in a city."""

    city: Literal["Paris", "Oslo", "Rome"]


RIVER_QUESTION = "Tell me about one river of Europe."
WEATHER_QUESTION = "What is the weather in Oslo, in celsius?"
