"""What a worker says of itself in its heartbeats: its links, how fast it is, and what it has counted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .fields import Count, PerSecond, Seconds, Text, WorkerId
from .sampling_params import CLOSED


@dataclass(frozen=True, config=CLOSED)
class Link:
    """State of one (prefill, decode) pair as the prefill worker sees it."""

    worker: WorkerId  # the decode worker
    link: Annotated[str, Field(max_length=32)]  # "cuda_ipc", "shm", "zmq", or "" while there is none
    state: Literal["connecting", "linked", "refused"]
    detail: Text
    bytes_sent: Count


@dataclass(frozen=True, config=CLOSED)
class Speed:
    """How fast a worker has been of late, by its own measurements; 0 where it has not measured anything yet.

    `prompt_tokens_per_s`: of prompts, with nothing beside them. `lone_tokens_per_s`: while nothing else runs on the
    machine, so that idle cores help. The rest is of decode workers only:
    `step_s`: a step of what runs there now, without any prompt.
    `beside_tokens_per_s`: of prompts, in the chunks that go with the steps of what runs there now, or of one sequence.
    `keeps_slo`: such a step is within --itl-slo-ms. Never true without that flag.
    `streaming_s`: for how long the oldest of the streams there has been flowing; 0: there are none.
    """

    prompt_tokens_per_s: PerSecond = 0.0
    step_s: Seconds = 0.0
    beside_tokens_per_s: PerSecond = 0.0
    keeps_slo: bool = False
    streaming_s: Seconds = 0.0
    lone_tokens_per_s: PerSecond = 0.0


@dataclass(frozen=True, config=CLOSED)
class Sample:
    name: Annotated[str, Field(max_length=128)]
    labels: Annotated[dict[str, str], Field(max_length=16)]
    value: float


@dataclass(frozen=True, config=CLOSED)
class Family:
    """One Prometheus metric family as its owner counts it."""

    name: Annotated[str, Field(max_length=128)]
    type: Literal["counter", "gauge", "histogram"]
    help: Text
    samples: Annotated[list[Sample], Field(max_length=1024)]
