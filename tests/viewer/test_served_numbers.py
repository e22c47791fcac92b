"""Every address of the server answers with the numbers of the look, and pages hold them."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import make_pair
from tiny import byte_tokenizer, decoder

import polyhead as ph
from browser.serving import TEXT, TOKEN, serving
from polyhead.errors import InputError
from polyhead.interpret.heads import TokenizedText
from polyhead.viewer.drawing import draw_alignment
from polyhead.viewer.look_page import page_data
from polyhead.viewer.looks import Look, look_at, look_through
from polyhead.viewer.next_token import NextToken
from polyhead.viewer.page import render
from polyhead.viewer.studio import Studio

Ask = Callable[..., tuple[Any, bytes]]


@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()


@pytest.fixture(scope="module")
def look(model: ph.LanguageModel) -> Look:
    return look_at("tiny", model, TokenizedText.of(model.tokenizer, TEXT), {})


@pytest.fixture(scope="module")
def ask(model: ph.LanguageModel) -> Iterator[Ask]:
    for address in serving(Studio(lambda name: model, ["tiny"]), TEXT):
        port = int(address.rstrip("/").rpartition(":")[2])

        def ask(path: str, body: Any = None, port: int = port) -> tuple[Any, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            content = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", f"/{TOKEN}/{path}", content)
            answer = connection.getresponse()
            found = answer.read()
            connection.close()
            assert answer.status == 200, found
            return answer, found

        yield ask


@pytest.fixture(scope="module")
def number(ask: Ask) -> int:
    return int(json.loads(ask("look", {"text": TEXT, "model": "tiny"})[1])["look"])


def test_each_address_answers_with_the_numbers_of_the_look(
    ask: Ask, number: int, look: Look
) -> None:
    product = look.product(1, 2, 12, 3)
    parts = (product.q, product.k, product.raw, product.scores)
    arrays = {
        "row/{}/1/2/12": look.row(1, 2, 12),
        "column/{}/1/2/3": look.column(1, 2, 3),
        "pair/{}/12/3": look.pair(12, 3),
        "region/{}/1/2": look.region(1, 2, slice(None), slice(None), 256),
        "region/{}/1/2?q0=4&q1=20&k0=1&k1=9&pixels=5": look.region(
            1, 2, slice(4, 20), slice(1, 9), 5
        ),
        "thumbnails/{}/1?pixels=9": look.thumbnails(1, 9),
        "thumbnails/{}/1?pixels=9&first=hidden": look.thumbnails(1, 9, False),
        "product/{}/1/2/12/3": torch.cat(parts).numpy(),
    }
    for path, wanted in arrays.items():
        answer, found = ask(path.format(number))
        shape = tuple(map(len, parts)) if path.startswith("product") else wanted.shape
        assert answer.headers["X-Shape"] == ",".join(map(str, shape)), path
        values = np.frombuffer(found, wanted.dtype).reshape(wanted.shape)
        assert np.array_equal(values, wanted), path
    for path, said in {
        "statistics/{}/1": look.statistics(1),
        "notable/{}": look.notable(),
        "way/{}/5": look.way(5),
    }.items():
        assert json.loads(ask(path.format(number))[1]) == json.loads(json.dumps(said)), path


def test_a_look_and_its_next_token_are_the_models(
    ask: Ask, number: int, look: Look, model: ph.LanguageModel
) -> None:
    header = json.loads(ask("look", {"text": TEXT, "model": "tiny"})[1])
    wanted = json.loads(json.dumps(look.header()))
    own = {"look", "seconds", "bytes"}
    assert {k: v for k, v in header.items() if k not in own} == {
        k: v for k, v in wanted.items() if k not in own
    }
    assert header["continuation"] == ""
    for heads in ([], [[1, 2]]):
        said = json.loads(ask(f"next/{number}", {"heads": heads})[1])["next"]
        assert len(said["tokens"]) == 64
        same = said == json.loads(json.dumps(look.next_json()))
        assert same == (not heads)
    written = json.loads(ask(f"write/{number}", {"max_new_tokens": 5})[1])["text"]
    assert written == model.generate(TEXT, max_new_tokens=5).text
    page = ask(f"page/{number}")[1].decode()
    assert page.count("<script") == render(page_data(look)).count("<script")


def test_a_page_holds_what_it_is_given_beside_the_look(look: Look) -> None:
    plain = page_data(look)
    assert (plain.continuation, plain.facts) == ("", {})
    given = page_data(look, continuation=" and more", facts={"speed": "fast"})
    assert (given.continuation, given.facts) == (" and more", {"speed": "fast"})
    assert plain.way is not None
    assert list(plain.way) == [look.way(token) for token in range(len(look.ids))]
    assert plain.vectors is not None
    for layer, vectors in zip(look.layers, plain.vectors, strict=True):
        assert np.array_equal(vectors.q, layer.view.call.q[0].numpy())


def test_a_look_through_a_translation_reads_what_was_written(tmp_path: Path) -> None:
    _, pair = make_pair("marian", tmp_path)
    arguments = {"max_new_tokens": 6}
    look = look_through("pair", pair, "ab ba", arguments, {})
    made = pair.generate("ab ba", **arguments)
    source, start = pair.both_ids("ab ba", **arguments)
    read = [*start, *made.ids][:-1]
    assert look.ids == (*source, *read)
    assert look.written == made.text
    assert list(look.own_tokens) == list(range(len(source), len(source) + len(read)))
    with torch.no_grad():
        logits = pair.transformer(torch.tensor([read]), encoder_ids=torch.tensor([source]))
    wanted = NextToken.of(logits[0, -1].float())
    studio = Studio(lambda name: pair, ["pair"])
    again = studio.look("ab ba", "pair")
    said = studio.next_token(again.number, {})
    assert said is not None
    assert again.next_token is not None
    assert said.tokens[0][0] == again.next_token.tokens[0][0]
    assert look.next_token is not None
    assert look.next_token.tokens[0][0] == wanted.tokens[0][0] == made.ids[-1]
    assert look.header()["continuation"] == (f" → {made.text}" if made.text else "")
    assert page_data(look).continuation == look.header()["continuation"]


def test_an_alignment_is_drawn_of_as_many_tokens_as_it_has_weights() -> None:
    weights = torch.tensor([[1.0, 0.6, 0.0], [0.0, 1.0, 0.4]])
    image = draw_alignment(weights, ["a", "b", "c"], ["x", "y"], title="pairs")
    for word in ("pairs", *"abcxy"):
        assert f">{word}<" in image
    # Shades are the nearest of 24 steps of the root.
    shades = [float(shade) for shade in re.findall('fill-opacity="([^"]+)"', image)]
    wanted = [round(24 * weight**0.5) / 24 for weight in (0.4, 0.6, 1.0)]
    assert shades == pytest.approx(wanted, abs=1e-3)
    with pytest.raises(
        InputError, match=r"weights must be \[3, 2\] for these tokens: got \[2, 3\]"
    ):
        draw_alignment(weights, ["a", "b"], ["x", "y", "z"])
