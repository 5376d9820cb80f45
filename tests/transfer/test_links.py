"""A pair uses the best link both ends offer, and says why it does not use a better one."""

import pytest

from pdserve.transfer.links import best_link
from pdserve.transfer.messages import Peer


@pytest.mark.parametrize(
    ("mode", "host", "offered", "link", "named"),
    [
        ("auto", "here", ["shm", "zmq"], "shm", ""),
        ("auto", "there", ["shm", "zmq"], "zmq", "there"),
        ("auto", "here", ["zmq"], "zmq", "does not offer"),
        ("zmq", "here", ["shm", "zmq"], "zmq", ""),
        ("shm", "here", ["shm"], "shm", ""),
        ("shm", "there", ["shm", "zmq"], "", "there"),
        ("zmq", "here", ["shm"], "", "shm only"),
        ("shm", "here", ["zmq"], "", "does not offer"),
    ],
)
def test_the_best_common_link_is_used_and_what_bars_a_better_one_is_named(mode, host, offered, link, named) -> None:
    found, why = best_link(mode, host, Peer("decode-0#00000000", "here", "ipc://a", "ipc://b", offered))
    assert found == link
    assert bool(why) == bool(named)
    assert named in why
