"""The gateway process: builds everything, serves until it is told to stop, and lets go of all it had at workers."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import zmq
from starlette.types import ASGIApp

from ..engine.checkpoint import fingerprint, resolve
from ..engine.model_directory import read_json
from ..transfer.channel import is_loopback
from .api.chat_output import PLAIN_STYLE, ChatStyle
from .api.text import Tokenizer
from .api_keys import keys_in_force
from .app import App, reports
from .asgi import Bodies
from .config import GatewayConfig
from .connections import ConnectionLimits, Connections, LimitedProtocol, allow_open_files
from .dispatch import Dispatcher, Objectives
from .front import in_front
from .generate import Frontend
from .limits import AdmissionQueue
from .listener import bind, stop_handshakes
from .membership import ModelIdentity
from .metrics import GatewayMetrics
from .models import LimitsInForce, Models, ServedModel
from .pool import Pool
from .router import POLICIES

log = logging.getLogger(__name__)

PARSING_THREADS = 2
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, or they would use one just as it is closed
ACCEPT_LAST_S = 0.02  # for the loop to accept what the kernel has connected already
JOIN_TIMEOUT_S = 2.0  # workers that wait for this gateway (it was restarted) join sooner; others are not waited for
RELEASE_TIMEOUT_S = 1.0  # how long workers may take to confirm that nothing of ours is left


class Server(uvicorn.Server):
    """uvicorn, whose signals are handled here: its own handling ends the process by the signal, not with exit 0.

    `before_accepting` is waited for when it starts; who connects meanwhile waits in the listening socket's backlog.
    """

    before_accepting: Callable[[], Awaitable[object]] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.before_accepting is not None:
            await self.before_accepting()
        await super().startup(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def request_stop(self) -> None:
        """Stop accepting and finish what runs; asked a second time, do not wait for it."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nobody is cut off half-way: a connection is refused, or it is served."""
        for listener in sockets or []:
            stop_handshakes(listener)
        await asyncio.sleep(ACCEPT_LAST_S)
        await super().shutdown(sockets)


def eos_token_ids(path: Path) -> frozenset[int]:
    """What ends a text of this model: the generation config's EOS ids, else the config's."""
    config = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    eos = generation.get("eos_token_id")
    for part in (config, config.get("text_config")):
        if eos is None and isinstance(part, dict):
            eos = part.get("eos_token_id")
    return frozenset(token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int))


def load_tokenizer(
    path: Path, chat_template: Path | None, trust_remote_code: bool, style: ChatStyle = PLAIN_STYLE
) -> Tokenizer:
    """The tokenizer, without torch: transformers imports it when it finds it, at the cost of 200 MB and a second, but
    tokenizers do not need it. (Remote code might.)"""
    if not trust_remote_code and "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # "import torch" now raises ModuleNotFoundError
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would announce that there is no torch
    return Tokenizer(path, chat_template_file=chat_template, trust_remote_code=trust_remote_code, style=style)


@dataclass(frozen=True)
class LoadedModel:
    """What a gateway reads of a model's files."""

    identity: ModelIdentity
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]


def load_models(config: GatewayConfig) -> list[LoadedModel]:
    """Raises ConfigError for the first one that cannot be served."""
    loaded = []
    for model in config.models:
        path = resolve(model.source)
        identity = ModelIdentity(model.name, str(path), fingerprint(path))
        tokenizer = load_tokenizer(
            path,
            config.chat_templates.get(model.name),
            config.trust_remote_code,
            config.chat_styles.get(model.name, PLAIN_STYLE),
        )
        loaded.append(LoadedModel(identity, tokenizer, eos_token_ids(path)))
    return loaded


def build_app(
    config: GatewayConfig, loaded: Iterable[LoadedModel], pool: Pool, threads: ThreadPoolExecutor
) -> tuple[ASGIApp, Models]:
    metrics = GatewayMetrics(pool.frames, lambda: reports(pool))

    def served(model: LoadedModel) -> ServedModel:
        name = model.identity.name
        counts = metrics.of(name)
        dispatcher = Dispatcher(
            pool,
            name,
            AdmissionQueue(config.max_queue),
            POLICIES[config.router_policy],
            config.local_prefill,
            config.queue_timeout_s,
            objectives=Objectives(config.ttft_slo_s, config.tpot_slo_s),
            counts=counts,
        )
        limits = LimitsInForce(pool, name, config.max_model_lens.get(name))
        return ServedModel(
            model.identity, model.tokenizer, model.eos_token_ids, limits, dispatcher, counts
        )

    models = Models([served(model) for model in loaded], config.aliases)
    frontend = Frontend(
        models=models,
        metrics=metrics,
        threads=threads,
        bodies=Bodies(config.max_body_bytes),
        request_timeout_s=config.front.request_timeout_s,
        keep_alive_s=config.keep_alive_s,
    )
    app = App(pool, frontend, int(time.time()), config.debug_endpoints).build()
    keys = keys_in_force(config.api_keys, os.environ)
    return in_front(app, keys, config.front, metrics), models


def http_server(app: ASGIApp, shutdown_s: float, limits: ConnectionLimits | None = None) -> Server:
    """The HTTP server. Streams get `shutdown_s` to finish when it is told to stop."""
    protocol = functools.partial(LimitedProtocol, Connections(limits or ConnectionLimits()))
    return Server(
        uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]  # a class or what makes its objects, to uvicorn it is the same
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(round(shutdown_s), 1),
        )
    )


async def serve(config: GatewayConfig, listener: socket.socket, loaded: Sequence[LoadedModel]) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError when the control socket cannot be had."""
    host, port = listener.getsockname()[:2]
    context: zmq.Context[Any] = zmq.Context()
    gateway_id = f"gateway#{secrets.token_hex(4)}"
    with ThreadPoolExecutor(PARSING_THREADS, thread_name_prefix="parse") as threads:
        identities = [model.identity for model in loaded]
        pool = Pool(
            context, config.control_address(port), gateway_id, identities, config.death_bound_s, curve=config.curve
        )
        try:
            beating = pool.start()
            app, models = build_app(config, loaded, pool, threads)
            server = http_server(app, config.shutdown_s, ConnectionLimits(config.max_connections))
            server.before_accepting = lambda: pool.until(
                lambda: len(models.ready) == len(models.served), JOIN_TIMEOUT_S
            )
            beating.add_done_callback(lambda _: server.request_stop())
            print(
                f"pdserve gateway: {' '.join(models.names)} at http://{host}:{port}, workers at {pool.address}",
                flush=True,
            )
            await server.serve(sockets=[listener])
            if beating.done():
                beating.result()  # it ends by itself only with an exception
            if not await pool.released(RELEASE_TIMEOUT_S):
                log.warning("stopping while workers still list requests of this gateway")
        finally:
            await pool.close()
            context.destroy(linger=200)


def run(config: GatewayConfig) -> None:
    """The whole life of the process."""
    allow_open_files(config.max_connections)
    if config.api_keys is None and not is_loopback(config.host):
        log.warning("whoever reaches %s port %d may use it: there is no --api-keys", config.host, config.port)
    listener = bind(config.host, config.port)  # first: a port in use is known at once, a model takes seconds
    try:
        loaded = load_models(config)
        uvicorn_loop = uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
            runner.run(serve(config, listener, loaded))
    finally:
        listener.close()
