"""How fast polyhead is, as ratios in one run: ours, its peers and the machine's limit in turns.

A case (``case.Case``) is one piece of work with the ways of doing it. Its results are compared
first, then every way is measured in turns (``measure``), with what the machine could do at best
beside it (``limits``). ``routines`` lists the cases; ``results``, ``section`` and ``plot`` show
what was found.
"""

from polyhead.lab.benchmarks.case import Case, Contestant, Limit, Settings
from polyhead.lab.benchmarks.measure import Result, Sample, measure
from polyhead.lab.benchmarks.routines import ROUTINES, Routine, chosen

__all__ = [
    "ROUTINES",
    "Case",
    "Contestant",
    "Limit",
    "Result",
    "Routine",
    "Sample",
    "Settings",
    "chosen",
    "measure",
]
