"""A system started process by process, as by hand, so that a test can stop and start each one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.system.harness import Gateway, Launch, free_port


@dataclass
class Cluster:
    """Gateways and workers started one by one, as by hand; each keeps its name and addresses when it starts again."""

    model: Path
    runtime: Path
    num_gateways: int
    gateway_flags: tuple[object, ...]
    worker_flags: tuple[object, ...]
    gateways: dict[str, Gateway] = field(default_factory=dict)
    workers: dict[str, Launch] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.ports = {f"gateway-{i}": free_port() for i in range(self.num_gateways)}

    def _control(self, name: str) -> str:
        return f"ipc://{self.runtime}/{name}"

    def start(self, name: str) -> None:
        """A process by its name: gateway-N, prefill-N or decode-N."""
        role = name.partition("-")[0]
        if role == "gateway":
            flags = ("gateway", "--model", self.model, "--listen", self._control(name), *self.gateway_flags)
            gateway = Gateway(*flags, model=self.model.name, port=self.ports[name], runtime=self.runtime)
            self.gateways[name] = gateway
            self._stack.callback(gateway.client.close)
            self._stack.callback(gateway.kill_all)
        else:
            controls = [flag for known in self.ports for flag in ("--gateway", self._control(known))]
            worker = Launch(
                role, "--model", self.model, "--name", name, *controls, *self.worker_flags, runtime=self.runtime
            )
            self.workers[name] = worker
            self._stack.callback(worker.kill_all)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        roles = [name.partition("-")[0] for name in self.workers]
        for gateway in self.gateways.values():
            gateway.wait_ready(roles.count("prefill"), roles.count("decode"), timeout_s)

    def close(self) -> None:
        self._stack.close()

    def log(self) -> str:
        return "\n".join(launch.log_tail(40) for launch in (*self.gateways.values(), *self.workers.values()))


@contextmanager
def cluster(
    model: Path,
    runtime: Path,
    *names: str,
    gateway_flags: tuple[object, ...] = ("--shutdown-s", 60),
    worker_flags: tuple[object, ...] = ("--kv-blocks", 1024),
) -> Iterator[Cluster]:
    """Processes of these names, ready; killed at the end, with their logs added to an error that comes out."""
    num_gateways = sum(name.startswith("gateway") for name in names)
    running = Cluster(model, runtime, num_gateways, gateway_flags, worker_flags)
    try:
        for name in names:
            running.start(name)
        running.wait_ready()
        yield running
    except BaseException as error:
        error.add_note(running.log())
        raise
    finally:
        running.close()
