"""Keys for the sockets between processes: CURVE encryption, and who is let in.

One directory of keys serves a whole cluster; every process gets the same one (copy it to each machine with `scp -rp`):

    DIR/cluster.key               the secret key, mode 0600
    DIR/cluster.pub               its public half: what every socket that listens proves to have
    DIR/authorized/*.pub          the public keys that are let in; at first a copy of cluster.pub

CURVE alone encrypts but admits any client, so every context with a socket that listens also has a keeper: the answerer
of ZAP, ZeroMQ's protocol for that question, bound before the socket is. Without a keeper the sockets admit nobody.
The list is read anew for every connection: a key that is taken out gets in no more.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.z85

from .errors import ConfigError

log = logging.getLogger(__name__)

SECRET_NAME = "cluster.key"
PUBLIC_NAME = "cluster.pub"
AUTHORIZED_NAME = "authorized"
KEY_CHARACTERS = 40  # 32 bytes in Z85
MAX_KEY_FILE_BYTES = 4096
ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"pdserve"
ZAP_VERSION = b"1.0"


@dataclass(frozen=True)
class Curve:
    """What a process needs to speak CURVE with its cluster: keys in Z85, and the directory of those let in."""

    public: bytes
    secret: bytes = field(repr=False)
    authorized: Path

    def admits(self, public: bytes) -> bool:
        """Is this key (Z85) on the list now? An unreadable list admits nobody."""
        try:
            return any(read_key(path) == public for path in sorted(self.authorized.glob("*.pub")))
        except (OSError, ConfigError) as error:
            log.error("nobody is let in: %s", error)
            return False


def read_key(path: Path) -> bytes:
    """The key in a file: its first line that is neither empty nor a comment. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_KEY_FILE_BYTES).decode("ascii").splitlines()
        key = next((line.strip() for line in lines if line.strip() and not line.startswith("#")), "")
        if len(key) != KEY_CHARACTERS:
            raise ValueError(f"it holds no key of {KEY_CHARACTERS} characters")
        zmq.utils.z85.decode(key)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from None
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{path} is not a key: {error}") from None
    return key.encode()


def _write_new(path: Path, key: bytes, comment: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as file:
        file.write(f"# {comment}\n{key.decode()}\n")


def create_keys(directory: Path) -> None:
    """Make a cluster's keys in `directory`. Raises ConfigError; keys that are there already stay as they are."""
    public, secret = zmq.curve_keypair()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(directory / SECRET_NAME, secret, "pdserve cluster key: SECRET", 0o600)
        _write_new(directory / PUBLIC_NAME, public, "pdserve cluster key: public half", 0o644)
        (directory / AUTHORIZED_NAME).mkdir(mode=0o700)
        _write_new(directory / AUTHORIZED_NAME / PUBLIC_NAME, public, "let in", 0o644)
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} exists already; nothing in it was changed") from None
    except OSError as error:
        raise ConfigError(f"cannot write keys to {directory}: {error.strerror}") from None


def load_keys(directory: Path) -> Curve:
    """The keys made by `create_keys`. Raises ConfigError when something is missing or others could read the secret."""
    secret_path = directory / SECRET_NAME
    try:
        mode = secret_path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read the key {secret_path}: {error.strerror} (made by `pdserve keys`)") from None
    if mode & 0o077:
        raise ConfigError(f"{secret_path} is open to other users (mode {mode & 0o777:o}): chmod 600 it")
    curve = Curve(read_key(directory / PUBLIC_NAME), read_key(secret_path), directory / AUTHORIZED_NAME)
    if zmq.curve_public(curve.secret) != curve.public:
        raise ConfigError(f"{SECRET_NAME} and {PUBLIC_NAME} in {directory} do not belong together")
    if not curve.admits(curve.public):
        raise ConfigError(f"{curve.authorized} does not list {PUBLIC_NAME}: these processes would refuse each other")
    return curve


def secure_listener(context: zmq.Context[Any], socket: zmq.Socket[bytes], curve: Curve) -> None:
    """Make a socket that is not bound yet admit only the listed keys."""
    _start_keeper(context, curve)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no keeper, no entry


def secure_client(socket: zmq.Socket[bytes], curve: Curve) -> None:
    """Make a socket that is not connected yet speak only to a holder of the cluster's key."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, curve.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)


def _start_keeper(context: zmq.Context[Any], curve: Curve) -> None:
    """Bind the answerer of ZAP and run it in a thread until the context ends. A context has one; a second call is
    content with the first one's list."""
    # A shadow, whose sockets `destroy` of the context itself does not close under the thread's feet.
    socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(ZAP_ADDRESS)
    except zmq.ZMQError as error:
        socket.close()
        if error.errno != zmq.EADDRINUSE:
            raise
        return
    threading.Thread(target=_keep, args=(socket, curve), name="zap", daemon=True).start()


def _keep(socket: zmq.Socket[bytes], curve: Curve) -> None:
    try:
        while True:
            request = socket.recv_multipart()
            socket.send_multipart(zap_answer(request, curve))
    except zmq.ContextTerminated:
        socket.close()


def zap_answer(request: list[bytes], curve: Curve) -> list[bytes]:
    """The reply to one ZAP request: version, sequence, domain, address, identity, mechanism, credentials."""
    sequence = request[1] if len(request) > 1 else b""
    listed = (
        len(request) == 7
        and request[0] == ZAP_VERSION
        and request[2] == ZAP_DOMAIN
        and request[5] == b"CURVE"
        and curve.admits(zmq.utils.z85.encode(request[6]))
    )
    if listed:
        return [ZAP_VERSION, sequence, b"200", b"OK", b"", b""]
    if len(request) > 3:
        log.warning("refused a connection from %s: its key is not on the list", request[3].decode("latin-1"))
    return [ZAP_VERSION, sequence, b"400", b"not on the list", b"", b""]
