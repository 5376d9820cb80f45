from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.router import (
    POLICIES,
    PREFIX_BLOCK_TOKENS,
    Ask,
    DecodeLoad,
    Pair,
    PrefillLoad,
    PrefixIndex,
    prefix_aware,
    prefix_chain,
    round_robin,
)


def decode(name: str, free: int = 10_000, inflight: int = 0) -> DecodeLoad:
    return DecodeLoad(name, free, inflight)


def prefill(name: str, queued: int = 0, inflight: int = 0) -> PrefillLoad:
    return PrefillLoad(name, queued, inflight)


def grid(decodes: list[DecodeLoad], prefills: list[PrefillLoad]) -> list[Pair]:
    return [Pair(d, p) for d in decodes for p in prefills]


def test_round_robin_visits_every_pair_equally_often():
    pairs = grid([decode("d0"), decode("d1")], [prefill("p0"), prefill("p1")])
    seen = Counter(round_robin(pairs, Ask(100, turn)) for turn in range(40))
    assert set(seen.values()) == {10}
    assert len(seen) == 4


def test_every_policy_shares_equal_pairs_over_requests():
    pairs = grid([decode("d0"), decode("d1")], [prefill("p0"), prefill("p1")])
    for policy in POLICIES.values():
        assert {policy(pairs, Ask(100, turn)) for turn in range(4)} == set(pairs)


def test_least_loaded_takes_the_emptier_decode_and_the_shorter_prefill_queue():
    best = Pair(decode("d1", inflight=1), prefill("p1", queued=10))
    pairs = [*grid([decode("d0", inflight=5)], [prefill("p0"), prefill("p1")]), best,
             Pair(best.decode, prefill("p0", queued=900))]  # fmt: skip
    assert all(POLICIES["least_loaded"](pairs, Ask(100, turn)) == best for turn in range(8))


def test_prefix_aware_sends_a_conversation_back_to_the_workers_that_hold_it():
    pairs = grid([decode("d0"), decode("d1")], [prefill("p0"), prefill("p1")])
    for turn in range(8):
        chosen = prefix_aware(pairs, Ask(1000, turn, {"d1": 960, "p0": 960}))
        assert (chosen.decode.worker, chosen.prefill and chosen.prefill.worker) == ("d1", "p0")


def test_prefix_aware_gives_a_cached_prefix_up_for_a_much_shorter_queue():
    pairs = grid([decode("d0")], [prefill("p0", queued=5000), prefill("p1")])
    chosen = prefix_aware(pairs, Ask(1000, 0, {"p0": 960}))
    assert chosen.prefill is not None
    assert chosen.prefill.worker == "p1"


def test_prefix_aware_avoids_a_decode_worker_without_room_for_the_prompt():
    pairs = grid([decode("full", free=100), decode("roomy", inflight=20)], [prefill("p0")])
    assert prefix_aware(pairs, Ask(1000, 0)).decode.worker == "roomy"


tokens = st.lists(st.integers(0, 50_000), max_size=400)


@given(tokens, tokens, tokens)
def test_chains_share_exactly_the_blocks_of_the_common_prefix(common: list[int], a: list[int], b: list[int]):
    first, second = [*common, 1, *a], [*common, 2, *b]
    one, two = prefix_chain(first, ""), prefix_chain(second, "")
    shared = len(common) // PREFIX_BLOCK_TOKENS
    assert one[:shared] == two[:shared]
    assert not set(one[shared:]) & set(two[shared:])
    assert len(one) == len(first) // PREFIX_BLOCK_TOKENS


def test_cache_salt_separates_equal_prompts():
    prompt = list(range(200))
    assert not set(prefix_chain(prompt, "a")) & set(prefix_chain(prompt, "b"))


def test_index_knows_what_it_learned_and_forgets_what_a_worker_turned_out_to_lack():
    index, chain = PrefixIndex(), prefix_chain(range(300), "")
    assert index.overlap_tokens(chain) == 0
    index.learn(chain)
    assert index.overlap_tokens(chain) == 4 * PREFIX_BLOCK_TOKENS
    index.correct(chain, 2 * PREFIX_BLOCK_TOKENS)
    assert index.overlap_tokens(chain) == 2 * PREFIX_BLOCK_TOKENS
    index.correct(chain, 0)
    assert index.overlap_tokens(chain) == 0


def test_index_is_bounded_and_drops_the_ends_of_old_prefixes_first():
    index = PrefixIndex(max_blocks=4)
    old, new = prefix_chain(range(192), ""), prefix_chain(range(1000, 1128), "")
    index.learn(old)
    index.learn(new)
    assert len(index) == 4
    assert index.overlap_tokens(new) == 128
    assert index.overlap_tokens(old) == 128, "its last block went, its beginning is still of use"
