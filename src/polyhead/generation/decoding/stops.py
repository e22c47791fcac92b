"""Where a stream of text ends: stop texts that may begin in one piece and end in a later one."""

from __future__ import annotations

from collections.abc import Sequence

from polyhead._utils.checks import shown


class StopTexts:
    """Passes text on until one of the stop texts appears; never lets a part of one through.

    Args:
        stops: the texts, or one; generation ends before the first that appears.

    Raises:
        ValueError: an empty stop text, which would end everything at once.
        TypeError: neither text nor texts.

    Attributes:
        found: whether a stop text has appeared.
    """

    def __init__(self, stops: str | Sequence[str] | None) -> None:
        if not (stops is None or isinstance(stops, str | Sequence)):
            raise TypeError(f"stop must be a string or a list of strings: got {shown(stops)}")
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops or ())
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(
                    f"stop must be a text of at least one character: got {shown(stop)}"
                )
        self.found = False
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that is safe to show now; holds back what may be the beginning of a stop."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
