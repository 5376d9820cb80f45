"""The runner: what a step writes and returns, and that an aborted one leaves nothing behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model import LoadedModel
from pdserve.engine.runner import Chunk, Runner
from pdserve.transfer.errors import StepCancelled
from tests.engine.tiny_models import TinySequence, build, load, poisoned_cache, prompts, reference, step

BLOCKS = [5, 1, 8, 3, 11, 2]
PROMPT = prompts([17])[0]


@pytest.fixture
def loaded() -> LoadedModel:
    return load(build("llama"))


def run_to_end(runner: Runner, prompt: list[int], blocks: list[int], num_tokens: int) -> list[int]:
    sequence = TinySequence(prompt, blocks, chunk_tokens=6)
    while len(sequence.output) < num_tokens:
        step(runner, [sequence])
    return sequence.output


def test_layers_are_announced_in_order_and_their_kv_is_there_by_then(loaded: LoadedModel) -> None:
    cache = poisoned_cache(loaded, 12, 4)
    seen: list[tuple[int, list[bool]]] = []

    def on_layer(layer: int) -> None:
        written = [not torch.isnan(keys[BLOCKS[0]]).any().item() for keys in cache.keys]
        seen.append((layer, written))

    Runner(loaded, cache, on_layer).forward([Chunk(PROMPT[:4], 0, BLOCKS, False)])
    assert seen == [(layer, [other <= layer for other in range(4)]) for layer in range(4)]


def test_a_slab_gathered_while_later_layers_compute_is_that_of_the_finished_step(loaded: LoadedModel) -> None:
    """How prefill sends: from inside of the step."""
    cache = poisoned_cache(loaded, 12, 4)
    sent: list[memoryview] = []

    def slab_of(layer: int) -> memoryview:
        return cache.gather(range(layer, layer + 1), BLOCKS, 2, 7)[0]

    runner = Runner(loaded, cache, lambda layer: sent.append(slab_of(layer)))
    runner.forward([Chunk(PROMPT[:9], 0, BLOCKS, False)])
    assert [bytes(slab) for slab in sent] == [bytes(slab_of(layer)) for layer in range(4)]
    assert not any(torch.frombuffer(bytearray(slab), dtype=torch.float32).isnan().any() for slab in sent)


@pytest.mark.parametrize("cancelled_layer", range(4))
def test_a_cancelled_step_comes_out_unchanged_and_the_tokens_can_be_run_again(
    loaded: LoadedModel, cancelled_layer: int
) -> None:
    expected = reference(build("llama"), PROMPT, 6)
    error = StepCancelled("nobody wants it")
    armed = False

    def on_layer(layer: int) -> None:
        if armed and layer == cancelled_layer:
            raise error

    runner = Runner(loaded, poisoned_cache(loaded, 12, 4), on_layer)
    sequence = TinySequence(PROMPT, BLOCKS, chunk_tokens=5)
    step(runner, [sequence])
    armed = True
    with pytest.raises(StepCancelled) as raised:
        step(runner, [sequence])
    assert raised.value is error
    armed = False
    assert run_to_end(runner, [7, 8, 9], [0, 4, 6], 3) == reference(build("llama"), [7, 8, 9], 3)
    while len(sequence.output) < 6:
        step(runner, [sequence])
    assert sequence.output == expected


def test_logits_come_only_for_chunks_that_sample_in_their_order(loaded: LoadedModel) -> None:
    chunks = [
        Chunk([5, 6, 7], 0, [0], True),
        Chunk([9, 9], 0, [1], False),
        Chunk([11], 0, [2], True),
    ]
    logits = Runner(loaded, poisoned_cache(loaded, 12, 4)).forward(chunks)
    assert logits.shape == (2, loaded.vocab_size)
    assert logits.dtype == torch.float32
    for row, chunk in enumerate([chunks[0], chunks[2]]):
        alone = Runner(loaded, poisoned_cache(loaded, 12, 4)).forward([chunk])
        torch.testing.assert_close(logits[row], alone[0], rtol=0, atol=1e-5)


def test_a_step_without_samples_returns_no_rows(loaded: LoadedModel) -> None:
    logits = Runner(loaded, poisoned_cache(loaded, 12, 4)).forward([Chunk([5, 6], 0, [3], False)])
    assert logits.shape == (0, loaded.vocab_size)


def test_only_the_slots_of_the_chunk_are_written(loaded: LoadedModel) -> None:
    cache = poisoned_cache(loaded, 12, 4)
    runner = Runner(loaded, cache)
    runner.forward([Chunk(PROMPT[:6], 0, BLOCKS, False)])
    for tensor in (*cache.keys, *cache.values):
        written = ~torch.isnan(tensor).flatten(2).any(2)
        assert written.nonzero().tolist() == [[1, 0], [1, 1], [5, 0], [5, 1], [5, 2], [5, 3]]


def test_a_chunk_past_its_blocks_is_a_bug_not_a_write(loaded: LoadedModel) -> None:
    cache = poisoned_cache(loaded, 12, 4)
    with pytest.raises(AssertionError, match="2 blocks for 9 tokens"):
        Runner(loaded, cache).forward([Chunk(PROMPT[:9], 0, [1, 2], True)])
    assert torch.isnan(cache.keys[0]).all()


def test_a_cache_of_another_model_is_refused(loaded: LoadedModel) -> None:
    other = load(build("qwen3"))
    with pytest.raises(AssertionError, match="another model"):
        Runner(loaded, KVCache(other.layout, 4, 4))


def test_kv_computed_by_one_runner_continues_in_another_with_other_blocks(loaded: LoadedModel) -> None:
    """What the transfer between the pools rests on."""
    expected = reference(build("llama"), PROMPT, 8)
    prefill_cache, decode_cache = poisoned_cache(loaded, 12, 4), poisoned_cache(loaded, 12, 3)
    first = Runner(loaded, prefill_cache).forward([Chunk(PROMPT, 0, BLOCKS, True)])
    decode_blocks = [9, 0, 4, 7, 1, 10, 2, 11, 3]
    for layer in range(loaded.layout.num_layers):
        layers = range(layer, layer + 1)
        slab, _ = prefill_cache.gather(layers, BLOCKS, 0, len(PROMPT))
        decode_cache.scatter(layers, decode_blocks, 0, len(PROMPT), slab)
    second = load(build("llama"))
    sequence = TinySequence(PROMPT, decode_blocks, chunk_tokens=1, computed=len(PROMPT))
    sequence.output.append(int(first[0].argmax()))
    runner = Runner(second, decode_cache)
    while len(sequence.output) < 8:
        step(runner, [sequence])
    assert sequence.output == expected


def test_two_runners_of_one_process_do_not_mix(loaded: LoadedModel) -> None:
    other = load(build("qwen3"))
    runners = [Runner(model, poisoned_cache(model, 12, 4)) for model in (loaded, other)]
    sequences = [TinySequence(PROMPT, BLOCKS, chunk_tokens=6) for _ in runners]
    for _ in range(8):
        for runner, sequence in zip(runners, sequences, strict=True):
            step(runner, [sequence])
    assert [s.output for s in sequences] == [reference(build(name), PROMPT, 6) for name in ("llama", "qwen3")]


def test_a_dropped_runner_frees_its_model() -> None:
    loaded = load(build("llama"))
    runner = Runner(loaded, poisoned_cache(loaded, 4, 4))
    runner.forward([Chunk([5], 0, [0], True)])
    module = weakref.ref(loaded.module)
    del loaded, runner
    gc.collect()
    assert module() is None
