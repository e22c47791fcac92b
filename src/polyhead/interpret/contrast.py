"""Which heads tell two readings of a sentence apart, and which only seem to.

A head that looks from *it* to *animal* in "… because it was too tired" need not have found what
*it* means: it may look at the subject. So the sentence is read twice, with one word changed that
changes the answer (*tired*, *wide*), and over several such pairs:

    look      weight of the query on the first key word less that on the second
    move      look in text a less look in text b
    control   look in text a less look in another text that has the same answer as a

A head tells the readings apart where its mean move stands out among all heads' when the two texts
of each pair are swapped at random, and where it is larger than the control's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_int
from polyhead.errors import InputError
from polyhead.interpret.ablation import leave_one_out
from polyhead.interpret.heads import TokenizedText, WordPair, find_pair
from polyhead.interpret.tables import aligned, run_ids, tokenized
from polyhead.models.parts import device_of, transformer_of

_FEWEST = 6
"""Pairs: with fewer, a twentieth of the 2ⁿ ways to swap them is less than the two extreme ones."""

_ALL_SWAPS = 12
"""Pairs up to which all 2ⁿ ways to swap them are tried."""


@dataclass(frozen=True)
class ContrastedHead:
    """How far one head tells the two readings apart.

    Attributes:
        layer: Index of the layer, from 0.
        head: Index of the query head, from 0.
        move: Mean over the pairs; positive where the head follows the answer.
        low: Lower end of the 95 % interval of the mean (bootstrap over pairs).
        high: Upper end of it.
        control: Mean size of the control's move; NaN without controls.
        p: Share of random swaps in which some head's mean is as far from 0 as this one's.
        found: Whether p < 0.05 and, with controls, the whole interval of |move| − |control| is
            above 0.
    """

    layer: int
    head: int
    move: float
    low: float
    high: float
    control: float
    p: float
    found: bool


@dataclass(frozen=True)
class Contrast:
    """What every head, and the model without it, makes of pairs of texts.

    Attributes:
        layers: Numbers of the layers.
        moves: ``[pairs, layers, heads]`` of the attention, from −2 to 2; NaN where a layer has
            fewer heads than another.
        controls: The same of the control texts; None without any.
        answers: ``[pairs]`` the model's own move: of a decoder the logit of the first word less
            that of the second after the last token, of an encoder the same difference of the
            cosines between the outputs of the query and of the words.
        lost: ``[pairs, layers, heads]`` how much of ``answers`` goes with the head; None where
            nothing was ablated.
        draws: Bootstrap samples of an interval.
        seed: Seed of these and of random swaps.
    """

    layers: tuple[int, ...]
    moves: Tensor
    controls: Tensor | None
    answers: Tensor
    lost: Tensor | None
    draws: int
    seed: int

    def attention(self) -> list[ContrastedHead]:
        """All heads by how far their attention moves, the farthest first."""
        return self._ranked(self.moves, self.controls)

    def ablation(self) -> list[ContrastedHead]:
        """All heads by how much of the model's answer goes with them, the most first.

        The controls are texts for the attention, so ``control`` is NaN.

        Raises:
            InputError: ``contrast`` ran with ``ablation=False``.
        """
        if self.lost is None:
            raise InputError("contrast ran with ablation=False: nothing was ablated")
        return self._ranked(self.lost, None)

    def answer(self) -> tuple[float, float, float]:
        """The model's own mean move, and the ends of its 95 % interval."""
        low, high = self._interval(self.answers)
        return float(self.answers.mean()), float(low), float(high)

    def _ranked(self, moves: Tensor, controls: Tensor | None) -> list[ContrastedHead]:
        mean, (low, high), chance = moves.mean(0), self._interval(moves), self._chance(moves)
        control = torch.full_like(mean, torch.nan)
        beyond = torch.ones_like(mean)
        if controls is not None:
            control = controls.abs().mean(0)
            beyond, _ = self._interval(moves * mean.sign() - controls.abs())
        found = (chance < 0.05) & (beyond > 0)
        places = (~mean.isnan()).nonzero().tolist()
        heads = [
            ContrastedHead(
                layer=self.layers[i],
                head=h,
                move=float(mean[i, h]),
                low=float(low[i, h]),
                high=float(high[i, h]),
                control=float(control[i, h]),
                p=float(chance[i, h]),
                found=bool(found[i, h]),
            )
            for i, h in places
        ]
        return sorted(heads, key=lambda head: (-abs(head.move), head.layer, head.head))

    def _interval(self, moves: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        count = len(moves)
        drawn = torch.randint(count, (self.draws, count), generator=generator, device="cpu")
        shares = nn.functional.one_hot(drawn, count).sum(1).to(moves) / count
        means = torch.einsum("dn,n...->d...", shares, moves)
        low, high = torch.quantile(means, torch.tensor([0.025, 0.975]).to(means), dim=0)
        return low, high

    def _chance(self, moves: Tensor) -> Tensor:
        """``[layers, heads]`` p, against the farthest head of each way to swap the pairs."""
        count = len(moves)
        if count <= _ALL_SWAPS:
            signs = torch.tensor(list(product((1.0, -1.0), repeat=count)))
        else:
            generator = torch.Generator().manual_seed(self.seed)
            signs = torch.randint(2, (self.draws, count), generator=generator, device="cpu")
            signs = torch.cat([torch.ones(1, count), signs * 2.0 - 1.0])
        swapped = torch.einsum("sn,nlh->slh", signs.to(moves), moves.nan_to_num()) / count
        farthest = swapped.abs().flatten(1).amax(1)
        # A swap of nothing, or of all pairs, must count as equal whatever the sum's order.
        least = moves.nan_to_num().mean(0).abs() - 1e-6
        return (farthest[:, None, None] >= least).float().mean(0)


def contrast(
    model: nn.Module,
    a: Sequence[str],
    b: Sequence[str],
    *,
    keys: Sequence[tuple[str, str]],
    query: str | None = None,
    controls: Sequence[str] = (),
    ablation: bool = True,
    draws: int = 1000,
    seed: int = 0,
) -> Contrast:
    """Which heads tell apart texts that differ in one place, and change which word is meant.

    A decoder sees nothing after a token: ask it after the clause that decides ("… because it was
    too tired. What was too tired? The"). An encoder can be asked at *it*.

        seen = ph.contrast(model, tired, wide, keys=[("animal", "street"), …], query="it")
        [head for head in seen.attention() if head.found]

    Args:
        model: As ``polyhead.load`` makes it: a decoder or an encoder with a tokenizer.
        a: At least 6 texts in which the first key word is meant.
        b: As many, each like that of ``a`` except for what makes the second key word the one meant.
        keys: For each pair the two words.
        query: The word that looks, at its last occurrence; None: the last token of the text.
        controls: For each pair one more text, in which another word stands at the same place and
            the first key word is meant; empty: swaps are the only control.
        ablation: Whether to run the model without each head in turn, by far the longest part.
        draws: Bootstrap samples of an interval, and random swaps where there are over 12 pairs.
        seed: Seed of both.

    Raises:
        InputError: Fewer than 6 pairs, lists of unlike lengths, a word that is not in its text or
            that the query cannot see, a model that is an encoder-decoder or has no tokenizer.
    """
    check_int("draws", draws, least=1, error=InputError)
    _check_texts(a, b, keys, controls)
    kind = transformer_of(model).config.kind
    if kind not in ("decoder", "encoder"):
        raise InputError(f"contrast needs a decoder or an encoder: got an {kind}")
    causal = kind == "decoder"
    runs = [
        [_Run(model, text, words, query, causal) for text, words in zip(texts, keys, strict=True)]
        for texts in (a, b, controls)
        if texts
    ]
    looks = [torch.stack([run.look for run in each]) for each in runs]
    lost = None
    if ablation:
        first, second = (torch.stack([run.lost() for run in each]) for each in runs[:2])
        lost = first - second
    answers = [torch.stack([run.answer() for run in each]) for each in runs[:2]]
    return Contrast(
        layers=runs[0][0].layers,
        moves=looks[0] - looks[1],
        controls=looks[0] - looks[2] if controls else None,
        answers=answers[0] - answers[1],
        lost=lost,
        draws=draws,
        seed=seed,
    )


def _check_texts(
    a: Sequence[str], b: Sequence[str], keys: Sequence[tuple[str, str]], controls: Sequence[str]
) -> None:
    for name, texts in (("a", a), ("b", b), ("controls", controls)):
        if isinstance(texts, str):
            raise InputError(f"{name} must be a list of texts: got one text, {texts[:40]!r}")
    if len(a) < _FEWEST:
        raise InputError(
            f"contrast needs at least {_FEWEST} pairs to tell a head from chance: got {len(a)}"
        )
    for name, count in (("b", len(b)), ("keys", len(keys)), ("controls", len(controls) or len(a))):
        if count != len(a):
            raise InputError(
                f"{name} must have one entry for each text of a, {len(a)}: got {count}"
            )
    for words in keys:
        if isinstance(words, str) or len(words) != 2:
            raise InputError(f"each entry of keys must be two words: got {words!r}")


class _Run:
    """One text: where its heads look, and what the model answers with and without each."""

    def __init__(
        self, model: nn.Module, text: str, words: tuple[str, str], query: str | None, causal: bool
    ) -> None:
        self.model, self.causal = model, causal
        tokens = tokenized(model, text)
        self.ids = torch.tensor([tokens.ids], device="cpu")
        self.pairs = [_pair(tokens, query, word, causal) for word in words]
        # The token that begins each word, as a decoder would write it.
        self.starts = [tokens.ids[pair.keys[0]] for pair in self.pairs]
        seen = run_ids(model, self.ids)
        self.layers = seen.layers
        at = self.pairs[0].query
        rows = [view.rows(queries=slice(at, at + 1))[0, :, 0] for view in seen]
        on = [aligned([row[:, list(pair.keys)].sum(-1) for row in rows]) for pair in self.pairs]
        self.look = on[0] - on[1]

    def answer(self) -> Tensor:
        with torch.no_grad():
            return self._metric()(self._output(self.ids.to(device_of(self.model))))[0].float().cpu()

    def lost(self) -> Tensor:
        """``[layers, heads]`` the answer less the answer without the head."""
        return self.answer() - aligned(leave_one_out(self.model, self.ids, self._metric()))

    def _output(self, ids: Tensor) -> Tensor:
        model: Any = transformer_of(self.model)
        output: Tensor = model(ids)
        return output

    def _metric(self) -> Callable[[Tensor], Tensor]:
        first, second = self.starts if self.causal else (0, 0)
        if self.causal:
            return lambda logits: logits[:, -1, first] - logits[:, -1, second]
        query = self.pairs[0].query

        def closer(hidden: Tensor) -> Tensor:
            words = [hidden[:, list(pair.keys)].mean(1) for pair in self.pairs]
            near = [nn.functional.cosine_similarity(hidden[:, query], word) for word in words]
            return near[0] - near[1]

        return closer


def _pair(tokens: TokenizedText, query: str | None, word: str, causal: bool) -> WordPair:
    """The query token and the tokens of one word."""
    if query is not None:
        return find_pair(tokens, query, word, causal=causal)
    real = [i for i, (start, stop) in enumerate(tokens.spans) if stop > start]
    keys = tuple(i for run in tokens.find(word) for i in run if i != real[-1])
    if not keys:
        raise InputError(f"{word!r} does not occur in the text before its last token")
    return WordPair(real[-1], keys, tokens.word(real[-1]), word)
