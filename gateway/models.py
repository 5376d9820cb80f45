"""The models of a gateway: which there are, which one a request is for, and what it may ask of that one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from ..transfer.sampling_params import MAX_TOKENS_IN_REQUEST
from .aliases import Alias, check_weights
from .api.json_body import load_object
from .api.parsed_request import ModelLimits
from .api.text import Tokenizer
from .dispatch import Dispatcher
from .membership import ModelIdentity
from .metrics import ModelMetrics
from .pool import Pool

log = logging.getLogger(__name__)

USER_FIELDS = ("user", "prompt_cache_key")  # of a request: who stays with one model of an alias

T = TypeVar("T")


class LimitsInForce:
    """What requests for a model may ask for, from its workers registered now; while there are none, what was true
    last."""

    def __init__(self, pool: Pool, model: str, max_model_len: int | None) -> None:
        self._pool = pool
        self._model = model
        self._max_model_len = max_model_len or MAX_TOKENS_IN_REQUEST
        self._last = self._max_model_len, self._max_model_len

    def __call__(self, names: tuple[str, ...]) -> ModelLimits:
        """`names`: all that a request may give as its model."""
        workers = [worker for worker in self._pool.workers.values() if worker.model == self._model]
        room = [worker.capacity_tokens for worker in workers if worker.register.role == "decode"]
        if room:
            longest = min(worker.register.max_model_len for worker in workers)
            self._last = min(longest, self._max_model_len), max(room)
        return ModelLimits(names, *self._last)


@dataclass(frozen=True)
class ServedModel:
    """Everything that differs from model to model."""

    identity: ModelIdentity
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    limits: LimitsInForce
    dispatcher: Dispatcher
    metrics: ModelMetrics

    @property
    def name(self) -> str:
        return self.identity.name


@dataclass(frozen=True)
class Caller:
    """Who asks: the client as fairness knows it (`key:NAME` with an API key), and the id of this request."""

    client: str
    request_id: str

    def key(self, fields: dict[str, Any]) -> str:
        """By what a model is chosen for an alias: the user if the request names one, else the API key, else chance."""
        for name in USER_FIELDS:
            if isinstance(user := fields.get(name), str) and user:
                return f"user:{user}"
        return self.client if self.client.startswith("key:") else f"id:{self.request_id}"


class Models:
    """All models of this gateway, and the aliases, whose weights may change at any time."""

    def __init__(self, served: Sequence[ServedModel], aliases: Iterable[Alias] = ()) -> None:
        self.served = {model.name: model for model in served}
        self.aliases = {alias.name: alias for alias in aliases}

    @property
    def _first(self) -> ServedModel:
        return next(iter(self.served.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may give as its model."""
        return (*self.served, *self.aliases)

    @property
    def ready(self) -> list[str]:
        """Models with workers that can serve now."""
        return [model.name for model in self.served.values() if model.dispatcher.can_serve]

    def behind(self, name: str) -> list[ServedModel]:
        """The models that requests for `name` go to now, the likeliest first; none if there is no such name."""
        if (alias := self.aliases.get(name)) is not None:
            weighted = sorted(alias.weights.items(), key=lambda item: -item[1])
            return [self.served[model] for model, weight in weighted if weight]
        return [self.served[name]] if name in self.served else []

    def set_weights(self, name: str, weights: dict[str, Any]) -> Alias:
        """From now on requests for an alias go where `weights` say. Raises BadWeights, or KeyError."""
        old = self.aliases[name]
        self.aliases[name] = new = Alias(name, check_weights(weights, self.served))
        log.info("%s: from %s to %s", name, dict(old.weights), dict(new.weights))
        return new

    async def parse(
        self, threads: Executor, body: bytes, caller: Caller, parse: Callable[[bytes, Tokenizer, ModelLimits], T]
    ) -> tuple[ServedModel, T]:
        """Find the model that a body asks for, and parse it, in a thread. Raises ApiError."""
        names = self.names
        limits = {model.name: model.limits(names) for model in self.served.values()}

        def work() -> tuple[ServedModel, T]:
            model = self._choose(body, caller) if len(names) > 1 else self._first
            return model, parse(body, model.tokenizer, limits[model.name])

        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def _choose(self, body: bytes, caller: Caller) -> ServedModel:
        """What is no name here goes to the first model too: whether that is an error is the parser's to say."""
        fields = load_object(body)
        name = fields.get("model")
        if not isinstance(name, str):
            return self._first
        if (alias := self.aliases.get(name)) is not None:
            name = alias.choose(caller.key(fields))
        return self.served.get(name, self._first)
