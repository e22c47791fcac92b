"""What a kernel is: something that can say what it cannot do, and does the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from polyhead.semantics import Call, State


class Kernel(ABC):
    """One way to compute attention."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for ``explain`` and ``doctor``: what this kernel is good at."""
    gathers: ClassVar[bool] = False
    """Whether it takes all keys and values in one piece each, so that some sources are copied."""

    checks_storage: ClassVar[bool] = False
    """Whether it looks itself whether storage holds what it reads."""

    def unavailable(self) -> str | None:
        """Why this kernel cannot run here and the command that would change it, or None."""
        return None

    @abstractmethod
    def refusal(self, call: Call) -> str | None:
        """The feature of ``call`` that this kernel cannot do, named, or None if it can do all."""

    @abstractmethod
    def run(self, call: Call) -> State:
        """Computes a call that ``refusal`` accepted; lse is set where ``call.needs_lse``."""
