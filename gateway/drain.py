"""`pdserve drain WORKER`: have a worker take nothing new and leave."""

from __future__ import annotations

import argparse
import http.client
import json
import os
from collections.abc import Sequence
from urllib.parse import quote, urlsplit

from ..engine.config import run_main
from ..transfer.errors import ConfigError

TIMEOUT_S = 10.0
API_KEY_VARIABLE = "PDSERVE_API_KEY"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdserve drain",
        description="Have a worker take nothing new, and leave when its requests have finished or moved elsewhere.",
        epilog=f"Where the gateway asks for API keys, the one in ${API_KEY_VARIABLE} is sent.",
    )
    parser.add_argument("worker", help="its name, as /pools shows it")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="any gateway it serves (default: %(default)s)")
    return parser


def drain(url: str, worker: str, api_key: str | None) -> str:
    """What the gateway says to it, in words. Raises ConfigError when it says no, or nothing."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url} is not of the form http://HOST:PORT")
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        connection = connect(parts.hostname, parts.port, timeout=TIMEOUT_S)
        connection.request("POST", f"{parts.path.rstrip('/')}/admin/drain/{quote(worker, safe='')}", "{}", headers)
        response = connection.getresponse()
        body = json.loads(response.read())
        connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConfigError(f"no answer that makes sense from {url}: {error}") from None
    if response.status != http.client.ACCEPTED:
        raise ConfigError(f"{url} says: {body['error']['message']}")
    return f"{body['worker']} drains; {body['inflight']} requests of this gateway are still there"


def main(argv: Sequence[str]) -> int:
    """Entry point of `pdserve drain`; returns the exit code."""
    args = build_parser().parse_args(argv)
    return run_main("pdserve drain", lambda: print(drain(args.url, args.worker, os.environ.get(API_KEY_VARIABLE))))
