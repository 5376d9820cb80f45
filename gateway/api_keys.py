"""Who may use the HTTP API: a file of named keys, of which only the hashes are kept.

One key a line, `name:sha256` with the hash as 64 hex digits; empty lines and lines that begin with # are skipped.
Behind it may stand limits of that key, which override the flags of the same names:

    alice:HASH requests-per-minute=60 tokens-per-minute=100000 max-concurrent=none

`pdserve keys api NAME` makes a key, shows it once, and prints the line for the file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from ..transfer.errors import ConfigError
from .api.errors import ApiError
from .rate_limits import parse_limits

OPEN_PATHS = frozenset({"/health", "/ready"})  # what probes of an orchestrator ask, without a secret
CLIENT_STATE = "client"  # in the ASGI scope's state
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
HASH = re.compile(r"[0-9a-f]{64}")
KEY_BYTES = 32
PROBE_VARIABLE = "PDSERVE_PROBE_KEY"
"""Environment of a gateway: one more key, by which `pdserve up` sees whether the gateway it started is ready."""
PROBE_NAME = "up"


@dataclass(frozen=True)
class ApiKey:
    """Whose key it is, and which of `ClientLimits` are other for it than by default."""

    name: str
    limits: dict[str, int | None] = field(default_factory=dict)


def client_of(scope: Scope) -> str:
    """Whose request this is: `key:NAME` when API keys are on, else `ip:ADDRESS`. For fairness and for logs."""
    name: str | None = scope.get("state", {}).get(CLIENT_STATE)
    if name is not None:
        return f"key:{name}"
    peer: tuple[str, int] | None = scope.get("client")
    return f"ip:{peer[0]}" if peer else "ip:"


def new_key() -> str:
    """A fresh key with 256 random bits, as the client sends it."""
    return f"pds-{secrets.token_urlsafe(KEY_BYTES)}"


def hash_of(key: str) -> str:
    """What the file keeps of a key. Keys are random, so a plain hash cannot be searched backwards."""
    return hashlib.sha256(key.encode()).hexdigest()


def line_for(name: str, key: str) -> str:
    """The line of the file that lets `key` in as `name`. Raises ConfigError for a name that cannot be written."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"the key name {name!r:.80} must be 1-64 letters, digits or . _ @ -")
    return f"{name}:{hash_of(key)}"


def read_api_keys(path: Path) -> dict[bytes, ApiKey]:
    """Hash (32 bytes) → key. Raises ConfigError naming the line at fault; a file without keys would lock all out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from None
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        entry, *words = line.split()
        name, _, digest = entry.partition(":")
        if NAME.fullmatch(name) is None or HASH.fullmatch(digest) is None:
            raise ConfigError(f"{path} line {number} is not of the form name:sha256 (64 hex digits)")
        if any(name == key.name for key in keys.values()) or bytes.fromhex(digest) in keys:
            raise ConfigError(f"{path} line {number}: this name or key is there already")
        try:
            keys[bytes.fromhex(digest)] = ApiKey(name, parse_limits(words))
        except ValueError as error:
            raise ConfigError(f"{path} line {number}: {error}") from None
    if not keys:
        raise ConfigError(f"{path} holds no API key: nobody could use the server")
    return keys


def keys_in_force(path: Path | None, environment: Mapping[str, str]) -> dict[bytes, ApiKey] | None:
    """Those of the file and the probe's; None when everybody is let in. Raises ConfigError."""
    if path is None:
        return None
    keys = read_api_keys(path)
    if probe := environment.get(PROBE_VARIABLE):
        keys[bytes.fromhex(hash_of(probe))] = ApiKey(PROBE_NAME)
    return keys


class ApiKeys:
    """Lets requests with a known key pass, and those for `OPEN_PATHS`; all others get a 401."""

    def __init__(self, app: ASGIApp, keys: Mapping[bytes, ApiKey]) -> None:
        self._app = app
        self._keys = dict(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            name = self._name_of(scope)
            if name is None:
                await _refuse(scope, send)
                return
            scope.setdefault("state", {})[CLIENT_STATE] = name
        await self._app(scope, receive, send)

    def _name_of(self, scope: Scope) -> str | None:
        """The key's name. Every stored hash is compared in full, so the time taken tells nothing."""
        values = [value for key, value in scope["headers"] if key == b"authorization"]
        scheme, _, given = (values[0] if len(values) == 1 else b"").partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        matches = [key.name for known, key in self._keys.items() if hmac.compare_digest(known, digest)]
        return matches[0] if matches and scheme.lower() == b"bearer" else None


async def _refuse(scope: Scope, send: Send) -> None:
    given = any(key == b"authorization" for key, _ in scope["headers"])
    text = "Incorrect API key provided." if given else "No API key provided: send it as `Authorization: Bearer KEY`."
    error = ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": 'Bearer realm="pdserve"'})
    body = json.dumps(error.body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((key.lower().encode(), value.encode()) for key, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
