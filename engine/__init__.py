"""What both pools share: one model, one paged cache, one sampler, one lifetime.

The life of a step, whichever pool runs it:

1. The pool's scheduler picks *chunks*: token ids of one sequence, the position of the first, and the blocks that
   `block_pool.py` gave the sequence. Nothing here decides what runs.
2. `runner.py` flattens the chunks into one batch and runs the model that `model.py` loaded. Attention of any model
   arrives at one function (`hook.py`), which writes the layer's KV into the blocks of `kv_cache.py`, tells the pool
   that this layer is done (prefill sends it away; both look for cancellations), and attends over the blocks.
3. Only the last positions of chunks that want a token reach the vocabulary; `sampler.py` picks from their logits,
   with noise that depends on (seed, choice, position) and nothing else.
   A request with a grammar may choose only what its automaton allows: `grammar.py` has that computed by a process of
   its own (`grammar_process.py`) while the model runs.
4. `request.py` says whether the new token ends its choice, and `lifetime.py` notes when.

`checkpoint.py` finds the files a model is loaded from and gives them a fingerprint: two workers exchange KV only
when theirs are equal. What a layer's KV looks like is never read from a config; `model.py` runs a few tokens and looks.
"""
