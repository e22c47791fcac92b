"""rxnmapper's ALBERT equals transformers': logits, hidden states, and the head that maps atoms."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import polyhead as ph
from polyhead.checkpoints import Checkpoint, load_checkpoint
from polyhead.errors import CheckpointError

pytestmark = pytest.mark.model

LAYER, HEAD = 10, 5
# Acetyl chloride and benzylamine give an amide; a token for each letter.
REACTION = ["[CLS]", *"CC(=O)Cl.NCc1ccccc1".replace("Cl", "L"), ">>", *"CC(=O)NCc1ccccc1", "[SEP]"]
REACTION[REACTION.index("L")] = "Cl"


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = importlib.util.find_spec("rxnmapper")
    if spec is None or spec.origin is None:
        pytest.skip("the model package rxnmapper is not installed")
    return Path(spec.origin).parent / "models/transformers/albert_heads_8_uspto_all_1310k"


@pytest.fixture(scope="module")
def ours(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Its pickled weights as safetensors, beside its own config.json."""
    made = tmp_path_factory.mktemp("rxnmapper")
    shutil.copy(folder / "config.json", made)
    state = torch.load(folder / "pytorch_model.bin", "cpu", weights_only=True)
    save_file({name: tensor.clone() for name, tensor in state.items()}, made / "model.safetensors")
    return load_checkpoint(made)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AlbertForMaskedLM

    return AlbertForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def ids(folder: Path) -> torch.Tensor:
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return torch.tensor([[words.index(word) for word in REACTION]])


def test_pickled_weights_are_refused_with_the_way_out(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_checkpoint(folder)


@torch.no_grad()
def test_logits_and_hidden_states_equal_transformers(
    ours: Checkpoint, theirs: Any, ids: torch.Tensor
) -> None:
    assert ours.config.weights_of == (0,) * 12
    for got, wanted in (
        (ours.model(ids), theirs(ids).logits),
        (ours.model.hidden_states(ids), theirs.albert(ids).last_hidden_state),
    ):
        assert (got - wanted).abs().max() < 5e-5 * wanted.std()


@torch.no_grad()
def test_the_head_that_maps_atoms_maps_them_as_in_transformers(
    ours: Checkpoint, theirs: Any, ids: torch.Tensor
) -> None:
    wanted = theirs.albert(ids, output_attentions=True).attentions[LAYER][0, HEAD]
    with ph.probe(ours.model) as seen:
        ours.model(ids)
    weights = seen[LAYER].weights()[0, HEAD]
    torch.testing.assert_close(weights, wanted, atol=1e-5, rtol=1e-4)
    arrow = REACTION.index(">>")
    product = [i for i in range(arrow + 1, len(REACTION)) if REACTION[i].isalpha()]
    mapped = weights[product, :arrow].argmax(dim=1)
    assert torch.equal(mapped, wanted[product, :arrow].argmax(dim=1))
    # The amide's atoms come from the acid chloride and from benzylamine, each to its own kind.
    assert [REACTION[i] for i in mapped.tolist()] == [REACTION[i] for i in product]
