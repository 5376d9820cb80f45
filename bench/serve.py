"""`bench serve`: prepare everything, warm up, apply the load, report."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from .client import Client, ServedModel, find_model, open_session
from .errors import BenchError
from .load import Run
from .machine import describe_machine
from .options import (
    DEFAULT_INPUT_TOKENS,
    DEFAULT_NUM_REQUESTS,
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_TRACE_BLOCK_TOKENS,
    ServeConfig,
    fresh_seed,
    parse_options,
)
from .prompts import DEFAULT_FIRST_ID, DEFAULT_LAST_ID, PromptMaker, id_pieces, word_pieces
from .record import RequestRecord
from .report import LiveProgress, print_report, setup_notes
from .stats import summarize
from .traces import TraceRequest, read_trace
from .workload import PlannedRequest, TraceFit, arrival_times, clip_lengths, fit_trace, replay, synthetic

EXIT_OK = 0
EXIT_NOTHING_SUCCEEDED = 1
EXIT_INTERRUPTED = 130
SPARE_OPEN_FILES = 64
MAX_TOKENS_AHEAD = 25_000_000  # 8 bytes and about 0.1 µs each

log = logging.getLogger("pdserve.bench")


@dataclass(frozen=True)
class Plan:
    """The requests of a run, how many at most, and what was changed to make a trace fit."""

    requests: Iterator[PlannedRequest]
    num_requests: int | None
    fit: TraceFit | None


@dataclass
class Outcome:
    """What a run left behind; filled while it goes on, so that an interrupt finds it."""

    model: ServedModel | None = None
    plan: Plan | None = None
    run: Run | None = None
    interrupted: bool = False


def main(arguments: list[str]) -> int:
    """Run one benchmark and print its report; the exit code. Raises BenchError for what cannot be run."""
    config = parse_options(arguments)
    setup_notes(config.log_level, config.log_json)
    _allow_open_files((config.concurrency or config.max_outstanding) + SPARE_OPEN_FILES)
    seed = fresh_seed() if config.seed is None else config.seed
    maker = PromptMaker(_pieces(config), seed)
    trace = read_trace(config.trace) if config.trace is not None else []
    machine = describe_machine()  # before the load raises the load average
    if config.output is not None:
        _write_records(config.output, [], 0.0)  # an unwritable file is known now, not after the run
    outcome = asyncio.run(_benchmark(config, maker, trace))
    records = outcome.run.records if outcome.run is not None else []
    if config.output is not None and outcome.run is not None:
        _write_records(config.output, records, outcome.run.started_s)
    summary = summarize(records, config.slo_ttft_ms, config.slo_tpot_ms)
    print_report(summary, _settings(config, seed, outcome, arguments), machine, outcome.interrupted)
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if summary.num_ok else EXIT_NOTHING_SUCCEEDED


async def _benchmark(config: ServeConfig, maker: PromptMaker, trace: list[TraceRequest]) -> Outcome:
    """Do the run. SIGINT and SIGTERM end it early: outstanding requests are dropped, the rest is reported."""
    outcome = Outcome()
    work = asyncio.create_task(_apply_load(config, maker, trace, outcome))

    def interrupt() -> None:
        outcome.interrupted = True
        work.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    with suppress(asyncio.CancelledError):
        await work
    return outcome


async def _apply_load(config: ServeConfig, maker: PromptMaker, trace: list[TraceRequest], outcome: Outcome) -> None:
    async with open_session(config.timeout_s) as session:
        outcome.model = model = await find_model(session, config.url, config.model)
        client = Client(session, config.url, model.name)
        outcome.plan = plan = make_plan(config, maker, trace, model.max_model_len)
        await _warm_up(config, maker, client, model.max_model_len)
        with LiveProgress(model.name, plan.num_requests) as progress:
            outcome.run = run = Run(client, progress.update)
            if config.concurrency is not None:
                await run.closed_loop(plan.requests, concurrency=config.concurrency, duration_s=config.duration_s)
            else:
                await run.open_loop(plan.requests, max_outstanding=config.max_outstanding, duration_s=config.duration_s)


async def _warm_up(config: ServeConfig, maker: PromptMaker, client: Client, context_tokens: int | None) -> None:
    if not config.warmup:
        return
    lengths = config.input_tokens or DEFAULT_INPUT_TOKENS, config.output_tokens or DEFAULT_OUTPUT_TOKENS
    input_tokens, output_tokens = clip_lengths(*lengths, context_tokens)
    plan = synthetic(
        maker,
        "warmup",
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prefix_tokens=config.prefix_tokens or 0,
        times=None,
    )
    with LiveProgress("warm-up", config.warmup) as progress:
        run = Run(client, progress.update)
        await run.closed_loop(islice(plan, config.warmup), concurrency=min(config.concurrency or 1, config.warmup))
    failed = [record for record in run.records if not record.ok]
    if failed:
        log.warning("%d of %d warm-up requests failed: %s", len(failed), config.warmup, _described(failed[0]))


def make_plan(config: ServeConfig, maker: PromptMaker, trace: list[TraceRequest], context_tokens: int | None) -> Plan:
    """The requests this configuration asks for. Raises BenchError when they cannot fit the model's context."""
    if config.mode == "trace":
        block_tokens = config.trace_block_tokens or DEFAULT_TRACE_BLOCK_TOKENS
        fit = fit_trace(
            trace,
            speed=config.speed or 1.0,
            block_tokens=block_tokens,
            context_tokens=context_tokens,
            num_requests=config.num_requests,
            duration_s=config.duration_s,
        )
        _say_what_changed(fit, block_tokens, context_tokens)
        num_tokens = sum(request.input_tokens for request in fit.requests)
        return Plan(_made_ahead(replay(maker, fit.requests, block_tokens), num_tokens), len(fit.requests), fit)
    input_tokens = config.input_tokens or DEFAULT_INPUT_TOKENS
    output_tokens = config.output_tokens or DEFAULT_OUTPUT_TOKENS
    if context_tokens is not None and input_tokens + output_tokens > context_tokens:
        raise BenchError(
            f"{input_tokens} input + {output_tokens} output tokens exceed the model's context of {context_tokens}"
        )
    num_requests = config.num_requests
    if num_requests is None and config.duration_s is None:
        num_requests = DEFAULT_NUM_REQUESTS
    requests = synthetic(
        maker,
        "run",
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prefix_tokens=config.prefix_tokens or 0,
        times=arrival_times(config.rate, config.arrival or "poisson", maker.seed) if config.rate is not None else None,
    )
    if num_requests is None:
        return Plan(requests, None, None)
    return Plan(_made_ahead(islice(requests, num_requests), num_requests * input_tokens), num_requests, None)


def _made_ahead(requests: Iterator[PlannedRequest], num_tokens: int) -> Iterator[PlannedRequest]:
    """The same requests with their prompts made now, so that a burst is sent without delay, if memory allows."""
    return iter(list(requests)) if num_tokens <= MAX_TOKENS_AHEAD else requests


def _say_what_changed(fit: TraceFit, block_tokens: int, context_tokens: int | None) -> None:
    num_requests = len(fit.requests)
    if fit.num_clipped:
        log.warning(
            "%d of %d trace requests are clipped to the model's context of %s tokens",
            fit.num_clipped,
            num_requests,
            context_tokens,
        )
    if fit.num_raised:
        log.warning("%d of %d trace requests have a length of 0, sent as 1", fit.num_raised, num_requests)
    if fit.num_odd_blocks:
        log.warning(
            "%d of %d trace requests have hash ids that do not match their length at %d tokens a block "
            "(--trace-block-tokens)",
            fit.num_odd_blocks,
            num_requests,
            block_tokens,
        )


def _pieces(config: ServeConfig) -> list[list[int]]:
    if config.tokenizer is not None:
        return word_pieces(config.tokenizer)
    return id_pieces(*(config.token_ids or (DEFAULT_FIRST_ID, DEFAULT_LAST_ID)))


def _settings(config: ServeConfig, seed: int, outcome: Outcome, arguments: list[str]) -> dict[str, Any]:
    """What the JSON line says about how the figures were made."""
    fit = outcome.plan.fit if outcome.plan is not None else None
    return {
        "command": shlex.join(["pdserve", "bench", "serve", *arguments]),
        "url": config.url,
        "model": outcome.model.name if outcome.model is not None else config.model,
        "mode": config.mode,
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(config).items() if v is not None},
        "seed": seed,
        "num_clipped": fit.num_clipped if fit is not None else 0,
        "num_raised": fit.num_raised if fit is not None else 0,
    }


def _write_records(path: Path, records: Sequence[RequestRecord], started_s: float) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            for record in sorted(records, key=lambda record: record.index):
                file.write(json.dumps(record.as_json(started_s)) + "\n")
    except OSError as error:
        raise BenchError(f"cannot write --output {path}: {error.strerror}") from error


def _allow_open_files(wanted: int) -> None:
    """Each outstanding request holds one socket: raise the soft limit. Raises BenchError when the hard one is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if allowed < wanted:
            raise BenchError(f"{wanted} sockets may be needed but only {hard} files may be open (ulimit -Hn)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _described(record: RequestRecord) -> str:
    return f"{record.error}: {record.detail}" if record.detail else record.error
