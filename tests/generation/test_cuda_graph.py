"""On a GPU: the kernels against the oracle, and decoding from a CUDA graph.

    pytest -m gpu

The same tests run on a CPU in every ``make test``, on small cases and with a recording in the place
of a graph, so that what waits for a device is known to be free of slips.
"""

from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from replaying import Replayed
from test_captured_steps import FAMILIES, ordinary, tokens_of
from tiny import byte_tokenizer, decoder

import axes
import matrix
import polyhead as ph
from polyhead.generation import LanguageModel
from polyhead.generation.decoding import graphs
from polyhead.generation.decoding.captured_steps import CapturedStep, StepReplayer
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.generation.decoding.sampling import Sampler
from polyhead.generation.decoding.steps import DecoderSteps

PROMPT, COUNT = [5, 7, 9, 2, 4], 75
SIZES = (16, 32, 40, 64, 80, 96, 128, 256)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SAMPLINGS = ({}, {"temperature": 1.1, "top_k": 20, "seed": 4})
HERE, GPU = "cpu", "cuda"


def on(device, *values):
    """A case, which waits for a device unless it runs here."""
    missing = not torch.cuda.is_available() or find_spec("triton") is None
    skip = pytest.mark.skipif(missing, reason="needs a CUDA device and Triton")
    return pytest.param(device, *values, marks=() if device == HERE else (pytest.mark.gpu, skip))


@pytest.fixture(autouse=True)
def _recorded_here(request, monkeypatch):
    if request.node.callspec.params["device"] == HERE:
        monkeypatch.setitem(graphs.MAKERS, HERE, Replayed)
        monkeypatch.setattr(graphs, "_of_kernel", lambda model: None)
        monkeypatch.setattr(graphs, "KERNEL", "tiled")


@pytest.mark.parametrize(
    ("device", "size", "dtype"),
    [on(HERE, 16, torch.float32), on(HERE, 40, torch.bfloat16)]
    + [on(GPU, size, dtype) for size in SIZES for dtype in DTYPES],
)
def test_auto_equals_the_reference_for_each_size_and_dtype(device, size, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 200, size, device=device).to(dtype) for n in (4, 2, 2))
    exact = [x.double() for x in (q, k, v)]
    cases = (
        {"mask": ph.Causal()},
        {"mask": ph.Causal() & ph.Window(50), "softcap": 10.0},
        {"mask": ph.Causal() & ph.Documents([90, 110]), "bias": ph.ALiBi(4)},
        {"mask": ph.KeyLengths([150, 200]), "sinks": torch.zeros(4, device=device, dtype=dtype)},
    )
    most = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    fast = size in (64, 128) and dtype in (torch.bfloat16, torch.float16) and device == GPU
    for asked in cases:
        if fast and torch.cuda.get_device_capability() >= (9, 0):
            assert ph.explain(q, k, v, **asked).kernel in {"triton", "flex", "sdpa"}
        found = ph.attention(q, k, v, **asked)
        want = ph.attention(*exact, **asked, kernel="reference")
        torch.testing.assert_close(found.double(), want, atol=most[dtype], rtol=most[dtype])


@pytest.mark.parametrize(
    ("device", "kernels", "most"),
    [on(HERE, ("tiled",), 9), on(GPU, ("triton", "tiled", "sdpa"), None)],
)
def test_pairs_of_features_match_the_oracle_on_the_device(device, kernels, most):
    possible = {"dtype": [torch.float32, torch.float16, torch.bfloat16]}
    cells, said = axes.covering_cells(5, possible)[:most], Counter[tuple[str, str]]()
    for cell in cells:  # a wrong result raises
        found = matrix.judge(cell, kernels=kernels, device=device)
        said.update((name, verdict.partition(":")[0]) for name, verdict in found.items())
    assert {verdict for _, verdict in said} <= {"match", "forward only", "refused"}
    assert said["tiled", "match"] == len(cells)
    if "triton" in kernels:
        assert said["triton", "match"] > len(cells) / 2


@pytest.mark.parametrize(
    ("device", "family", "sampling"),
    [on(HERE, "Llama, GQA", SAMPLINGS[1])]
    + [on(GPU, family, sampling) for family in FAMILIES for sampling in SAMPLINGS],
)
def test_a_cuda_graph_gives_the_tokens_of_ordinary_steps(device, family, sampling):
    model = FAMILIES[family]().to(device)
    assert graphs.unsupported_reason(model, None) is None
    steps = DecoderSteps(model, [PROMPT], model.new_cache(64, kind="dense"))
    first = steps.start()
    sampler = Sampler(GenerationOptions(**sampling).sampling, device)
    step = CapturedStep(model, steps.cache, [sampler], graphs.KERNEL)
    running = StepReplayer(
        step, graphs.MAKERS[device], lambda: graphs.unsupported_reason(model, steps.cache)
    )
    found = [*tokens_of(running, first, (), COUNT)]
    assert running.why is None
    assert isinstance(running.graph, graphs.MAKERS[device])
    assert found == ordinary(model, sampling)


@pytest.mark.parametrize("device", [on(HERE), on(GPU)])
def test_other_streams_are_respected(device):
    model = LanguageModel(decoder(), byte_tokenizer(), "tiny").eval().to(device)
    expected = "".join(model.stream("Hello", max_new_tokens=40, graph=False))
    with torch.cuda.stream(torch.cuda.Stream()) if device == GPU else nullcontext():
        stream = model.stream("Hello", max_new_tokens=40, graph=True)
        assert "".join(stream) == expected
    assert stream.stats.no_graph is None
