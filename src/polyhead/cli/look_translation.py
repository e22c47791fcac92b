"""``polyhead look`` at an encoder-decoder: encoder, decoder and cross-attention of one translation.

The page shows the source and the text that was written behind each other as one row of tokens. A
layer of the encoder fills the part where source tokens look at each other, one of the decoder the
part of the written ones, cross-attention the part where written tokens look at the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from polyhead.generation import Generation, TextToText
    from polyhead.inspection.probe import Probe
    from polyhead.inspection.reading import SourceAlignment
    from polyhead.inspection.view import AttentionView

_ROWS = 10


@dataclass(frozen=True)
class Translation:
    """A text through an encoder-decoder, and all that its heads did.

    Attributes:
        name: Of the model, as the user wrote it.
        text: The source.
        made: What the model wrote.
        source: What each source token says.
        target: What each token says that the decoder read.
        seen: Every layer.
        found: Which source token each written token reads.
    """

    name: str
    text: str
    made: Generation
    source: list[str]
    target: list[str]
    seen: Probe
    found: SourceAlignment

    @classmethod
    def of(
        cls, name: str, model: TextToText, text: str, arguments: Mapping[str, Any]
    ) -> Translation:
        """What ``model.generate(text, **arguments)`` writes, read once more under a probe."""
        import torch

        from polyhead.cli.terminal import progress
        from polyhead.inspection.probe import probe
        from polyhead.inspection.reading import align

        with progress("writing"):
            made = model.generate(text, **arguments)
        source, start = model.both_ids(text, **arguments)
        target = [*start, *made.ids]
        device = next(model.parameters()).device
        with progress("looking at every head"), torch.no_grad():
            with probe(model) as seen:
                read = torch.tensor([target[:-1]], device=device)
                model(torch.tensor([source], device=device), read)
            found = align(model, torch.tensor(source), target, prompt=len(start))
        pieces = model.source_tokenizer.pieces(source), model.tokenizer.pieces(target[:-1])
        return cls(name, text, made, *pieces, seen, found)

    @property
    def parts(self) -> Iterator[tuple[str, int, AttentionView]]:
        """Each layer's part of the model, number in it, and view."""
        for part in ("encoder", "decoder", "cross"):
            for number, view in enumerate(getattr(self.seen, part)):
                yield part, number, view

    def heads(self) -> list[dict[str, Any]]:
        """Each head with the mean entropy of its rows, and how well one of cross-attention aligns.

        Those that align best come first, then the others in the model's order.
        """
        rows: list[dict[str, Any]] = []
        for part, layer, view in self.parts:
            for head, entropy in enumerate(view.summary().entropy.tolist()):
                score = float(self.found.scores[layer, head]) if part == "cross" else None
                rows.append(
                    {"part": part, "layer": layer, "head": head, "alignment": score,
                     "entropy": entropy if entropy == entropy else None}
                )  # fmt: skip
        return sorted(rows, key=lambda row: -(row["alignment"] or 0.0))

    def as_data(self, place: Path | None, refusal: str | None) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "model": self.name,
            "text": self.text,
            "written": self.made.text,
            "source_tokens": self.source,
            "target_tokens": self.target,
            "heads": self.heads(),
            "page": None if place is None else str(place),
            "no_page_because": refusal,
        }

    def show(self) -> None:
        """Prints what was written and the heads that align best."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        from polyhead.cli.terminal import BOLD, console, write_text
        from polyhead.inspection.labels import head_name

        write_text(self.made.text + "\n", style=BOLD)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="")
        for heading in ("cross-attention", "aligns", "entropy"):
            table.add_column(heading, justify="right")
        rows = [row for row in self.heads() if row["part"] == "cross"]
        for row in rows[:_ROWS]:
            entropy = "" if row["entropy"] is None else f"{row['entropy']:.2f}"
            name = head_name(f"C{row['layer']}", row["head"])
            table.add_row(name, f"{row['alignment']:.3f}", entropy)
        screen = console()
        screen.print(table)
        counts = ", ".join(
            f"{len(getattr(self.seen, part))} layers of {words}"
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
        """Why there can be no page of so many tokens or of such heads."""
        from polyhead.inspection.page import FLOAT16_BYTES

        tokens = len(self.source) + len(self.target)
        heads = {view.q.shape[1] for _, _, view in self.parts}
        if len(heads) > 1:
            return "its layers differ in their number of heads"
        if len(self.seen) * max(heads) * tokens**2 * 2 > FLOAT16_BYTES:
            return f"{tokens:,} tokens of source and text are too many for one page"
        return None

    def write_page(self, out: Path, language: str | None = None) -> None:
        """Writes the page with all heads.

        Raises:
            OSError: The file cannot be written.
        """
        from polyhead.inspection.page import HeadStatistics, PageData, write

        weights, names = self._maps()
        measured = HeadStatistics.from_weights(weights).named()
        words = {"encoder": "Encoder", "decoder": "Decoder", "cross": "Cross-attention"}
        data = PageData(
            title=f"{self.text} → {self.made.text}",
            model=self.name,
            tokens=[*self.source, *self.target],
            weights=weights,
            num_kv_heads=[view.k.shape[1] for _, _, view in self.parts],
            continuation="",
            statistics={name: measured[name] for name in ("entropy", "max_weight")},
            facts={"source": f"{len(self.source)} tokens", "text": f"{len(self.target)} tokens"},
            focus=(len(self.source) + len(self.target) - 1, int(self.found.sources[-1])),
            language=language,
            layer_names=[(f"{part[0].upper()}{number}", f"{words[part]} {number}")
                         for part, number in names],
        )  # fmt: skip
        try:
            write(data, out)
        except OSError as error:
            # The name in the error is that of a draft beside the page.
            raise OSError(error.errno, error.strerror or str(error), str(out)) from error

    def _maps(self) -> tuple[npt.NDArray[np.floating[Any]], list[tuple[str, int]]]:
        """``[layers, heads, S + T, S + T]`` weights, and the part and number of each layer."""
        import torch

        S, T = len(self.source), len(self.target)
        places = {
            "encoder": (slice(0, S), slice(0, S)),
            "decoder": (slice(S, S + T), slice(S, S + T)),
            "cross": (slice(S, S + T), slice(0, S)),
        }
        maps, names = [], []
        for part, number, view in self.parts:
            rows, columns = places[part]
            whole = torch.zeros(view.q.shape[1], S + T, S + T)
            whole[:, rows, columns] = view.rows()[0].float().cpu()
            maps.append(whole)
            names.append((part, number))
        return torch.stack(maps).numpy(), names


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
        model: The model.
        text: The source.
        arguments: Of ``model.generate``; None means what the model's files say.
        out: Where the page goes, if one is wanted.
        languages: Of the terminal and of the page, where None is the browser's.
        json: Whether all is said as JSON.
    """
    from polyhead.cli.terminal import print_json
    from polyhead.texts import Texts

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
