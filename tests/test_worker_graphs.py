"""A decode worker whose steps are replayed: the same text, from sequences that come, go and are computed locally."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.engine.budget import WorstStep
from pdserve.engine.graphs import DecodeGraphs, call_again
from pdserve.transfer.messages import FirstTokens, Reserved
from tests.engine.tiny_models import build, prompts, reference
from tests.test_worker_pair import dispatch, settle
from tests.worker_rig import Rig, engine, reserve_message


@pytest.mark.parametrize("local", [False, True], ids=["from prefill", "aggregated"])
def test_replayed_steps_give_the_text_of_generate(local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[int] = []
    run = DecodeGraphs.run

    def counting(self: DecodeGraphs, chunks: list) -> object:
        replayed.append(len(chunks))
        return run(self, chunks)

    monkeypatch.setattr(DecodeGraphs, "run", counting)
    several = prompts([50, 3, 33, 21])
    rig = Rig(tmp_path)
    rig.engine = lambda *size: replace(engine(*size), worst=WorstStep(16, 3), capture=call_again)
    try:
        if local:
            decode = rig.start_decode(max_sequences=3)
            with rig.held_up(decode):
                for i, prompt in enumerate(several):
                    rig.live.add((f"r{i}", 1))
                    rig.send(decode, reserve_message(f"r{i}", prompt))
                for i in range(3):
                    rig.wait_for(Reserved, f"r{i}")
        else:
            prefill, decode = rig.pair(max_sequences=3)
            with rig.held_up(decode):
                for i in range(3):
                    dispatch(rig, f"r{i}", several[i], prefill, decode)
                for i in range(3):
                    rig.wait_for(FirstTokens, f"r{i}")
            dispatch(rig, "r3", several[3], prefill, decode)
        rig.until(lambda: all(rig.finished(f"r{i}") for i in range(4)), "all have finished")
        model = build("llama")
        assert [rig.tokens(f"r{i}")[0] for i in range(4)] == [reference(model, prompt, 10) for prompt in several]
        assert max(replayed) > 1
        settle(rig, decode)
    finally:
        rig.close()
