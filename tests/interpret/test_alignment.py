"""Heads that map queries to keys: counted by hand, and the atom-mapping head of rxnmapper."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import byte_tokenizer, decoder

import polyhead as ph
from polyhead.interpret.alignment import alignment_score
from polyhead.interpret.probe import probe
from polyhead.interpret.tables import compare_texts

REACTIONS = [  # atoms with the same number are the same atom; as chemistry has it
    "[CH3:1][CH:2]([CH3:3])[SH:4].CN(C)C=O.F[c:5]1[n:6][cH:7][cH:8][cH:9][c:10]1[F:11]"
    ">>[CH3:1][CH:2]([CH3:3])[S:4][c:5]1[n:6][cH:7][cH:8][cH:9][c:10]1[F:11]",
    "[CH3:1][C:2](=[O:3])Cl.[NH2:4][CH2:5][c:6]1[cH:7][cH:8][cH:9][cH:10][cH:11]1"
    ">>[CH3:1][C:2](=[O:3])[NH:4][CH2:5][c:6]1[cH:7][cH:8][cH:9][cH:10][cH:11]1",
    "[CH3:1][C:2](=[O:3])O.[OH:4][CH2:5][CH2:6][CH3:7]"
    ">>[CH3:1][C:2](=[O:3])[O:4][CH2:5][CH2:6][CH3:7]",
    "[CH3:1][c:2]1[cH:3][cH:4][c:5](Br)[cH:6][cH:7]1.OB(O)[c:8]1[cH:9][cH:10][n:11][cH:12][cH:13]1"
    ">>[CH3:1][c:2]1[cH:3][cH:4][c:5](-[c:8]2[cH:9][cH:10][n:11][cH:12][cH:13]2)[cH:6][cH:7]1",
    "[CH3:1][O:2][c:3]1[cH:4][cH:5][c:6]([OH:7])[cH:8][cH:9]1.Br[CH2:10][CH2:11][CH3:12]"
    ">>[CH3:1][O:2][c:3]1[cH:4][cH:5][c:6]([O:7][CH2:10][CH2:11][CH3:12])[cH:8][cH:9]1",
    "CC(C)(C)OC(=O)[NH:1][CH2:2][CH2:3][c:4]1[cH:5][cH:6][cH:7][cH:8][n:9]1.Cl"
    ">>[NH2:1][CH2:2][CH2:3][c:4]1[cH:5][cH:6][cH:7][cH:8][n:9]1",
    "[CH3:1][O:2][c:3]1[cH:4][cH:5][c:6]([N+:7](=O)[O-])[n:8][cH:9]1"
    ">>[CH3:1][O:2][c:3]1[cH:4][cH:5][c:6]([NH2:7])[n:8][cH:9]1",
    "[CH3:1][CH2:2][OH:3].Br[CH2:4][CH2:5][C:6]#[N:7]>>[CH3:1][CH2:2][O:3][CH2:4][CH2:5][C:6]#[N:7]",
]
TOKEN = re.compile(r"\[[^\]]+]|Br?|Cl?|>>|.")
ATOM = re.compile(r"\[([A-Za-z]+?)(?:H\d?)?([+-])?:(\d+)]")


def _alignment(reaction: str, vocabulary: dict[str, int]) -> ph.Alignment:
    """The tokens of a reaction without its numbers, and where each atom of the product was."""
    words, numbers = ["[CLS]"], [0]
    for token in TOKEN.findall(reaction):
        atom = ATOM.fullmatch(token)
        words.append(token if atom is None else f"[{atom[1]}{atom[2]}]" if atom[2] else atom[1])
        numbers.append(0 if atom is None else int(atom[3]))
    words.append("[SEP]")
    arrow = words.index(">>")
    was = {number: place for place, number in enumerate(numbers[:arrow]) if number}
    keys = {place: [was[n]] for place, n in enumerate(numbers) if n and place > arrow}
    atoms = tuple(i for i in range(1, arrow) if words[i][0] == "[" or words[i].isalpha())
    return ph.Alignment(torch.tensor([vocabulary[word] for word in words]), keys, atoms)


@pytest.fixture(scope="module")
def rxnmapper() -> tuple[Any, list[ph.Alignment]]:
    """The ALBERT of rxnmapper, run by transformers on polyhead, and the reactions."""
    spec = importlib.util.find_spec("rxnmapper")
    if spec is None or spec.origin is None:
        pytest.skip("the model package rxnmapper is not installed")
    from transformers import AlbertModel

    from polyhead.integrations import transformers as integration

    folder = Path(spec.origin).parent / "models/transformers/albert_heads_8_uspto_all_1310k"
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = {word: number for number, word in enumerate(words)}
    name = integration.register()
    model = AlbertModel.from_pretrained(folder, attn_implementation=name).eval()
    return model, [_alignment(reaction, vocabulary) for reaction in REACTIONS]


@pytest.mark.model
def test_rxnmappers_layer_10_head_5_maps_the_atoms_of_reactions(
    rxnmapper: tuple[Any, list[ph.Alignment]],
) -> None:
    model, reactions = rxnmapper
    labels = ph.find_heads(model, [], alignments=reactions)
    scores = {(e.layer, e.head): e.score for e in labels if e.label == "alignment"}
    assert scores[10, 5] > 0.98
    # Its twelve layers share their weights: whichever is asked, it is head 5 that maps.
    assert {head for _, head in scores} == {5}
    perfect = [float(alignment_score(model, each)[10, 5]) == 1.0 for each in reactions]
    assert sum(perfect) >= 7
    assert len(perfect) == 8


def test_alignment_score_counts_the_queries_whose_largest_weight_is_right() -> None:
    model = decoder()
    ids = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(3))
    keys = {4: [1, 2], 9: [3], 11: [0, 5]}
    among = (0, 1, 2, 3, 5)
    with probe(model) as seen, torch.no_grad():
        model(ids[None])
    for chosen in ((), among):
        found = alignment_score(model, ph.Alignment(ids, keys, chosen))
        as_row = alignment_score(model, ph.Alignment(ids[None], keys, chosen))
        assert torch.equal(found, as_row)
        for layer, view in enumerate(seen):
            for head, rows in enumerate(view.rows()[0]):
                places = list(chosen) or list(range(12))
                best = {query: places[int(rows[query, places].argmax())] for query in keys}
                right = sum(best[query] in keys[query] for query in keys)
                assert float(found[layer, head]) == pytest.approx(right / 3)


def test_an_alignment_outside_its_text_is_refused() -> None:
    with pytest.raises(ph.InputError, match="0 to 3: got 4"):
        ph.Alignment(torch.arange(4), {1: [4]})
    with pytest.raises(ph.InputError, match="at least one query"):
        ph.Alignment(torch.arange(4), {})


def test_statistics_are_compared_text_by_text() -> None:
    model = ph.LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()
    texts = ["one text", "another, longer text", "a third"]
    table = compare_texts(model, texts)
    for number, text in enumerate(texts):
        with probe(model) as seen, torch.no_grad():
            model(torch.tensor([model.tokenizer.encode(text)]))
        for name in ("entropy", "mean_distance", "induction"):
            wanted = torch.stack([getattr(view.summary(), name) for view in seen])
            torch.testing.assert_close(table.by_text[name][number], wanted)
    entropy = table.by_text["entropy"]
    torch.testing.assert_close(table.difference("entropy", 0, 2), entropy[2] - entropy[0])
    torch.testing.assert_close(table.mean("entropy"), entropy.mean(0))
    as_ids = compare_texts(model, [torch.tensor(model.tokenizer.encode(text)) for text in texts])
    torch.testing.assert_close(as_ids.by_text["entropy"], entropy)
    with pytest.raises(ph.InputError, match="no tokenizer"):
        compare_texts(model.transformer, texts)
    with pytest.raises(ph.InputError, match="at least one text"):
        compare_texts(model, [])
