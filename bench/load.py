"""How load is applied: a closed loop of N clients, or an open loop that keeps its times whatever comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from .client import Client
from .record import NOT_SENT, RequestRecord, monotonic
from .workload import PlannedRequest


class Run:
    """The records of one run as they come in. `on_change` is told after each request that starts or ends."""

    def __init__(self, client: Client, on_change: Callable[[Run], None] = lambda run: None) -> None:
        self._client = client
        self._on_change = on_change
        self.records: list[RequestRecord] = []  # in order of completion
        self.started_s = monotonic()
        self.num_outstanding = 0
        self.num_failed = 0
        self.num_output_tokens = 0

    async def closed_loop(
        self, plan: Iterator[PlannedRequest], *, concurrency: int, duration_s: float | None = None
    ) -> None:
        """`concurrency` clients, each sending its next request when its last one ended, until the plan or time ends."""
        self.started_s = monotonic()

        async def one_client() -> None:
            for planned in plan:  # shared by all clients: each request is taken once
                if duration_s is not None and monotonic() - self.started_s >= duration_s:
                    return
                await self._send(planned, None)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_client())

    async def open_loop(
        self, plan: Iterator[PlannedRequest], *, max_outstanding: int, duration_s: float | None = None
    ) -> None:
        """Send every request at its time. Past `max_outstanding` unanswered ones a request is counted, not sent."""
        self.started_s = monotonic()
        async with asyncio.TaskGroup() as group:
            for planned in plan:  # a prompt not made ahead is made here, before its time
                if planned.at_s is None:
                    raise AssertionError("an open loop needs arrival times")
                if duration_s is not None and planned.at_s > duration_s:
                    break
                scheduled_s = self.started_s + planned.at_s
                await asyncio.sleep(max(0.0, scheduled_s - monotonic()))
                if self.num_outstanding >= max_outstanding:
                    self._skip(planned, scheduled_s)
                else:
                    self.num_outstanding += 1
                    group.create_task(self._send_counted(planned, scheduled_s))

    async def _send(self, planned: PlannedRequest, scheduled_s: float | None) -> None:
        self.num_outstanding += 1
        await self._send_counted(planned, scheduled_s)

    async def _send_counted(self, planned: PlannedRequest, scheduled_s: float | None) -> None:
        """Send a request that is already counted as outstanding, and keep its record however it ends."""
        record = _new_record(planned, scheduled_s)
        self._on_change(self)
        try:
            await self._client.send(planned, scheduled_s, record)
        finally:
            self.num_outstanding -= 1
            self._keep(record)

    def _skip(self, planned: PlannedRequest, scheduled_s: float) -> None:
        record = _new_record(planned, scheduled_s)
        record.error = NOT_SENT
        record.detail = "too many requests outstanding"
        record.ended_s = record.sent_s
        self._keep(record)

    def _keep(self, record: RequestRecord) -> None:
        self.records.append(record)
        if record.ok:
            self.num_output_tokens += record.output_tokens
        else:
            self.num_failed += 1
        self._on_change(self)


def _new_record(planned: PlannedRequest, scheduled_s: float | None) -> RequestRecord:
    return RequestRecord(planned.index, len(planned.prompt), planned.output_tokens, scheduled_s, monotonic())
