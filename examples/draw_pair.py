"""Draws the head that looks most from one word of a text to another.

python examples/draw_pair.py "The animal slept because it was tired" it animal pair.svg
"""

import sys
from pathlib import Path

import torch

import polyhead as ph
from polyhead.viewer.drawing import draw_heads


def main(text: str, query: str, key: str, out: str) -> None:
    model = ph.load("smollm2")
    labels = ph.find_heads(model, [text], pair=(query, key))
    best = next((label for label in labels if label.label == "pair"), None)
    if best is None:
        sys.exit(f"no head looks from {query!r} to {key!r}")
    ids = torch.tensor([model.tokenizer.encode(text)])
    with ph.probe(model, layers=[best.layer]) as seen, torch.inference_mode():
        model(ids)
    pieces = model.tokenizer.pieces(ids[0].tolist())
    picture = draw_heads(seen, {best.layer: [best.head]}, pieces, title=text)
    Path(out).write_text(picture, encoding="utf-8")
    print(f"{best.layer}.{best.head}: {best.score:.2f} from {query!r} to {key!r}; drawn in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:5])
