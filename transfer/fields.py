"""Types that fields of many messages have, and their bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .offers import MAX_POSITION

RequestId = Annotated[str, Field(min_length=1, max_length=64)]
WorkerId = Annotated[str, Field(min_length=1, max_length=160, pattern=r"^[^#\s]+#[0-9a-f]{8}$")]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Text = Annotated[str, Field(max_length=4096)]
Address = Annotated[str, Field(max_length=512)]
Position = Annotated[int, Field(ge=0, le=MAX_POSITION)]  # in a ring, or in all that was ever sent
Count = Annotated[int, Field(ge=0, le=1 << 48)]
Attempt = Annotated[int, Field(ge=1, le=1 << 20)]
Choice = Annotated[int, Field(ge=0, le=127)]
Seconds = Annotated[float, Field(ge=0, le=1e7)]
PerSecond = Annotated[float, Field(ge=0, le=1e12)]
