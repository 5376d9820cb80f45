"""One step of the model for the decode pool: swaps carried out, the batch run, the next tokens picked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from ..engine.cores import Cores, no_cores
from ..engine.grammar import Grammars, Row
from ..engine.graphs import DecodeGraphs
from ..engine.logprobs import prompt_targets, sampled_logprobs, score_prompts
from ..engine.runner import Chunk, Runner
from ..engine.sampler import NOT_FINITE, SampleRow, sample
from ..engine.setup import Engine
from ..transfer.errors import StepCancelled
from ..transfer.messages import TokenLogprobs
from .metrics import DecodeMetrics
from .preemption import SwapSpace
from .scheduler import Plan
from .sequence import Sequence, State, Work
from .speed import Speeds
from .wishes import Wishes

Scores = list[TokenLogprobs] | None  # of a prompt's own tokens; None when they are not finite


class Stepper:
    """Runs batches. `between_layers` is called once a layer while one runs, and may end it with StepCancelled."""

    def __init__(
        self,
        engine: Engine,
        swap: SwapSpace,
        metrics: DecodeMetrics,
        between_layers: Callable[[], None],
        grammars: Grammars,
        speeds: Speeds,
        cores: Cores | None = None,
        itl_slo_s: float | None = None,
    ) -> None:
        """`itl_slo_s`: for how long streams may wait for a token before a neighbour's core is asked for."""
        self._grammars = grammars
        self._engine = engine
        self._swap = swap
        self._metrics = metrics
        self._between_layers = between_layers
        self._runner = Runner(engine.model, engine.cache, self._on_layer)
        self._graphs: DecodeGraphs | None = None
        self._speeds = speeds
        self._cores = cores or no_cores()
        self.wishes = Wishes(self._cores, itl_slo_s, metrics.steps_asking)
        self.running: list[Work] = []  # the batch, while it runs

    def _on_layer(self, layer: int) -> None:
        self._between_layers()

    def warm_up(self) -> None:
        """Decode one token for real, and prepare whatever steps need. Raises ConfigError."""
        self._graphs = self._engine.warm_up(self._runner)

    def move_swapped(self, plan: Plan) -> None:
        """Copy preempted sequences out and returning ones in, before anything else is written."""
        cache, layout = self._engine.cache, self._engine.model.layout
        for out in plan.swapped_out:
            self._swap.fill(out, cache)
        for back in plan.swapped_in:
            self._swap.restore(back, cache, layout)

    def run(self, batch: list[Work]) -> tuple[torch.Tensor, list[Scores]] | None:
        """Logits [works that sample, vocab] of the batch, and the scores of each work's prompt tokens, from token
        `work.start` + 1 on, if it is to have them; None when the step was cancelled half-way."""
        started, helped_s = time.monotonic(), self._cores.helped_s()
        num_running = sum(work.sequence.state is State.RUNNING for work in batch)
        prompt_tokens = sum(work.count for work in batch) - num_running
        self.running = batch
        chunks = [_chunk(work) for work in batch]
        sampling = [w.sequence for w in batch if w.samples]
        self._grammars.ask([Row(s.key, s.choice, s.output) for s in sampling if s.params.grammar is not None])
        try:
            with self.wishes.step(num_running, prompt_tokens):
                logits = self._forward(chunks)
                scores = list(score_prompts(self._runner, chunks, self._between_layers))
        except StepCancelled:
            return None
        finally:
            self.running = []
        self._measure(num_running, prompt_tokens, time.monotonic() - started, self._cores.helped_s() - helped_s)
        return logits, scores

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:  # [chunks that sample, vocab]
        if self._graphs is not None and self._graphs.takes(chunks):
            return self._graphs.run(chunks)
        return self._runner.forward(chunks)

    def _measure(self, running: int, prompt_tokens: int, elapsed_s: float, helped_s: float) -> None:
        self._metrics.step_seconds.observe(elapsed_s)
        self._metrics.computed_tokens.inc(running + prompt_tokens)
        self._speeds.measured(running, prompt_tokens, elapsed_s, helped_s)

    def pick(
        self, logits: torch.Tensor, sampling: list[Work]
    ) -> Iterator[tuple[Sequence, list[int] | None, list[TokenLogprobs | None]]]:
        """The next token of every choice of every sequence that ran its last one and still lives, and what is to be
        known of its likelihood. One whose grammar could not be followed is left out: `Grammars.take_failures` names it.

        `logits`: [len(sampling), vocab]. None in place of tokens when a sequence's logits are not finite.
        """
        masks = self._grammars.collect(self._between_layers)
        alive = [
            (row, w.sequence)
            for row, w in enumerate(sampling)
            if w.sequence.state is not State.FINISHED
            and (w.sequence.params.grammar is None or (w.sequence.key, w.sequence.choice) in masks)
        ]
        rows = [
            (row, SampleRow(s.params, s.prompt, s.output, choice, masks.get((s.key, s.choice))))
            for row, s in alive
            for choice in range(s.choice, s.choice + s.num_choices)
        ]
        if not rows:
            return
        index = [row for row, _ in rows]
        picked = logits if index == list(range(len(sampling))) else logits[index]
        sample_rows = [row for _, row in rows]
        tokens = sample(picked, sample_rows, self._engine.model.eos_token_ids)
        logprobs = sampled_logprobs(picked, sample_rows, tokens)
        at = 0
        for _, sequence in alive:
            until = at + sequence.num_choices
            mine = tokens[at:until]
            yield sequence, None if NOT_FINITE in mine else mine, logprobs[at:until]
            at = until


def _chunk(work: Work) -> Chunk:
    sequence, params = work.sequence, work.sequence.params
    targets = prompt_targets(params, sequence.prompt, work.start, work.count) if sequence.scoring else ()
    return Chunk(
        sequence.tokens[work.start : work.start + work.count], work.start, sequence.table.blocks, work.samples,
        targets, params.prompt_logprobs or 0, min(max(len(sequence.prompt) - work.start, 0), work.count),
    )  # fmt: skip
