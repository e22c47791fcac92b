"""Does a head find what "it" means? Eight pairs of sentences in which one word decides.

    python examples/pronouns.py minilm smollm2 gemma3-270m

An encoder is asked at "it"; a decoder, which sees nothing after "it", at the end of a question that
follows the sentence. The third word of each row leaves the answer as the first: the control.
"""

import math
import sys

import polyhead as ph

SENTENCES = [
    ("animal", "street", "The animal didn't cross the street because it was too",
     "tired wide scared"),
    ("trophy", "suitcase", "The trophy didn't fit in the suitcase because it was too",
     "big small large"),
    ("ball", "table", "The ball broke the table because it was so", "heavy fragile hard"),
    ("truck", "bus", "The truck passed the bus because it was going so", "fast slow quickly"),
    ("fish", "worm", "The fish ate the worm because it was so", "hungry tasty greedy"),
    ("cat", "mouse", "The cat chased the mouse because it was so", "hungry tasty fierce"),
    ("knife", "bread", "The knife didn't cut the bread because it was too", "blunt stale dull"),
    ("car", "tunnel", "The car didn't enter the tunnel because it was too", "broad narrow wide"),
]  # fmt: skip


def texts(which: int, ask: bool) -> list[str]:
    """All sentences with one of their three words, each followed by its question if asked."""
    made = []
    for *_, sentence, words in SENTENCES:
        text = f"{sentence} {words.split()[which]}"
        question = f". What was {text.split('it was ')[1]}? The" if ask else ""
        made.append(text + question)
    return made


def main() -> None:
    for name in sys.argv[1:]:
        model = ph.load(name)
        ask = model.config.kind == "decoder"
        first, second, control = (texts(which, ask) for which in range(3))
        seen = ph.contrast(
            model,
            first,
            second,
            keys=[(one, other) for one, other, *_ in SENTENCES],
            query=None if ask else "it",
            controls=control,
        )
        print(f"{name}: the answer moves by %.2f [%.2f, %.2f]" % seen.answer())
        for what, heads in (("attention", seen.attention()), ("ablation", seen.ablation())):
            found, best = sum(head.found for head in heads), heads[0]
            beside = "" if math.isnan(best.control) else f", control {best.control:.2f}"
            print(
                f"  {what}: {found} of {len(heads)} heads found; the farthest is "
                f"{best.layer}.{best.head}: {best.move:+.2f} [{best.low:.2f}, {best.high:.2f}]"
                f"{beside}, p {best.p:.2f}"
            )


if __name__ == "__main__":
    main()
