"""Steps straight through a model's layers: the same bits as by the model's own forward, and only where they are."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from pdserve.engine import straight
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.model import LoadedModel
from pdserve.engine.runner import Chunk, Runner
from tests.engine.tiny_models import build, load, poisoned_cache, prompts

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

STRAIGHT = ("llama", "qwen2", "qwen2-window", "qwen3", "mistral-window", "phi3")
NOT_STRAIGHT = ("mixtral", "gemma2", "gpt2")
BLOCKS = [[0, 3, 9, 1, 7, 4], [2, 10, 6, 8, 5, 11]]
STEP = [Chunk([5], 20, BLOCKS[0], True), Chunk([8, 9, 11], 20, BLOCKS[1], True)]


def run(runner: Runner) -> Tensor:
    """Two prompts of 20 tokens, and a step behind them."""
    for blocks, prompt in zip(BLOCKS, prompts([20, 20]), strict=True):
        runner.forward([Chunk(prompt, 0, blocks, False)])
    return runner.forward(STEP)


def runner_of(loaded: LoadedModel, warm: bool) -> Runner:
    runner = Runner(loaded, poisoned_cache(loaded, 24, 4))
    if warm:
        runner.warm_up(BlockPool(24, 4))
    return runner


@pytest.mark.parametrize("at_once_s", [0.0, straight.AT_ONCE_S, 100.0])
@pytest.mark.parametrize("family", STRAIGHT)
def test_a_step_gives_the_bits_of_the_models_own_forward(
    family: str, at_once_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(straight, "AT_ONCE_S", at_once_s)
    loaded = load(build(family))
    expected = run(runner_of(loaded, warm=False))
    runner = runner_of(loaded, warm=True)
    monkeypatch.setattr(runner, "_run", None)  # the way through the model
    assert torch.equal(run(runner), expected)


@pytest.mark.parametrize("family", NOT_STRAIGHT)
def test_other_models_go_their_own_way(family: str) -> None:
    loaded = load(build(family))
    expected = run(runner_of(loaded, warm=False))
    runner = runner_of(loaded, warm=True)
    assert runner.straight is None
    assert torch.equal(run(runner), expected)


def test_a_model_that_does_something_besides_is_not_run_straight() -> None:
    loaded = load(build("llama"))
    decoder = loaded.module.get_submodule("model")

    def scaled(module: object, args: object, output: dict[str, Tensor]) -> dict[str, Tensor]:
        output["last_hidden_state"] = output["last_hidden_state"] * 1.5
        return output

    decoder.register_forward_hook(scaled)
    expected = run(runner_of(loaded, warm=False))
    runner = runner_of(loaded, warm=True)
    assert runner.straight is None
    assert torch.equal(run(runner), expected)


@pytest.mark.parametrize("at_once_s", [0.0, 100.0])
def test_each_layer_is_announced_once_in_order_with_its_kv_written(
    at_once_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(straight, "AT_ONCE_S", at_once_s)
    runner = runner_of(load(build("llama")), warm=True)
    assert runner.straight is not None
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        written = runner.cache.keys[layer][BLOCKS[0][0], :3]
        assert written.isfinite().all()

    runner.on_layer = on_layer
    for plane in (*runner.cache.keys, *runner.cache.values):
        plane.fill_(torch.nan)
    runner.forward([Chunk([1, 2, 3], 0, BLOCKS[0], True)])
    assert seen == list(range(runner.cache.layout.num_layers))


def test_a_cancelled_step_may_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(load(build("llama")), warm=True)
    expected = run(runner)

    def cancel(layer: int) -> None:
        if layer == 2:
            raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(runner, "on_layer", cancel)
        with pytest.raises(InterruptedError):
            runner.forward(STEP)
    assert torch.equal(runner.forward(STEP), expected)
