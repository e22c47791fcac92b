"""Which source token each token of a translation reads: a table, JSON, or a picture.

The decoder reads the tokens that it wrote once more under a probe, so that a translation without
--align is not slowed down.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from polyhead._utils.texts.labels import head_name, isolated, label
from polyhead.cli.encoding import plain
from polyhead.cli.terminal import console, plain_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polyhead.generation import Generation, TextToText
    from polyhead.interpret.source_alignment import SourceAlignment

ABOVE = 0.8
"""Heads with this fraction of the best score are used: in a translation, others point elsewhere."""

_BAR_CELLS = 10
_HEADS = 6
"""Heads that the terminal names; JSON has them all."""


@dataclass(frozen=True)
class Aligned:
    """A text that was written, and what each of its tokens read.

    Attributes:
        target: What each new token says, end of text included.
    """

    source: list[str]
    target: list[str]
    found: SourceAlignment

    @classmethod
    def of(
        cls, model: TextToText, text: str, made: Generation, arguments: Mapping[str, Any]
    ) -> Aligned:
        """The alignment of what ``model.generate(text, **arguments)`` made."""
        import torch

        from polyhead.interpret.source_alignment import align

        source, start = model.both_ids(text, **arguments)
        ids = torch.tensor(source, device="cpu"), [*start, *made.ids]
        found = align(model, *ids, prompt=len(start), above=ABOVE)
        return cls(
            model.source_tokenizer.pieces(source), model.tokenizer.pieces(list(made.ids)), found
        )

    def as_data(self) -> dict[str, Any]:
        """The alignment as data, for JSON."""
        found = self.found
        return {
            "source_tokens": self.source,
            "target_tokens": self.target,
            "sources": found.sources.tolist(),
            "weights": [[round(weight, 6) for weight in row] for row in found.weights.tolist()],
            "heads": [
                {"layer": layer, "head": head, "score": float(found.scores[layer, head])}
                for layer, head in found.heads
            ],
        }

    def show(self) -> None:
        """Prints a line for each new token, and the heads that were used."""
        table = plain_table("written", "reads", "weight", "", right=["weight"])
        for token, row in zip(self.target, self.found.weights, strict=True):
            key = int(row.argmax())
            bar = "█" * round(_BAR_CELLS * float(row[key]))
            table.add_row(
                Text(isolated(label(token))),
                Text(f"{isolated(label(self.source[key]))} ({key})"),
                f"{float(row[key]):.3f}",
                Text(plain(bar), style="cyan"),
            )
        screen = console()
        screen.print(table)
        heads = self.found.heads
        named = ", ".join(
            f"{head_name(layer, head)} {float(self.found.scores[layer, head]):.2f}"
            for layer, head in heads[:_HEADS]
        )
        more = f" and {len(heads) - _HEADS} more" if len(heads) > _HEADS else ""
        screen.print(
            Text(
                f"The mean of {len(heads)} cross-attention head{'s' if len(heads) > 1 else ''} "
                f"that align best on this text (layer.head, score up to 1): {named}{more}",
                style="dim",
            )
        )

    def draw(self, out: Path, title: str) -> None:
        """Writes the picture."""
        from polyhead._utils.atomic_write import write_file
        from polyhead.viewer.drawing import draw_alignment

        picture = draw_alignment(self.found.weights, self.source, self.target, title=title)
        write_file(out, picture)
