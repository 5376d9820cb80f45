"""When a choice is over. Torch-free, so that schedulers and the gateway can use it."""

from __future__ import annotations

from collections.abc import Sequence

from ..transfer.messages import (
    Finish,
)
from ..transfer.sampling_params import SamplingParams


def finish_reason(params: SamplingParams, output: Sequence[int], eos_token_ids: frozenset[int]) -> Finish:
    """Why the choice is over now that its newest token is in `output`: "stop", "length", or "" to go on.

    The newest token stops the choice when it is one of `stop_token_ids`, or an EOS and `ignore_eos` is off, but never
    before `min_tokens` are out. "stop" wins over "length" when one token is both. Stop strings are the gateway's.
    Under a grammar an EOS always stops: it is chosen only where the text is complete, and nothing can follow it.
    """
    if not output:
        return ""
    token = output[-1]
    if params.grammar is not None and token in eos_token_ids:
        return "stop"
    is_stop = token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)
    if is_stop and len(output) >= params.min_tokens:
        return "stop"
    return "length" if len(output) >= params.max_tokens else ""
