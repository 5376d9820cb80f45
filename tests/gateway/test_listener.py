"""The end of a listening socket: clients are refused or served, never reset."""

from __future__ import annotations

import errno
import select
import socket
import sys

import pytest

from pdserve.gateway.listener import bind, stop_handshakes


@pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")
def test_connections_begun_before_the_end_can_be_accepted_and_later_ones_are_not_begun() -> None:
    with bind("127.0.0.1", 0) as listener, socket.socket() as early, socket.socket() as late:
        listener.settimeout(2.0)
        early.connect(listener.getsockname())
        stop_handshakes(listener)
        late.settimeout(0.3)
        with pytest.raises(TimeoutError):
            late.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            early.sendall(b"hello")
            assert accepted.recv(5) == b"hello"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")
def test_who_knocked_in_between_is_refused_once_the_socket_is_closed() -> None:
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()
    stop_handshakes(listener)
    with socket.socket() as late:
        late.setblocking(False)
        late.connect_ex(address)
        listener.close()
        answered = select.poll()
        answered.register(late, select.POLLOUT)
        assert answered.poll(5000), "the kernel knocks again after a second"
        assert late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
