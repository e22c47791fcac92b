"""The same bits everywhere: what a row of a batch gives depends on its own tokens alone.

Sums of numbers depend on their order, and libraries choose it by the shape of a call, the number of
threads and the place of a number in memory. Within ``batch_invariant()`` every operation of torch
that polyhead's layers leave to it passes here, and goes one of six ways:

    exact          one rounding or none (additions, comparisons, copies): torch's own
    by element     functions such as exp, whose vectors and remainders round differently: in whole
                   vectors alone
    products       native code, which adds up every row in one order
    reductions     sums along a dimension, halved again and again: an order of its length alone
    additions      to places that may be the same: one after the other
    anything else  refused by name

Attention, norms and feed-forward networks go to native code without passing here, and attention by
rows (``ScoreMods.batch_invariant``). What batch-invariant kernels do on GPUs (Thinking Machines,
"Defeating nondeterminism in LLM inference", 2025), on a CPU.
"""

from polyhead.kernels.batch_invariant.mode import batch_invariant

__all__ = ["batch_invariant"]
