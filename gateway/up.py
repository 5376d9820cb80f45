"""`pdserve up`: a whole system on one machine, started and supervised.

1. The models are resolved first, so a conversion happens once and a wrong path is one line.
2. Gateway, prefill and decode workers are spawned, each worker on one pinned core with one thread (`launch.py`).
3. When the gateway answers /ready and every worker is registered and linked, the address is printed.
4. A child that dies is started again (`supervisor.py`); Ctrl-C or SIGTERM stops everything.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..engine.checkpoint import resolve
from ..engine.config import run_main, setup_logging
from ..transfer.channel import runtime_directory
from ..transfer.errors import ConfigError
from .api_keys import PROBE_VARIABLE, new_key
from .launch import UpConfig, child_specs, parse_config
from .supervisor import Supervisor, write_json, write_text

POLL_INTERVAL_S = 0.2
PORT_TRIES = 20
HTTP_TIMEOUT_S = 2.0

logger = logging.getLogger("pdserve.up")


def claim_ports(host: str, port: int, count: int) -> int:
    """The first of `count` consecutive ports that can be listened on now; any for 0. Raises ConfigError."""
    for _ in range(PORT_TRIES):
        first = claim_port(host, port)
        try:
            for following in range(first + 1, first + count):
                claim_port(host, following)
        except (ConfigError, OverflowError):
            if port != 0:
                raise
        else:
            return first
    raise ConfigError(f"found no {count} consecutive free ports on {host}")


def claim_port(host: str, port: int) -> int:
    """A port that can be listened on now: `port`, or any free one for 0. Raises ConfigError, naming both."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            claimed: int = probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return claimed


@contextmanager
def socket_directory() -> Iterator[Path]:
    """A fresh directory for this system's ipc sockets, removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="up-", dir=runtime_directory()))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def local_url_host(host: str) -> str:
    """The host to name in a URL for a server that listens on `host`, from this machine."""
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _get_json(host: str, port: int, path: str) -> object:
    """GET, directly and never through a proxy. None unless the answer is a 200 with JSON."""
    connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {os.environ.get(PROBE_VARIABLE)}"})
        response = connection.getresponse()
        body = response.read()
        return json.loads(body) if response.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None  # not up yet
    finally:
        connection.close()


def missing_workers(pools: object, config: UpConfig) -> list[str]:
    """What `/pools` does not show yet: workers by name, and links as `prefill-0 → decode-0`."""
    workers = pools["workers"] if isinstance(pools, dict) else []
    present = {worker["name"] for worker in workers if worker["state"] == "ready"}
    linked = {
        (worker["name"], link["worker"].partition("#")[0])
        for worker in workers
        for link in worker["links"]
        if link["state"] == "linked"
    }
    missing: list[str] = []
    unlinked: list[str] = []
    for model in config.models:
        prefill, decode = (config.worker_names(role, model) for role in ("prefill", "decode"))
        missing += [name for name in (*prefill, *decode) if name not in present]
        unlinked += [f"{p} → {d}" for p in prefill for d in decode if (p, d) not in linked]
    return missing or unlinked


async def wait_until_ready(config: UpConfig, host: str, port: int, pause: Callable[[float], Awaitable[bool]]) -> None:
    """Return once every gateway can serve and has every worker registered and linked, or `pause` returned False."""
    for number in range(config.gateways):
        await _wait_for_gateway(config, host, port + number, pause)


async def _wait_for_gateway(
    config: UpConfig, host: str, port: int, pause: Callable[[float], Awaitable[bool]]
) -> None:
    while await pause(POLL_INTERVAL_S):
        if await asyncio.to_thread(_get_json, host, port, "/ready") is None:
            continue
        missing = missing_workers(await asyncio.to_thread(_get_json, host, port, "/pools"), config)
        if not missing:
            return
        logger.debug("waiting for %s", ", ".join(missing))


def ready_message(config: UpConfig, host: str, port: int) -> str:
    """What the user sees when the system can serve: where it is, and a command to try."""
    num_prefill, num_decode = (sum(map(count, config.models)) for count in (config.num_prefill, config.num_decode))
    workers = f"{num_prefill} prefill + {num_decode} decode" if num_prefill else f"{num_decode} aggregated"
    first, *_ = names = [model.name for model in config.models]
    body = json.dumps(
        {"model": first, "stream": True, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    )
    urls = " and ".join(f"http://{host}:{port + i}" for i in range(config.gateways))
    return (
        f"pdserve is ready: {', '.join(names)} at {urls} ({workers} workers). Ctrl-C stops it. Try:\n"
        f"  curl -N http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'"
    )


async def serve(config: UpConfig, models: Sequence[Path], port: int) -> None:
    """Run the whole system until SIGINT or SIGTERM. Raises ConfigError or RegistrationRefused (see Supervisor)."""
    host = local_url_host(config.host)
    os.environ[PROBE_VARIABLE] = new_key()  # the gateways inherit it, and let this process see their state
    with socket_directory() as sockets:
        specs = child_specs(config, models, port, sockets, sorted(os.sched_getaffinity(0)))
        supervisor = Supervisor(specs, write=write_json if config.log_json else write_text)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, supervisor.request_stop)
        logger.info("starting %s", ", ".join(spec.name for spec in specs))
        await supervisor.run(
            lambda: wait_until_ready(config, host, port, supervisor.pause),
            lambda: print(ready_message(config, host, port), flush=True),
        )
        logger.info("stopped")


def main(argv: Sequence[str]) -> int:
    """Entry point of `pdserve up`; returns the exit code."""

    def run() -> None:
        config = parse_config(argv)
        setup_logging(config.log_level, config.log_json)
        port = claim_ports(config.host, config.port, config.gateways)  # before a conversion that may take a minute
        asyncio.run(serve(config, [resolve(model.source) for model in config.models], port))

    return run_main("pdserve up", run)
