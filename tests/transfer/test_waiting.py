"""A waiter watches what it is told to, now and not before."""

from __future__ import annotations

import os

import zmq

from pdserve.transfer.waiting import Waiter


def test_what_is_watched_may_change_from_wait_to_wait() -> None:
    waiter = Waiter()
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        here.bind("inproc://here")
        there.connect("inproc://here")
        ear, mouth = os.pipe()
        try:
            assert not waiter.wait([here], ear, 0)
            assert not waiter.wait([here], ear, 0)
            there.send(b"x")
            assert waiter.wait([here], ear, 5000)
            assert waiter.wait([here], None, 5000)
            assert not waiter.wait([], ear, 0)
            os.write(mouth, b"x")
            assert waiter.wait([], ear, 5000)
            here.recv()
            assert not waiter.wait([here], None, 0)
            assert waiter.wait([here], ear, 5000)
        finally:
            os.close(ear)
            os.close(mouth)


def test_a_new_socket_in_the_place_of_a_closed_one_is_watched() -> None:
    waiter = Waiter()
    with zmq.Context() as context:
        for number in range(3):
            with context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
                here.bind(f"inproc://{number}")
                there.connect(f"inproc://{number}")
                assert not waiter.wait([here], None, 0)
                there.send(b"x")
                assert waiter.wait([here], None, 5000)
