"""Who owns a KV block, and when: the life of a prompt's KV between the two pools.

1. The gateway asks decode to *reserve*: decode matches its prefix cache, allocates the rest of the
   prompt's blocks and owns them from then on (`receiver.py` keeps one entry per live reservation).
2. Prefill computes a chunk. Its own blocks stay its own: as layers finish, the sender copies the tokens decode lacks
   into a *slab* buffer (`slab.py`), summing them on the way, and hands that buffer to the link: a piece of a ring that
   is lent to this pair alone, of shared memory (`ring.py`) or of decode's device memory (`link_cuda_ipc.py`), or fresh
   memory for a frame (`links.py` knows who can use what). Small layers share a slab, since each slab wakes decode.
3. The slab travels with (request, attempt, reservation, layers, first token, count, checksum) in its header.
4. Decode's own loop checks the header against the live reservation and copies the slab into that reservation's blocks,
   summing it on the way; a wrong sum fails the attempt, before anybody could read them. Unknown, expired, repeated or
   old slabs are counted by reason and dropped.
5. The *handoff* follows the last slab on the same socket. Only when every layer is complete does the
   reservation become a running sequence; a gap fails the attempt at once.

No peer ever reads or writes another's blocks, and a piece of a ring is written again only when decode has acknowledged
it. Whatever ends an attempt (handoff, cancel, death of a peer, deadline) ends the reservation in exactly one place, and
that place frees its blocks.
"""
