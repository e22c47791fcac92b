"""Decoding steps that repeat on the device, and graphs of them, seen without a GPU."""

import pytest
import torch
from replaying import WAITING, Recording, Replayed, storages, tensors
from tiny import byte_tokenizer, decoder

import polyhead as ph
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.generation import LanguageModel
from polyhead.generation.decoding import graphs
from polyhead.generation.decoding.captured_steps import AHEAD, CapturedStep, StepReplayer
from polyhead.generation.decoding.captured_steps import tokens_of as rows_of
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.generation.decoding.sampling import Sampler
from polyhead.generation.decoding.search import draw
from polyhead.generation.decoding.steps import DecoderSteps
from polyhead.models import Transformer

RMS, LAYER = NormConfig("rmsnorm", bias=False), NormConfig("layernorm")
NETWORK = FeedForwardConfig(96)


def model_of(*attentions, norm=RMS, network=NETWORK, placement="pre", **more):
    layers = tuple(LayerConfig(a, network, norm, placement) for a in attentions)
    sizes = {"vocab_size": 101, "embed_dim": 64, "max_positions": 128}
    config = TransformerConfig(kind="decoder", layers=layers, final_norm=norm, **sizes, **more)
    torch.manual_seed(3)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.requires_grad_(False)


def heads(kv=2, **more):
    return AttentionConfig(4, num_kv_heads=kv, head_dim=16, **({"rope": RopeConfig()} | more))


def gemma():
    window = heads(window=9, softcap=20.0, qk_norm=QKNormConfig(RMS))
    embedding = EmbeddingConfig(scale=8.0)
    return model_of(
        window,
        heads(softcap=20.0),
        placement="sandwich",
        embedding=embedding,
        logit_softcap=30.0,
        head="untied",
    )


def gpt2():
    attention = heads(4, rope=None, qkv_bias=True, out_bias=True)
    network = FeedForwardConfig(96, "gelu", gated=False, bias=True)
    embedding = EmbeddingConfig(positions="learned")
    return model_of(attention, attention, norm=LAYER, network=network, embedding=embedding)


FAMILIES = {
    "Llama, GQA": lambda: model_of(heads(), heads()),
    "Gemma, windows and softcaps": gemma,
    "GPT-2": gpt2,
    "MQA, yarn": lambda: model_of(
        heads(1, rope=RopeConfig(type="yarn", factor=4.0, original_max_positions=32))
    ),
    "sinks": lambda: model_of(heads(sinks=True, window=20), heads(sinks=True)),
    "ALiBi": lambda: model_of(heads(4, rope=None, alibi=ALiBiConfig())),
    "latents": lambda: model_of(LatentAttentionConfig(4, 32, 16, 8, 16), heads()),
}
PROMPT, COUNT = [5, 7, 9, 2, 4], 75


def tokens_of(*arguments):
    """Of the only row; closed when this is."""
    rows = rows_of(*arguments)
    try:
        for _, token in rows:
            yield token
    finally:
        rows.close()


@pytest.fixture(autouse=True)
def _replayed(monkeypatch):
    monkeypatch.setitem(graphs.MAKERS, "cpu", Replayed)
    monkeypatch.setattr(graphs, "_of_kernel", lambda model: None)
    monkeypatch.setattr(graphs, "KERNEL", "tiled")
    Replayed.made.clear()


def ordinary(model, sampling=None, count=COUNT, stops=frozenset()):
    options = GenerationOptions(**(sampling or {}))
    steps = DecoderSteps(model, [PROMPT], model.new_cache())
    return [token for _, token in draw(steps, [PROMPT], options, [], stops, [count])]


def running_of(model, sampling=None, capacity=64, kernel="tiled"):
    steps = DecoderSteps(model, [PROMPT], model.new_cache(capacity, kind="dense"))
    first = steps.start()
    sampler = Sampler(GenerationOptions(**(sampling or {})).sampling)
    step = CapturedStep(model, steps.cache, [sampler], kernel)
    running = StepReplayer(step, Replayed, lambda: graphs.unsupported_reason(model, steps.cache))
    return running, first


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_give_the_tokens_of_ordinary_ones(family):
    model = FAMILIES[family]()
    running, first = running_of(model)
    found = [*tokens_of(running, first, (), COUNT)]
    assert found == ordinary(model)
    assert len(set(found)) > 5
    assert running.why is None
    # One for the room of 64 tokens, one for twice as much.
    assert len(Replayed.made) == 2
    assert sum(graph.replays for graph in Replayed.made) == COUNT - 1 - 3  # warm, room, warm
    assert running.step.cache.length == len(PROMPT) + COUNT - 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05, "typical_p": 0.9},
        {"temperature": 1.1, "epsilon_cutoff": 0.002, "eta_cutoff": 0.01},
    ],
    ids=lambda sampling: "+".join(sampling),
)
def test_draws_on_the_device_are_those_of_the_same_seed(sampling):
    model = FAMILIES["Llama, GQA"]()
    sampling = sampling | {"seed": 11}
    running, first = running_of(model, sampling)
    found = [*tokens_of(running, first, (), COUNT)]
    assert found == ordinary(model, sampling)
    assert found != ordinary(model, sampling | {"seed": 12})
    assert running.graph is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_reads_nothing_from_the_device_and_copies_nothing_to_it(family):
    names = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_p")
    sampling = {"temperature": 1.0, "top_k": 50, **dict.fromkeys(names, 0.01), "top_p": 0.9}
    running, first = running_of(FAMILIES[family](), sampling)
    list(tokens_of(running, first, (), 8))
    graph = running.graph
    assert len(graph.operations) > 30
    assert not graph.names & WAITING
    # What it reads and did not make has an owner, so that a replay finds it where it was.
    step, made = running.step, set()
    rows = [layer._contents.main.tensors for layer in step.cache.layers]
    state = step.at, step.ids, step.logits, step.token
    slopes = [layer.attention.__dict__.get("_alibi") for layer in step.model.layers]
    owned = storages((rows, state, list(step.model.parameters()), graph.held))
    owned |= storages([bias.tensors for bias in slopes if bias is not None])
    read = set()
    for _, args, kwargs, out in graph.operations:
        read |= storages((args, kwargs)) - made
        made |= storages(out) - owned
    assert read <= owned
    assert storages((rows, state)) <= read


def test_a_step_that_takes_a_number_from_the_host_would_be_seen():
    model = FAMILIES["Llama, GQA"]()
    running, first = running_of(model)
    read = running.step.read
    # The position as Python knows it, in place of the tensor.
    running.step.read = lambda ids, at: read(ids, torch.full((1,), int(at)))
    try:
        found = [*tokens_of(running, first, (), COUNT)]
    except ValueError as error:  # slots that were never written are read, and may hold NaN
        if "logits must be finite" not in str(error):
            raise
        found = None
    assert found != ordinary(model)
    assert "aten::item" in Replayed.made[0].names


def test_a_graph_that_computes_other_logits_is_not_used(monkeypatch):
    class Wrong(Replayed):
        def replay(self):
            super().replay()
            running.step.logits.neg_()
            running.step.draw()

    model = FAMILIES["Llama, GQA"]()
    sampling = {"temperature": 1.0, "seed": 4}
    running, first = running_of(model, sampling)
    running._make = Wrong
    assert [*tokens_of(running, first, (), 20)] == ordinary(model, sampling, 20)
    assert running.graph is None
    assert "computes other logits" in running.why


def test_a_step_that_cannot_be_recorded_runs_by_itself():
    def failing(*arguments):
        raise RuntimeError("operation not permitted when stream is capturing")

    model = FAMILIES["Llama, GQA"]()
    running, first = running_of(model)
    running._make = failing
    assert [*tokens_of(running, first, (), 20)] == ordinary(model, count=20)
    assert running.why == (
        "a graph cannot be recorded: operation not permitted when stream is capturing"
    )


def test_a_kernel_that_refuses_leaves_ordinary_steps():
    model = FAMILIES["Llama, GQA"]()
    running, first = running_of(model, kernel="triton")
    assert [*tokens_of(running, first, (), 20)] == ordinary(model, count=20)
    assert "kernel 'triton' " in running.why


def test_a_text_ends_at_its_stop_and_the_cache_holds_what_was_read():
    model = FAMILIES["Llama, GQA"]()
    plain = ordinary(model, count=30)
    stop = plain[20]
    expected = plain[: plain.index(stop) + 1]
    running, first = running_of(model)
    assert [*tokens_of(running, first, {stop}, 30)] == expected
    assert running.step.cache.length == len(PROMPT) + len(expected) - 1
    # A reader that goes away in the middle: steps ahead of it are forgotten.
    running, first = running_of(model)
    tokens = tokens_of(running, first, (), 30)
    assert [next(tokens) for _ in range(9)] == plain[:9]
    assert running.step.cache.length == len(PROMPT) + 8 + AHEAD - 1
    tokens.close()
    assert running.step.cache.length == len(PROMPT) + 8


def test_logits_that_are_not_finite_are_an_error_and_no_token():
    model = FAMILIES["Llama, GQA"]()
    running, first = running_of(model)
    tokens = tokens_of(running, first, (), 30)
    for _ in range(6):
        next(tokens)
    model.final_norm.weight.fill_(torch.nan)  # in place: the graph reads it
    with pytest.raises(ValueError, match="logits must be finite"):
        list(tokens)


def test_hooks_and_new_weights_end_a_graph():
    model = FAMILIES["Llama, GQA"]()
    running, first = running_of(model)
    tokens = tokens_of(running, first, (), 40)
    found = [next(tokens) for _ in range(8)]
    (graph,) = Replayed.made
    seen = []
    handle = model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    found += [next(tokens) for _ in range(8)]
    assert len(seen) == 8
    assert running.graph is None
    assert "layers.0 has hooks" in graphs.unsupported_reason(model, running.step.cache)
    handle.remove()
    found += [next(tokens) for _ in range(8)]
    assert running.graph is not None
    assert found == ordinary(model, count=24)
    with torch.no_grad():
        weight = model.layers[1].feed_forward.up_proj
        weight.weight = torch.nn.Parameter(weight.weight * 1.0, requires_grad=False)
    replays = running.graph.replays
    old = running.graph
    found += [next(tokens) for _ in range(8)]
    assert old.replays == replays
    assert running.graph not in (None, old, graph)
    assert found == ordinary(model, count=32)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: setattr(part.weight, "data", part.weight.data.clone()),
        lambda part: setattr(part, "weight", torch.nn.Parameter(part.weight.data)),
        lambda part: part.register_forward_hook(print),
        lambda part: part.register_forward_pre_hook(print),
        lambda part: part.train(),
        lambda part: setattr(part, "forward", print),
    ],
    ids=["other memory", "another parameter", "hook", "hook before", "training", "forward"],
)
def test_what_a_graph_depends_on_makes_it_invalid(change):
    model = FAMILIES["Llama, GQA"]()
    recorded = graphs.Recorded(model)
    part = model.layers[1].feed_forward.up_proj
    part.weight.mul_(1.5)  # in place: the graph reads it
    assert recorded.is_valid()
    change(part)
    assert not recorded.is_valid()


def test_models_stream_from_a_graph_and_say_where_they_do_not(monkeypatch):
    model = LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()
    plain = model.stream("Hello", max_new_tokens=30, graph=False)
    text = "".join(plain)
    assert plain.stats.no_graph == "graph=False"
    stream = model.stream("Hello", max_new_tokens=30)
    assert "".join(stream) == text
    assert stream.stats.no_graph is None
    assert stream.stats.cache_tokens == plain.stats.cache_tokens
    assert Replayed.made[-1].replays > 20
    drawn = {"max_new_tokens": 30, "temperature": 1.1, "top_k": 40, "seed": 3}
    expected = "".join(model.stream("Hello", graph=False, **drawn))
    assert "".join(model.stream("Hello", graph=True, **drawn)) == expected
    penalised = model.stream("Hello", max_new_tokens=3, repetition_penalty=1.3)
    list(penalised)
    assert penalised.stats.no_graph == "options change scores by the tokens that are there"
    with pytest.raises(ph.UnsupportedError, match="graph=True cannot be: options change scores"):
        model.stream("Hello", repetition_penalty=1.3, graph=True)
    with pytest.raises(ValueError, match="graph must be True or False"):
        model.stream("Hello", graph=1)
    monkeypatch.delitem(graphs.MAKERS, "cpu")
    with pytest.raises(ph.UnsupportedError, match="the model is on cpu, and graphs are CUDA's"):
        model.stream("Hello", graph=True)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "seed": 5},
        {"temperature": 0.8, "seed": 2, "num_return_sequences": 3},
    ],
    ids=lambda asked: "+".join(asked) or "greedy",
)
def test_texts_of_a_batch_come_from_one_graph(asked):
    model = LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()
    prompts = ["Hello", "Other", "Third"]
    plain = model.generate(prompts, max_new_tokens=40, graph=False, **asked)
    assert plain[0].stats.no_graph == "graph=False"
    # A stop that ends some rows before others, which go on in the same step.
    stop = plain[1].ids[9]
    asked = asked | {"eos_token_ids": (stop,), "max_new_tokens": 40}
    plain = model.generate(prompts, graph=False, **asked)
    Replayed.made.clear()
    found = model.generate(prompts, graph=True, **asked)
    assert [each.ids for each in found] == [each.ids for each in plain]
    assert [[o.ids for o in each.others] for each in found] == [
        [o.ids for o in each.others] for each in plain
    ]
    assert len({len(each.ids) for each in found}) > 1
    assert {each.stats.no_graph for each in found} == {None}
    (graph,) = Replayed.made
    assert graph.replays > 5
    assert not graph.names & WAITING


def test_what_a_batch_cannot_repeat_is_said():
    model = LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()
    for prompts, asked, words in (
        (["Hello", "Hi"], {}, "the prompts differ in length"),
        (["Hello"], {"num_beams": 2}, "steps of beams are not replayed"),
        (["Hello"], {"cache": {"kind": "paged"}}, "the kind of cache is the caller's"),
        (["Hello"], {"repetition_penalty": 1.2}, "options change scores"),
    ):
        assert words in model.generate(prompts, max_new_tokens=3, **asked)[0].stats.no_graph
        with pytest.raises(ph.UnsupportedError, match=f"graph=True cannot be: {words}"):
            model.generate(prompts, max_new_tokens=3, graph=True, **asked)


def test_what_is_not_known_to_repeat_is_refused_by_name():
    rope = RopeConfig(type="dynamic", factor=2.0, original_max_positions=32)
    assert graphs.unsupported_reason(model_of(heads(rope=rope)), None) == (
        "layers.0.attention has rope type 'dynamic', which changes with the length"
    )
    network = MixtureConfig(NETWORK, 4, 2)
    assert graphs.unsupported_reason(model_of(heads(), network=network), None) == (
        "layers.0.feed_forward is a Experts, which is not known to repeat"
    )
    model = model_of(heads(), head=None)
    assert graphs.unsupported_reason(model, None) == "the model has no head"


def test_a_probe_and_other_caches_keep_ordinary_steps():
    model = FAMILIES["Llama, GQA"]()
    assert graphs.unsupported_reason(model, None) is None
    assert (
        graphs.unsupported_reason(model, model.new_cache(kind="paged")) == "the cache is not dense"
    )
    with model.layers[1].attention.register_attention_hook(lambda record: None):
        assert graphs.unsupported_reason(model, None) == "layers.1.attention is watched or edited"
    model.layers[0].attention.forward = lambda *_: None
    assert "methods of its own" in graphs.unsupported_reason(model, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_elsewhere_is_sent_nothing_from_the_host(family):
    # The meta device stands for a GPU: a tensor of the CPU beside one of its own was sent.
    model = FAMILIES[family]().to("meta")
    steps = DecoderSteps(model, [PROMPT], model.new_cache(64, kind="dense"))
    steps.start()
    sampler = Sampler(GenerationOptions().sampling)
    step = CapturedStep(model, steps.cache, [sampler], "tiled")
    with torch.inference_mode():
        step()  # rotary tables and slopes of ALiBi are sent once
        with Recording() as seen:
            step()
    assert len(seen.operations) > 30
    sent = {
        func._schema.name
        for func, args, kwargs, out in seen.operations
        if not all(x.is_meta for x in tensors((args, kwargs, out)))
    }
    assert not sent
