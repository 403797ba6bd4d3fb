"""Which pairs share a row: greedy packing of whole documents in shuffled order.

Index arrays only; ``packed_dataset`` fills the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

#: documents handled at once; bounds the memory of the arrays in between
PIECE = 1 << 20


def pack(sizes: np.ndarray, row_length: int, num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Order of the documents and the rows they make: (int64[E * M], int64[R, 2]).

    ``sizes`` int64[M] holds the tokens of each document. Every epoch passes over all
    M documents in a new order (``RandomState(seed)`` shuffles 0 .. M - 1 once per
    epoch). Documents are laid into a row while they fit into ``row_length`` tokens;
    the first that does not closes the row and begins the next one. A document longer
    than a row closes the row before it and is left out. Rows may straddle epochs. Row
    r holds documents ``order[rows[r, 0]:rows[r, 1]]``.

    There are as many epochs as it takes to close more than ``num_rows`` rows. The row
    that is still open at the end of the last epoch is not among them.

    [BUG] The trainers users come from search for ever when no document fits; here
    that is a ValueError.
    """
    if not len(sizes) or sizes.min() > row_length:
        shortest = f"; the shortest has {sizes.min()}" if len(sizes) else ""
        raise ValueError(f"none of {len(sizes)} pairs fits into a row of {row_length} tokens{shortest}")
    wanted = (num_rows + 1) * row_length / sizes[sizes <= row_length].mean()  # documents, roughly
    pieces, found = [], []
    seen = rows = 0  # documents and rows so far
    open_row = np.empty(0, np.int64)
    stop = None  # documents in whole epochs, once it is known how many epochs there are
    for piece in _stream(len(sizes), np.random.RandomState(seed), wanted):
        pieces.append(piece)
        order = np.concatenate([open_row, piece])
        first = seen - len(open_row)
        closed, begin = close_rows(sizes[order], row_length)
        found.append(closed + first)
        open_row = order[begin:]
        seen += len(piece)
        rows += len(closed)
        if stop is None and rows > num_rows:
            deciding = found[-1][num_rows - rows]  # row number num_rows, counted from 0
            stop = (int(deciding[1]) // len(sizes) + 1) * len(sizes)
        if stop is not None and seen >= stop:
            break
    bounds = np.concatenate(found)
    # a row is closed by the document behind it, which must belong to the epochs that count
    return np.concatenate(pieces)[:stop], bounds[bounds[:, 1] < stop]


def _stream(documents: int, rng: np.random.RandomState, wanted: float) -> Iterator[np.ndarray]:
    """The endless order of documents, in pieces of about PIECE; few epochs where ``wanted`` asks for few."""
    while True:
        epochs = np.tile(np.arange(documents, dtype=np.int64), (max(1, int(min(wanted, PIECE) // documents)), 1))
        for epoch in epochs:
            rng.shuffle(epoch)
        order = epochs.ravel()
        for start in range(0, len(order), PIECE):
            yield order[start:start + PIECE]
        wanted = max(wanted - len(order), documents)


def close_rows(sizes: np.ndarray, row_length: int) -> tuple[np.ndarray, int]:
    """Rows that documents of ``sizes`` int64[n >= 1] fill and close, and where the open one begins.

    int64[r, 2]: first document, and the one behind the last. The jump from each
    document to the first that no longer fits behind it is a search in the running
    sum, for all at once; then the rows are found by following the jumps.
    """
    ends = np.cumsum(sizes)
    jumps = np.searchsorted(ends, ends - sizes + row_length, side="right")
    overlong = np.flatnonzero(sizes > row_length)
    jumps[overlong] = overlong + 1  # no row, and the next one begins behind it
    table, at, begins = jumps.tolist(), 0, []
    while table[at] < len(table):
        begins.append(at)
        at = table[at]
    starts = np.array(begins, np.int64)
    starts = starts[sizes[starts] <= row_length]
    return np.stack([starts, jumps[starts]], axis=1), at
