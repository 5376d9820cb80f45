"""The gateway process: builds everything, serves until it is told to stop, and lets go of all it had at workers."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
import zmq
from starlette.types import ASGIApp

from ..engine.checkpoint import fingerprint, resolve
from ..engine.model_directory import read_json
from ..transfer.errors import ConfigError
from .app import App, LimitsInForce, reports
from .asgi import AbortableProtocol
from .config import GatewayConfig
from .dispatch import Dispatcher
from .generate import Frontend
from .limits import AdmissionQueue
from .membership import ModelIdentity
from .metrics import GatewayMetrics
from .pool import Pool
from .router import POLICIES
from .text import Tokenizer

log = logging.getLogger(__name__)

PARSING_THREADS = 2
BACKLOG = 2048
RELEASE_TIMEOUT_S = 1.0  # how long workers may take to confirm that nothing of ours is left


class Server(uvicorn.Server):
    """uvicorn, whose signals are handled here: its own handling ends the process by the signal, not with exit 0."""

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


def bind(host: str, port: int) -> socket.socket:
    """A listening-to-be TCP socket. Raises ConfigError when it cannot be had."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # now, since two sockets may be bound to one port as long as neither listens
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def eos_token_ids(path: Path) -> frozenset[int]:
    """What ends a text of this model: the generation config's EOS ids, else the config's."""
    config = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    eos = generation.get("eos_token_id")
    for part in (config, config.get("text_config")):
        if eos is None and isinstance(part, dict):
            eos = part.get("eos_token_id")
    return frozenset(token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int))


def load_tokenizer(path: Path, chat_template: Path | None, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer, without torch: transformers imports it when it finds it, at the cost of 200 MB and a second, but
    tokenizers do not need it. (Remote code might.)"""
    if not trust_remote_code and "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # "import torch" now raises ModuleNotFoundError
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would announce that there is no torch
    return Tokenizer(path, chat_template_file=chat_template, trust_remote_code=trust_remote_code)


def build_app(
    config: GatewayConfig, identity: ModelIdentity, pool: Pool, tokenizer: Tokenizer, threads: ThreadPoolExecutor
) -> ASGIApp:
    dispatcher = Dispatcher(
        pool,
        AdmissionQueue(config.max_queue),
        POLICIES[config.router_policy],
        config.local_prefill,
        config.queue_timeout_s,
    )
    frontend = Frontend(
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(Path(identity.path)),
        limits=LimitsInForce(pool, identity.names, config.max_model_len),
        dispatcher=dispatcher,
        metrics=GatewayMetrics(pool.frames, lambda: reports(pool)),
        threads=threads,
        max_body_bytes=config.max_body_bytes,
    )
    return App(identity, pool, frontend, int(time.time())).build()


def http_server(app: ASGIApp, shutdown_s: float) -> Server:
    """The HTTP server. Streams get `shutdown_s` to finish when it is told to stop."""
    return Server(
        uvicorn.Config(
            app,
            http=AbortableProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(round(shutdown_s), 1),
        )
    )


async def serve(config: GatewayConfig, listener: socket.socket, identity: ModelIdentity, tokenizer: Tokenizer) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError when the control socket cannot be had."""
    host, port = listener.getsockname()[:2]
    context: zmq.Context[Any] = zmq.Context()
    gateway_id = f"gateway#{secrets.token_hex(4)}"
    with ThreadPoolExecutor(PARSING_THREADS, thread_name_prefix="parse") as threads:
        pool = Pool(context, config.control_address(port), gateway_id, identity, config.death_bound_s)
        try:
            beating = pool.start()
            server = http_server(build_app(config, identity, pool, tokenizer, threads), config.shutdown_s)
            beating.add_done_callback(lambda _: server.request_stop())
            print(
                f"pdserve gateway: {' '.join(identity.names)} at http://{host}:{port}, workers at {pool.address}",
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
    listener = bind(config.host, config.port)  # first: a port in use is known at once, a model takes seconds
    try:
        path = resolve(config.model)
        identity = ModelIdentity(config.names, str(path), fingerprint(path))
        tokenizer = load_tokenizer(path, config.chat_template, config.trust_remote_code)
        uvicorn_loop = uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
            runner.run(serve(config, listener, identity, tokenizer))
    finally:
        listener.close()
