"""Between machines: CURVE keys for the processes, API keys for the clients."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import zmq

from pdserve.transfer.codec import encode
from pdserve.transfer.keys import create_keys, load_keys, secure_client
from pdserve.transfer.messages import (
    WorkerHeartbeat,
)
from tests.system.harness import Gateway, Launch, eventually, free_port
from tests.system.hostile import MAX_TOKENS, PROMPTS

pytestmark = pytest.mark.timeout(170, method="signal")


# --- keys ----------------------------------------------------------------------------------------------------------


def test_with_keys_a_cluster_over_tcp_serves_its_own_and_nobody_else(tiny: Path, runtime: Path) -> None:
    keys, others, control = runtime / "keys", runtime / "others", f"tcp://127.0.0.1:{free_port()}"
    for directory in (keys, others):
        create_keys(directory)
    api_keys = runtime / "api-keys"
    made = Launch("keys", "api", "tester", runtime=runtime)
    line = made.wait(60).stderr.splitlines()[-1]
    api_keys.write_text(line + "\n")
    key = made.stdout.strip()
    flags = ("--model", tiny, "--gateway", control)
    gateway = Gateway(
        "gateway", "--model", tiny, "--listen", control, "--keys", keys, "--api-keys", api_keys,
        "--local-prefill", "never", model="tiny", port=free_port(), runtime=runtime,
    )  # fmt: skip
    gateway.client._http.headers["Authorization"] = f"Bearer {key}"
    with ExitStack() as stack:
        stack.enter_context(gateway)
        launches = {}
        for role, name, extra in (
            ("decode", "d", ("--listen", "tcp://127.0.0.1:0", "--keys", keys)),
            ("prefill", "p", ("--keys", keys)),
            ("prefill", "no-keys", ()),
            ("prefill", "other-keys", ("--keys", others)),
        ):
            launches[name] = Launch(role, *flags, "--name", name, "--kv-blocks", 64, *extra, runtime=runtime)
            stack.enter_context(launches[name])
        gateway.wait_ready(1, 1)
        answer = gateway.client.complete(PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        assert len(answer.token_ids) == MAX_TOKENS
        eventually(lambda: gateway.metric("pdserve_frames_dropped_total", reason="handshake") > 2, 30, "others knock")
        assert {worker["name"] for worker in gateway.workers()} == {"d", "p"}
        for name in ("no-keys", "other-keys"):
            eventually(lambda name=name: "does not answer" in launches[name].stderr, 30, f"{name} is told")
        curve = load_keys(keys)
        public, secret = zmq.curve_keypair()
        with zmq.Context() as context, context.socket(zmq.DEALER) as spy:
            secure_client(spy, dataclasses.replace(curve, public=public, secret=secret))
            spy.setsockopt(zmq.CURVE_SERVERKEY, curve.public)
            spy.setsockopt(zmq.LINGER, 0)
            spy.connect(control)
            spy.send(encode(WorkerHeartbeat(1, [], True, 1, 1, 1, 1, 1, False, [], [])))
            assert not spy.poll(1000), "a stranger is not even told that it is one"
        with httpx.Client(base_url=gateway.url, trust_env=False) as nobody:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            assert nobody.post("/v1/completions", json=body).status_code == 401
            assert nobody.get("/metrics").status_code == 401
            assert nobody.get("/health").status_code == 200
        gateway.assert_idle()
