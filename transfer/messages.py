"""Every message on the wire: one frozen dataclass each, validated on arrival.

`codec.py` turns one into a frame and back. A `Slab` is followed by exactly one more part, its payload. Durations are on
the wire, never clocks. Requests are named by the id the gateway minted (never the client's), and every message about
one carries the `attempt` it belongs to.

    gateway → worker    Registered, RegistrationDenied, Peers, GatewayHeartbeat, Drain, Cancel
    gateway → decode    Reserve
    gateway → prefill   Prefill
    worker  → gateway   Register, WorkerHeartbeat, Gone, Failed, Leaving
    decode  → gateway   Reserved, Tokens
    prefill → gateway   FirstTokens, Busy, PromptLogprobs (decode sends it when it computes the prompt itself)
    prefill → decode    Hello, Slab, Handoff, Abort, PeerHeartbeat
    decode  → prefill   Welcome, HelloDenied, Credit, Gone, PeerHeartbeat
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .fields import Address, Attempt, Choice, Count, Name, Position, RequestId, Seconds, Text, WorkerId
from .layout import KVLayout
from .offers import DeviceIdentity, DeviceRingOffer, RingOffer, RingSpan
from .reports import Family, Link, Speed
from .sampling_params import CLOSED, MAX_LOGPROBS, MAX_TOKENS_IN_REQUEST, SamplingParams, Token

TokenList = Annotated[list[Token], Field(max_length=MAX_TOKENS_IN_REQUEST)]
Live = Annotated[list[tuple[RequestId, Attempt]], Field(max_length=1_000_000)]
Role = Literal["prefill", "decode"]
Finish = Literal["", "stop", "length"]
LEAST_LOGPROB = -9999.0  # stands for everything below it
Logprob = Annotated[float, Field(ge=LEAST_LOGPROB, le=0)]
MAX_PROMPT_LOGPROBS = 256  # in one message

LocalPrefill = Literal["never", "auto", "always"]


class Message:
    """Base of all messages; `kind` is the name on the wire."""

    kind: ClassVar[str]


# --- registration and liveness -------------------------------------------------------------------------------


@dataclass(frozen=True, config=CLOSED)
class Register(Message):
    """A worker presents itself to a gateway; repeated until it is answered."""

    worker: WorkerId
    role: Role
    model: Name  # the name it serves
    layout: KVLayout
    host: Name  # which machine (for link choice)
    bulk_address: Address  # decode only: where prefill workers connect for slabs; "" for prefill
    peer_address: Address  # decode only: where prefill workers connect for control; "" for prefill
    links: Annotated[list[Name], Field(max_length=8)]
    block_size: Annotated[int, Field(ge=1, le=4096)]
    num_blocks: Annotated[int, Field(ge=1, le=1 << 40)]
    max_model_len: Annotated[int, Field(ge=1, le=MAX_TOKENS_IN_REQUEST)]
    max_sequences: Annotated[int, Field(ge=1, le=1 << 20)]
    pid: Count
    device: DeviceIdentity | None = None  # None when it computes on the processor


@dataclass(frozen=True, config=CLOSED)
class Registered(Message):
    gateway: WorkerId
    worker: WorkerId


@dataclass(frozen=True, config=CLOSED)
class RegistrationDenied(Message):
    """`fatal`: the worker should exit with `reason`; otherwise it registers again (a fresh incarnation)."""

    reason: Text
    fatal: bool


@dataclass(frozen=True, config=CLOSED)
class Peer:
    worker: WorkerId
    host: Name
    bulk_address: Address
    peer_address: Address
    links: Annotated[list[Name], Field(max_length=8)]
    device: DeviceIdentity | None = None


@dataclass(frozen=True, config=CLOSED)
class Peers(Message):
    """All decode workers alive now; sent to every prefill worker whenever that set changes."""

    decode: Annotated[list[Peer], Field(max_length=4096)]


@dataclass(frozen=True, config=CLOSED)
class GatewayHeartbeat(Message):
    """`live`: what this gateway still wants from this worker. Unlisted twice in a row means: drop it."""

    seq: Count
    live: Live


@dataclass(frozen=True, config=CLOSED)
class WorkerHeartbeat(Message):
    """`seen_seq`: the newest GatewayHeartbeat this worker had taken in when it listed `live`."""

    seen_seq: Count
    live: Live
    ready: bool
    free_blocks: Count  # free or evictable
    held_blocks: Count
    running: Count  # sequences decoding, or prompts being computed
    waiting: Count  # requests accepted but not started
    queued_tokens: Count  # prompt tokens still to be computed here
    draining: bool  # takes nothing new; leaves when what it has is finished or has been taken elsewhere
    links: Annotated[list[Link], Field(max_length=4096)]
    metrics: Annotated[list[Family], Field(max_length=256)]
    speed: Speed = Field(default_factory=Speed)


@dataclass(frozen=True, config=CLOSED)
class Drain(Message):
    """Gateway → worker: take nothing new, tell every gateway so, and leave when nothing is left."""


@dataclass(frozen=True, config=CLOSED)
class Leaving(Message):
    """The worker is shutting down; everything it held is gone."""

    worker: WorkerId


# --- the life of a request ------------------------------------------------------------------------------------


@dataclass(frozen=True, config=CLOSED)
class Reserve(Message):
    """Step 1, gateway → decode. `outputs` holds the tokens already accepted per choice (empty at first); its
    length is n. A request with output is resumed: every choice goes on from its tokens. If just one choice is left,
    prefill may compute its prompt + output; else decode recomputes them.

    `prefill` is the worker bound to this attempt ("" when there is none).
    `local_prefill`: does decode compute the missing tokens itself? never; auto: if few are missing; always.
    `age_s`: how long ago the gateway first saw the request; decode ranks by it, so a retry keeps its place.
    """

    request: RequestId
    attempt: Attempt
    prompt: Annotated[TokenList, Field(min_length=1)]
    outputs: Annotated[list[TokenList], Field(min_length=1, max_length=128)]
    finished: Annotated[list[bool], Field(min_length=1, max_length=128)]  # choices that need no more tokens
    params: SamplingParams
    prefill: Annotated[str, Field(max_length=160)]
    local_prefill: LocalPrefill
    local_reason: Annotated[str, Field(max_length=64)]  # why, when "always": label of a metric
    cache_salt: Annotated[str, Field(max_length=256)]
    priority: Annotated[int, Field(ge=-(1 << 31), le=1 << 31)]
    age_s: Seconds = 0.0


@dataclass(frozen=True, config=CLOSED)
class Reserved(Message):
    """Decode has the blocks. `local` true: it computes the prompt itself, send nothing to prefill.

    `held_tokens`: how many tokens of prompt (+ output, if resumed) were found in decode's prefix cache.
    """

    request: RequestId
    attempt: Attempt
    reservation: Count
    held_tokens: Count
    local: bool
    reason: Annotated[str, Field(max_length=64)]  # of the local choice
    deadline_s: Seconds


@dataclass(frozen=True, config=CLOSED)
class Prefill(Message):
    """Step 2, gateway → prefill: compute prompt + output, send KV from token `held_tokens` on to `decode`, and sample
    the next token of choices [choice, choice + num_choices). Only a single choice can have output already.
    """

    request: RequestId
    attempt: Attempt
    prompt: Annotated[TokenList, Field(min_length=1)]
    output: TokenList
    choice: Choice
    num_choices: Annotated[int, Field(ge=1, le=128)]
    params: SamplingParams
    decode: WorkerId
    reservation: Count
    held_tokens: Count
    deadline_s: Seconds
    cache_salt: Annotated[str, Field(max_length=256)]
    priority: Annotated[int, Field(ge=-(1 << 31), le=1 << 31)]


@dataclass(frozen=True, config=CLOSED)
class Busy(Message):
    """Prefill's queue is full (or the link to that decode worker is): try elsewhere."""

    request: RequestId
    attempt: Attempt
    reason: Text


@dataclass(frozen=True, config=CLOSED)
class TokenLogprobs:
    """What the model's raw logits say of one token: its log probability, how many tokens are likelier (plus 1), and
    the most likely tokens, best first."""

    logprob: Logprob
    rank: Annotated[int, Field(ge=1, le=1 << 31)]
    top: Annotated[list[tuple[Token, Logprob]], Field(max_length=MAX_LOGPROBS)]


LogprobList = Annotated[list[TokenLogprobs], Field(max_length=128)]


@dataclass(frozen=True, config=CLOSED)
class PromptLogprobs(Message):
    """Whoever computes a prompt that is to be scored → gateway: tokens [first, first + len(entries)) of the prompt.

    Token 0 has none. They come in order, and all of them before the first sampled token of the attempt.
    """

    request: RequestId
    attempt: Attempt
    first: Annotated[int, Field(ge=1, le=MAX_TOKENS_IN_REQUEST)]
    entries: Annotated[list[TokenLogprobs], Field(min_length=1, max_length=MAX_PROMPT_LOGPROBS)]


@dataclass(frozen=True, config=CLOSED)
class FirstTokens(Message):
    """Step 4, prefill → gateway: token `index` (0, unless resumed) of choices [choice, choice + len(tokens)).

    Decode repeats them with the finish reason.
    """

    request: RequestId
    attempt: Attempt
    choice: Choice
    index: Count
    tokens: Annotated[list[Token], Field(min_length=1, max_length=128)]
    cached_tokens: Count  # prompt tokens prefill did not have to compute
    queued_s: Seconds  # from arrival at this worker to its first chunk
    compute_s: Seconds  # from its first chunk to this message
    logprobs: LogprobList = Field(default_factory=list)  # of each token, if asked for


@dataclass(frozen=True, config=CLOSED)
class Tokens(Message):
    """Tokens of one decode step, all requests of one gateway in one message.

    Each item is (request, attempt, choice, index, token, finish). The first message about a choice repeats token 0.
    `logprobs`: by place in `items`, of those that are to have them.
    """

    items: Annotated[list[tuple[RequestId, Attempt, Choice, Count, Token, Finish]], Field(max_length=65536)]
    logprobs: Annotated[dict[Count, TokenLogprobs], Field(max_length=65536)] = Field(default_factory=dict)


@dataclass(frozen=True, config=CLOSED)
class Failed(Message):
    """The attempt is over at this worker. `retryable`: another attempt may succeed."""

    request: RequestId
    attempt: Attempt
    reason: Annotated[str, Field(max_length=64)]
    detail: Text
    retryable: bool


@dataclass(frozen=True, config=CLOSED)
class Cancel(Message):
    """Drop the attempt (or one choice of it). Also the normal end of a request whose stop string was found."""

    request: RequestId
    attempt: Attempt
    choice: Choice | None = None


@dataclass(frozen=True, config=CLOSED)
class Gone(Message):
    """Answer to a message about an attempt that is not live here: stop sending."""

    request: RequestId
    attempt: Attempt


# --- between the pools ----------------------------------------------------------------------------------------


@dataclass(frozen=True, config=CLOSED)
class Hello(Message):
    """`link`: what the sender would use; "shm" comes with a `ring`, "cuda_ipc" is answered with one."""

    worker: WorkerId
    layout: KVLayout
    link: Name
    ring: RingOffer | None = None


@dataclass(frozen=True, config=CLOSED)
class Welcome(Message):
    """`window_bytes`: how many unacknowledged payload bytes the sender may have under way. `link`: what it is, and
    `detail` why it is not what was offered."""

    worker: WorkerId
    window_bytes: Count
    link: Name
    detail: Text
    ring: DeviceRingOffer | None = None


@dataclass(frozen=True, config=CLOSED)
class HelloDenied(Message):
    reason: Text


@dataclass(frozen=True, config=CLOSED)
class PeerHeartbeat(Message):
    """Both ways between the pools, listing the attempts they share."""

    worker: WorkerId
    live: Live


@dataclass(frozen=True, config=CLOSED)
class Slab(Message):
    """Header of one slab: KV of tokens [first_token, first_token + num_tokens) of `num_layers` layers from `layer` on.
    The payload follows as a frame of its own, unless `span` says where it lies."""

    request: RequestId
    attempt: Attempt
    reservation: Count
    layer: Annotated[int, Field(ge=0, le=1023)]
    first_token: Annotated[int, Field(ge=0, le=MAX_TOKENS_IN_REQUEST)]
    num_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_IN_REQUEST)]
    checksum: Annotated[int, Field(ge=0, lt=1 << 64)]
    span: RingSpan | None = None
    num_layers: Annotated[int, Field(ge=1, le=1024)] = 1

    @property
    def layers(self) -> range:
        return range(self.layer, self.layer + self.num_layers)


@dataclass(frozen=True, config=CLOSED)
class Handoff(Message):
    """Behind the last slab: the next token of every choice. Decode owns the request from here."""

    request: RequestId
    attempt: Attempt
    reservation: Count
    tokens: Annotated[list[Token], Field(min_length=1, max_length=128)]
    elapsed_s: Seconds  # from the first slab to this message, at the sender
    ring_head: Position = 0  # whatever is before this position in the sender's ring has been sent
    logprobs: LogprobList = Field(default_factory=list)  # of each token, if asked for


@dataclass(frozen=True, config=CLOSED)
class Abort(Message):
    """Prefill gave the attempt up; the reservation can be freed now."""

    request: RequestId
    attempt: Attempt
    reservation: Count
    reason: Text
    ring_head: Position = 0


@dataclass(frozen=True, config=CLOSED)
class Credit(Message):
    """Decode has taken in this many payload bytes from this sender in all (cumulative), and is done with everything
    before that position of its ring."""

    consumed_bytes: Position
    ring_position: Position = 0


MESSAGE_TYPES: tuple[type[Message], ...] = (
    Register, Registered, RegistrationDenied, Peers, GatewayHeartbeat, WorkerHeartbeat, Drain, Leaving,
    Reserve, Reserved, Prefill, Busy, PromptLogprobs, FirstTokens, Tokens, Failed, Cancel, Gone,
    Hello, Welcome, HelloDenied, PeerHeartbeat, Slab, Handoff, Abort, Credit,
)  # fmt: skip
MESSAGES: dict[str, type[Message]] = {cls.__name__: cls for cls in MESSAGE_TYPES}
for _name, _cls in MESSAGES.items():
    _cls.kind = _name
