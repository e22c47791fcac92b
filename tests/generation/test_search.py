"""Beam search and the rules of generation, token for token beside transformers' generate."""

from __future__ import annotations

import itertools

import pairs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import their_texts
from transformers import LlamaConfig, LlamaForCausalLM

from polyhead.caches import Quantized
from polyhead.checkpoints import load_checkpoint
from polyhead.generation.decoding.batch import continued
from polyhead.generation.decoding.options import GenerationOptions

VOCABULARY, EOS = 40, 7


class Letters:
    """A tokenizer whose token n is the character of that number."""

    class _Stream:
        def push(self, token):
            return chr(64 + token)

        def flush(self):
            return ""

    def stream(self):
        return self._Stream()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny Llama in transformers and here."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=EOS, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return theirs, load_checkpoint(folder).model


def prompts_of(seed: int, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    return [torch.randint(8, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def ours(model, prompts, cache=None, **options):
    wanted = GenerationOptions(**options)
    return continued(model, Letters(), prompts, wanted, frozenset([EOS]), (), cache or {})


def theirs_of(model, prompt, **options):
    return their_texts(model, prompt, eos=EOS, **options)


OPTIONS = {key: each for key, each in pairs.OPTIONS.items() if key != "forced_bos_token_id"}
VALUES = {**pairs.VALUES, "forced_eos_token_ids": (EOS,)}
OPTIONS["forced_eos_token_ids"] = st.just((EOS,))


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_gives_the_tokens_and_scores_of_transformers(pair, name):
    theirs, model = pair
    value = VALUES[name]
    prompt = prompts_of(5, 1)[0]
    options = {"max_new_tokens": 10, "num_beams": 3, "num_return_sequences": 2, name: value}
    found = ours(model, [prompt], **options)[0]
    wanted, scores = theirs_of(theirs, prompt, **options)
    assert [found.ids, *(each.ids for each in found.others)] == wanted
    torch.testing.assert_close([found.score, found.others[0].score], scores, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@settings(max_examples=25, deadline=None)
@given(
    beams=st.integers(1, 8),
    seed=st.integers(0, 99),
    count=st.integers(1, 3),
    new=st.integers(1, 12),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    cache=st.sampled_from([{}, {"kind": "paged", "page_size": 4}, {"kind": "dense"}]),
)
def test_a_batch_of_uneven_prompts_gives_each_the_tokens_of_transformers(
    pair, beams, seed, count, new, options, cache
):
    theirs, model = pair
    prompts = prompts_of(seed, count)
    options = {"max_new_tokens": new, "num_beams": beams, **options}
    found = ours(model, prompts, cache, **options)
    for prompt, one in zip(prompts, found, strict=True):
        assert one.ids == theirs_of(theirs, prompt, **options)[0][0]


@settings(max_examples=40, deadline=None)
@given(
    beams=st.integers(2, 4),
    seed=st.integers(0, 99),
    others=st.sets(st.integers(8, VOCABULARY - 1), max_size=24),
    options=st.fixed_dictionaries(
        {name: OPTIONS[name] for name in ("length_penalty", "early_stopping")}
    ),
)
def test_many_stop_tokens_leave_the_beams_of_transformers(pair, beams, seed, others, options):
    """The best continuations may all be stops; each still ranks as it does there."""
    theirs, model = pair
    stops, prompt = [EOS, *sorted(others)], prompts_of(seed, 1)[0]
    options = {"max_new_tokens": 8, "num_beams": beams, "num_return_sequences": beams, **options}
    wanted = GenerationOptions(**options)
    found = continued(model, Letters(), [prompt], wanted, frozenset(stops), (), {})[0]
    _, scores = theirs_of(theirs, prompt, eos_token_id=stops, **options)
    texts = [found, *found.others]
    torch.testing.assert_close([each.score for each in texts], scores, rtol=1e-4, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    beams=st.sampled_from([1, 1, 2, 4]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    options=st.fixed_dictionaries(
        {},
        optional={**pairs.DRAWS, "repetition_penalty": st.just(1.2)},
    ),
)
def test_the_same_draws_give_the_tokens_of_transformers(pair, seed, beams, temperature, options):
    theirs, model = pair
    prompt = prompts_of(seed % 50, 1)[0]
    options = {
        "max_new_tokens": 8, "num_beams": beams, "temperature": temperature, "seed": seed, **options
    }  # fmt: skip
    assert ours(model, [prompt], **options)[0].ids == theirs_of(theirs, prompt, **options)[0][0]


def test_beams_that_hold_every_text_find_the_best_of_all(pair):
    """Exhaustive search: with as many beams as there are beginnings, no text is lost."""
    _, model = pair
    words = (EOS, 8, 9, 10)
    banned = tuple(i for i in range(VOCABULARY) if i not in words)
    prompt = [11, 12, 13]
    found = ours(
        model, [prompt], max_new_tokens=3, num_beams=40, suppress_tokens=banned,
        early_stopping="never", length_penalty=0.7,
    )[0]  # fmt: skip
    best = (-1e9, ())
    for text in itertools.product(words, repeat=3):
        ids = text[: text.index(EOS) + 1] if EOS in text else text
        with torch.no_grad():
            log_p = model(torch.tensor([[*prompt, *ids]])).log_softmax(-1)[0]
        total = sum(float(log_p[len(prompt) - 1 + i, token]) for i, token in enumerate(ids))
        best = max(best, (total / len(ids) ** 0.7, ids))
    assert found.ids == best[1]
    assert found.score == pytest.approx(best[0], abs=1e-5)


def test_quantised_and_paged_caches_share_the_prompt(pair):
    _, model = pair
    prompt = prompts_of(1, 1)[0] * 6
    dense = ours(model, [prompt], num_beams=4, max_new_tokens=6)[0]
    paged = ours(model, [prompt], {"kind": "paged", "page_size": 4}, num_beams=4, max_new_tokens=6)[
        0
    ]
    assert paged.ids == dense.ids
    assert paged.stats.cache_bytes < dense.stats.cache_bytes
    codes = {"quantized": Quantized(8, 8, group=8, sink_tokens=2, recent=8)}
    assert len(ours(model, [prompt], codes, num_beams=4, max_new_tokens=6)[0].ids) >= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 0}, "num_beams must be a whole number from 1 to 65,536: got 0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "at most num_beams=2"),
        ({"num_return_sequences": 2}, "drawn one by one"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number, above 0"),
        ({"early_stopping": "now"}, "early_stopping must be True, False or 'never'"),
        ({"bad_words_ids": ((),)}, "at least one token"),
        ({"length_penalty": 1e4}, "length_penalty must be a finite number, at least -32 and"),
        ({"num_return_sequences": 10**9, "temperature": 1.0}, "num_return_sequences must be"),
        ({"exponential_decay_length_penalty": (1,)}, r"must be \(start, factor\): got \(1,\)"),
        ({"exponential_decay_length_penalty": 3}, r"must be \(start, factor\): got 3"),
        ({"remove_invalid_values": "x"}, "remove_invalid_values must be True or False: got 'x'"),
        ({"min_p": 2.0}, "min_p must be a finite number, at least 0 and at most 1"),
    ],
)
def test_impossible_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        GenerationOptions(**options)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bad_words_ids": ((8, 99),)}, "bad_words_ids must be tokens.*0 to 39: got 99"),
        ({"suppress_tokens": (40,)}, "suppress_tokens must be tokens of the vocabulary"),
        ({"begin_suppress_tokens": (40,)}, "begin_suppress_tokens must be tokens"),
        ({"forced_eos_token_ids": (40,)}, "forced_eos_token_ids must be tokens"),
        ({"exponential_decay_length_penalty": (0, 10**40)}, "logits must be finite"),
        ({"forced_bos_token_id": 40}, "forced_bos_token_id must be tokens"),
        ({"suppress_tokens": tuple(range(40))}, "rules leave no token"),
        ({"suppress_tokens": tuple(range(40)), "temperature": 1.0}, "rules leave no token"),
    ],
)
def test_options_that_no_token_can_follow_are_named(pair, options, words, beams):
    with pytest.raises(ValueError, match=words):
        ours(pair[1], [[8, 9, 10]], max_new_tokens=4, num_beams=beams, **options)


def test_stop_tokens_beyond_the_vocabulary_never_come(pair):
    for rule in ({"min_new_tokens": 3}, {"exponential_decay_length_penalty": (0, 2.0)}):
        options = GenerationOptions(max_new_tokens=4, **rule)
        found = continued(pair[1], Letters(), [[8, 9]], options, frozenset([99, -1]), (), {})
        assert len(found[0].ids) == 4


def test_a_decoders_source_is_its_prompt_as_in_transformers(pair):
    theirs, model = pair
    prompt = [*prompts_of(5, 1)[0], 8]  # which goes on with 8
    for option in ({"encoder_repetition_penalty": 0.01}, {"encoder_no_repeat_ngram_size": 1}):
        options = {"max_new_tokens": 10, **option}
        found = ours(model, [prompt], **options)[0].ids
        assert found == theirs_of(theirs, prompt, **options)[0][0]
        assert found != ours(model, [prompt], max_new_tokens=10)[0].ids


def test_options_of_transformers_that_are_not_built_are_refused_by_name():
    from polyhead.errors import ConfigError, UnsupportedError

    with pytest.raises(UnsupportedError, match=r"num_beam_groups is not supported: got 2"):
        GenerationOptions().with_(num_beam_groups=2)
    with pytest.raises(ConfigError, match="key 'num_beems' is not understood"):
        GenerationOptions.from_dict({"num_beems": 2}, "generation_config.json")
    read = GenerationOptions.from_dict(
        {"do_sample": False, "temperature": 0.6, "eos_token_id": [2, 3], "num_beams": 4}, "file"
    )
    assert read == GenerationOptions(num_beams=4, eos_token_ids=(2, 3))
