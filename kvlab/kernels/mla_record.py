"""What does the decode kernel tell the merge about a block of query columns? A record of eight words."""

import triton
import triton.language as tl

# Words of a record, int32; what is not named is zero.
RECORD = 8
_RECORD = tl.constexpr(RECORD)
# Pieces to merge; 0: the block is finished, -1: it is left to float32.
AT_PIECES = tl.constexpr(0)
# The share that has the first of them, and the request.
AT_SHARE = tl.constexpr(1)
AT_REQUEST = tl.constexpr(2)
# The request's query tokens, and which block of their columns this is.
AT_Q_FIRST = tl.constexpr(3)
AT_Q_COUNT = tl.constexpr(4)
AT_BLOCK = tl.constexpr(5)


@triton.jit
def record_at(records, at):
    """Where record `at` starts. `records` int32 [tokens * blocks a token, RECORD]."""
    return records + at.to(tl.int64) * _RECORD


@triton.jit
def put_record(
    records,
    pieces,
    share,
    r,
    q_first,
    q_count,
    block,
    blocks,
    BLOCKS: tl.constexpr,
    RAGGED_Q: tl.constexpr,
):
    """Write the record of a request's `block`, one of `blocks`; BLOCKS: records a query token has.

    Several query tokens in one block (RAGGED_Q) leave records unused: they say that there is nothing to do.
    """
    word = tl.arange(0, _RECORD)
    record = tl.where(word == AT_PIECES, pieces, 0)
    record = tl.where(word == AT_SHARE, share, record)
    record = tl.where(word == AT_REQUEST, r, record)
    record = tl.where(word == AT_Q_FIRST, q_first, record)
    record = tl.where(word == AT_Q_COUNT, q_count, record)
    record = tl.where(word == AT_BLOCK, block, record)
    at = q_first * BLOCKS + block
    tl.store(record_at(records, at) + word, record)
    if RAGGED_Q:
        at += blocks
        while at < (q_first + q_count) * BLOCKS:
            tl.store(record_at(records, at) + word, word * 0)
            at += blocks
