"""Context parallelism as arithmetic: which way suits a shape, which chunks of a sequence a rank holds. Without torch.

A sequence is cut into equal chunks. Under "gather" and "ring" there are 2 * cp of them and rank r holds chunks r and
2 * cp - 1 - r (zigzag): under a causal mask the first part of a sequence has little to attend to and the last part
much, and so every rank has the same. Under "ulysses" rank r holds chunk r of cp: there every rank attends over the
whole sequence with some of the heads, and needs no balance.
"""

from __future__ import annotations

#: What a plan may say; "auto" takes one of the others by the shape.
CP_MODES = ("auto", "gather", "ring", "ulysses")
#: The ways themselves, first the one that a search never leaves out.
CP_WAYS = ("ring", "gather", "ulysses")
#: From this many tokens on a rank the attention of one step outlasts the message around the ring (at 8 query heads
#: for each key-value head and 2,500 FLOP for each byte of the link), and gathered keys of all ranks grow large.
RING_TOKENS = 4096


def ulysses_fits(cp: int, num_heads: int, num_kv_heads: int, tp: int = 1) -> bool:
    """Return whether the heads of one tensor-parallel rank can be shared out over cp ranks.

    Query heads must come out even. Key-value heads are shared out, or, where they are fewer, each goes to several.

    Args:
        cp: ranks that share a sequence.
        num_heads: query heads of the whole model.
        num_kv_heads: key-value heads of the whole model.
        tp: ranks that share the heads.
    """
    heads, kv_heads = num_heads // tp, max(1, num_kv_heads // tp)
    return num_heads % (cp * tp) == 0 and heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)


def choose_cp_mode(mode: str, cp: int, num_heads: int, num_kv_heads: int, seq_len: int, tp: int = 1) -> str:
    """Return the way that a plan's `cp_mode` stands for: itself, or for "auto" the one that suits the shape.

    Ulysses where it sends no more than the others would: each rank sends its queries, keys, values and outputs once,
    while gather and ring take every other rank's keys and values. Else the ring, from RING_TOKENS tokens on a rank,
    and for less gather, whose calls are fewer. Sequences that are no multiple of 2 * cp have Ulysses alone.

    Args:
        mode: the plan's `cp_mode`.
        cp: ranks that share a sequence.
        num_heads: query heads of the whole model.
        num_kv_heads: key-value heads of the whole model.
        seq_len: tokens of a whole sequence.
        tp: ranks that share the heads.
    """
    if mode != "auto" or cp == 1:
        return "gather" if mode == "auto" else mode
    heads, kv_heads = num_heads // tp, max(1, num_kv_heads // tp)
    if ulysses_fits(cp, num_heads, num_kv_heads, tp):
        sent_kv_heads = max(kv_heads, cp)
        if seq_len % (2 * cp) or 2 * heads + 2 * sent_kv_heads <= cp * 2 * kv_heads:
            return "ulysses"
    return "ring" if seq_len >= RING_TOKENS * cp else "gather"


def num_chunks(mode: str, cp: int) -> int:
    """Return into how many equal chunks a sequence is cut; its length must be a multiple of that."""
    return cp if mode == "ulysses" else 2 * cp


def chunks_of(mode: str, cp: int, rank: int) -> tuple[int, ...]:
    """Return the numbers of the chunks that a rank of cp holds, in order of the sequence.

    Args:
        mode: "gather", "ring" or "ulysses".
        cp: ranks that share a sequence.
        rank: on the axis cp.
    """
    return (rank,) if mode == "ulysses" else (rank, 2 * cp - 1 - rank)


def sent_bytes(mode: str, *, cp: int, tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int,
               sum_itemsize: int, backward: bool) -> int:  # fmt: skip
    """Bytes that the ledger counts for one layer's attention on one rank, in forward or in backward.

    tokens: batch * sequence / cp, those of one rank. sum_itemsize: of the format in which the gradients of keys and
    values are summed. The ledger counts the larger side of each collective: an all_gather's result, a
    reduce_scatter's input.
    Forward: ring (cp - 1) messages of keys and values; gather all ranks' keys and values; ulysses queries, keys,
    values and outputs. Backward: the same again, and the gradients of keys and values back (ring, gather).
    """
    kv = 2 * tokens * num_kv_heads * head_dim
    if mode == "ulysses":
        sent_kv_heads = num_kv_heads if num_kv_heads % cp == 0 else cp
        return tokens * head_dim * (2 * num_heads + 2 * sent_kv_heads) * itemsize
    messages = cp if mode == "gather" else cp - 1
    return messages * kv * (itemsize + (sum_itemsize if backward else 0))
