"""``polyhead look`` at an encoder-decoder: all three attentions of one translation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from polyhead._utils.texts.labels import head_name
from polyhead.cli.terminal import BOLD, console, plain_table, print_json, progress, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polyhead.generation import TextToText
    from polyhead.viewer.looks import Look

_ROWS = 10


@dataclass(frozen=True)
class Translation:
    """What was seen of a translation, for the terminal and as JSON.

    Attributes:
        look: The source through the model, and the text that was written.
    """

    look: Look

    @classmethod
    def of(
        cls, name: str, model: TextToText, text: str, arguments: Mapping[str, Any]
    ) -> Translation:
        """What ``model.generate(text, **arguments)`` writes, read once more under a probe."""
        from polyhead.viewer.looks import look_through

        with progress("writing, and looking at every head"):
            return cls(look_through(name, model, text, arguments, {}))

    @property
    def source(self) -> list[str]:
        """What each source token says."""
        return list(self.look.pieces[: self.look.own_tokens.start])

    @property
    def target(self) -> list[str]:
        """What each token says that the decoder read."""
        return list(self.look.pieces[self.look.own_tokens.start :])

    def heads(self) -> list[dict[str, Any]]:
        """Each head with the mean entropy of its rows, and how well one of cross-attention aligns.

        Those that align best come first, then the others in the model's order.
        """
        rows: list[dict[str, Any]] = []
        found = self.look.alignment
        for layer in self.look.layers:
            part, number = layer.part, layer.number
            for head, entropy in enumerate(layer.view.summary().entropy.tolist()):
                aligned = found if part == "cross" else None
                score = None if aligned is None else float(aligned.scores[number, head])
                rows.append(
                    {"part": part, "layer": number, "head": head, "alignment": score,
                     "entropy": entropy if entropy == entropy else None}
                )  # fmt: skip
        return sorted(rows, key=lambda row: -(row["alignment"] or 0.0))

    def as_data(self, place: Path | None, refusal: str | None) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "model": self.look.model,
            "text": self.look.text,
            "written": self.look.written,
            "source_tokens": self.source,
            "target_tokens": self.target,
            "heads": self.heads(),
            "page": None if place is None else str(place),
            "no_page_because": refusal,
        }

    def show(self) -> None:
        """Prints what was written and the heads that align best."""
        write_text(self.look.written + "\n", style=BOLD)
        headings = ("cross-attention", "aligns", "entropy")
        table = plain_table(*headings, right=headings)
        rows = [row for row in self.heads() if row["part"] == "cross"]
        for row in rows[:_ROWS]:
            entropy = "" if row["entropy"] is None else f"{row['entropy']:.2f}"
            name = head_name(f"C{row['layer']}", row["head"])
            table.add_row(name, f"{row['alignment']:.3f}", entropy)
        screen = console()
        screen.print(table)
        counts = ", ".join(
            f"{sum(layer.part == part for layer in self.look.layers)} layers of {words}"
            for part, words in (
                ("encoder", "the encoder"), ("decoder", "the decoder"),
                ("cross", "cross-attention"),
            )
        )  # fmt: skip
        screen.print(
            Text(
                f"{min(_ROWS, len(rows))} of {len(rows)} heads of cross-attention. aligns: 1 where "
                "every written token reads source tokens of its own. The model has "
                f"{counts}; the page shows all.",
                style="dim",
            )
        )

    def reason_against_page(self) -> str | None:
        """Why there can be no page of so many tokens."""
        from polyhead.viewer.look_page import stored_weights
        from polyhead.viewer.packing import FLOAT16_BYTES

        if stored_weights(self.look) * 2 > FLOAT16_BYTES:
            return f"{len(self.look.ids):,} tokens of source and text are too many for one page"
        return None

    def write_page(self, out: Path, language: str | None = None) -> None:
        """Writes the page with all heads."""
        from polyhead.viewer.look_page import page_data
        from polyhead.viewer.page import write

        look = self.look
        sources = [] if look.alignment is None else look.alignment.sources.tolist()
        data = page_data(
            look,
            facts={"source": f"{len(self.source)} tokens", "text": f"{len(self.target)} tokens"},
            focus=(len(look.ids) - 1, sources[-1]) if sources else None,
            language=language,
        )
        write(data, out)


def look_at_translation(
    name: str,
    model: TextToText,
    text: str,
    arguments: Mapping[str, Any],
    out: Path | None,
    *,
    languages: tuple[str, str | None],
    json: bool,
) -> None:
    """Looks at a text through an encoder-decoder, and says and writes what was found.

    Args:
        name: What the user calls the model.
        arguments: Arguments of ``model.generate``; None means what the model's files say.
        out: Where the page goes, if one is wanted.
        languages: Languages of the terminal and of the page, where None is the browser's.
        json: Whether all is said as JSON.
    """
    from polyhead._utils.texts import Texts

    said = {key: value for key, value in arguments.items() if value is not None}
    found = Translation.of(name, model, text, said)
    refusal = None if out is None else found.reason_against_page()
    place = None
    if out is not None and refusal is None:
        found.write_page(out, languages[1])
        place = out.resolve()
    if json:
        print_json(found.as_data(place, refusal))
        return
    found.show()
    if refusal is not None:
        print(f"No page is written: {refusal}")
    if place is not None:
        print("\n" + Texts(languages[0], "look")("page", place=place))
