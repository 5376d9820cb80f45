"""The prefill pool. Life of a prompt here, by the queue it stands in:

    WAITING     accepted, holds nothing. The queue is short and bounded; past the bound the answer is Busy.
    COMPUTING   holds its blocks; its tokens run in chunks, several prompts to a step if the budget allows.
                As soon as a layer of a chunk has its KV, what decode lacks of it leaves as a slab.
    SENDING     first token sampled and sent; the last slabs and the handoff are still in our outbox.
    FINISHED    holds nothing.

    Prefill ─▶ WAITING ─▶ COMPUTING ─last chunk─▶ SENDING ─outbox empty─▶ FINISHED

`scheduler.py` is the only place where states change; `worker.py` is the loop; `peers.py` keeps the links to decode.
"""
