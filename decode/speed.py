"""How fast this decode worker is, by its own steps; and what it follows for the prompts it computes itself.

A step costs what its running sequences cost, and some time for each token of a prompt that goes with them. Both are
measured all the time, so they hold for whatever machine, model, context and number of threads there is now.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.rate import PromptRate
from ..transfer.reports import Speed

ITL_BUDGET_STEPS = 2.0
LEAST_ITL_BUDGET_S = 0.03
EXPECTING_BLOCKS = 3
MEMORY = 0.8  # weight of earlier measurements in a running mean
LEAST_SHARE = 0.25  # a token costs at least this part of what those of its step cost on average


def itl_budget_s(step_s: float) -> float:
    """How long a step with a chunk may take where one without takes `step_s`, if nothing else was promised."""
    return max(ITL_BUDGET_STEPS * step_s, LEAST_ITL_BUDGET_S)


@dataclass(frozen=True)
class ChunkLimits:
    """`most_tokens`: of a prompt in one step. `block_size`: the least, so that whoever must be computed here is.
    `slo_s`: how long a step with a chunk may take; None: nothing was promised."""

    most_tokens: int
    block_size: int
    slo_s: float | None = None


class Speeds:
    """Measures steps, and says how much of a prompt goes into the next one."""

    def __init__(self, limits: ChunkLimits) -> None:
        self._limits = limits
        self._alone = PromptRate()
        self._steps_s: dict[int, float] = {}  # running sequences → mean length of their steps
        self._token_s = 0.0  # of a prompt, beside running sequences; 0: not known yet

    def measured(self, running: int, prompt_tokens: int, elapsed_s: float, helped_s: float = 0.0) -> None:
        """A step of so many running sequences and prompt tokens took so long. `helped_s`: of helpers, in it."""
        if not prompt_tokens:
            known = self._steps_s.get(running, elapsed_s)
            self._steps_s[running] = MEMORY * known + (1 - MEMORY) * elapsed_s
        elif prompt_tokens < self._limits.block_size:
            return  # the rest of a prompt: what it costs says little about others
        elif not running:
            self._alone.add(prompt_tokens, elapsed_s, helped_s)
        else:
            least_s = LEAST_SHARE * elapsed_s / (running + prompt_tokens)
            if running not in self._steps_s and self._token_s:  # what a token costs is known better than such a step
                left_s = max(elapsed_s - prompt_tokens * self._token_s, least_s * running)
                self._steps_s[running] = min(left_s, self.step_s(running) or left_s)
                return
            cost = max((elapsed_s - self.step_s(running)) / prompt_tokens, least_s)
            self._token_s = MEMORY * (self._token_s or cost) + (1 - MEMORY) * cost

    def step_s(self, running: int) -> float:
        """The length of a step without a prompt; an upper bound while so many sequences, or more, have not been seen
        together; 0 while nothing is known."""
        if running in self._steps_s or not running or not self._steps_s:
            return self._steps_s.get(running, 0.0)
        fewer = max((seen for seen in self._steps_s if seen < running), default=0)
        more = min((seen for seen in self._steps_s if seen > running), default=0)
        if not more:
            return self._steps_s[fewer] * running / fewer
        if not fewer:
            return self._steps_s[more]
        share = (running - fewer) / (more - fewer)
        return self._steps_s[fewer] * (1 - share) + self._steps_s[more] * share

    def chunk_tokens(self, running: int, *, expecting: bool = False) -> int:
        """The most tokens of a prompt for the next step: what the ITL budget affords beside running sequences; and also
        while one may be handed over any moment (`expecting`), since prefill is at its prompt. Never less than a block,
        or without company than a few: small parts take longer in all."""
        most, block_size = self._limits.most_tokens, self._limits.block_size
        if not running and not expecting:
            return most
        least = block_size if running else block_size * EXPECTING_BLOCKS
        return min(most, max(least, self._affordable_tokens(running)))

    def _affordable_tokens(self, running: int) -> int:
        step_s = self.step_s(running)
        left_s = (self._limits.slo_s or itl_budget_s(step_s)) - step_s
        return int(min(left_s / self._cost_s, self._limits.most_tokens)) if self._cost_s else 0

    def _keeps_slo(self, running: int, chunk: int) -> bool:
        """What a prompt costs is learned by computing some of one: until then, there only has to be time left."""
        if self._limits.slo_s is None or self.step_s(running) >= self._limits.slo_s:
            return False
        return not self._cost_s or self._affordable_tokens(running) >= chunk

    @property
    def _cost_s(self) -> float:
        """Of a prompt's token in a small chunk; 0 while nothing is known."""
        return self._token_s or 1 / (self._alone.per_s or float("inf"))

    def report(self, running: int, streaming_s: float, *, borrows: bool = False) -> Speed:
        """As the gateway is told. `borrows`: may neighbours' cores help while they are idle?"""
        company = max(running, 1)
        chunk = self.chunk_tokens(company)
        length_s = self.step_s(company) + chunk * self._cost_s
        return Speed(
            prompt_tokens_per_s=self._alone.per_s or 0.0,
            step_s=self.step_s(running),
            beside_tokens_per_s=chunk / length_s if self._cost_s else 0.0,
            keeps_slo=self._keeps_slo(company, chunk),
            streaming_s=streaming_s,
            lone_tokens_per_s=self._alone.lone_per_s(borrows=borrows) or 0.0,
        )
