"""On a GPU: the kernels against the oracle, and decoding from a CUDA graph.

    pytest -m gpu

Everything here waits for a device. ``test_repeated_steps.py`` replays a step without one.
"""

from collections import Counter

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from test_repeated_steps import FAMILIES, ordinary
from tiny import byte_tokenizer, decoder

import axes
import matrix
import polyhead as ph
from polyhead.generation import LanguageModel, graphs
from polyhead.generation.options import GenerationOptions
from polyhead.generation.repeating import RepeatedStep, Repeating, tokens_of
from polyhead.generation.sampling import Sampler
from polyhead.generation.steps import DecoderSteps

pytestmark = pytest.mark.gpu
PROMPT, COUNT = [5, 7, 9, 2, 4], 75
SIZES = (16, 32, 40, 64, 80, 96, 128, 256)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_auto_equals_the_reference_for_each_size_and_dtype(size, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 200, size, device="cuda").to(dtype) for n in (4, 2, 2))
    exact = [x.double() for x in (q, k, v)]
    cases = (
        {"mask": ph.Causal()},
        {"mask": ph.Causal() & ph.Window(50), "softcap": 10.0},
        {"mask": ph.Causal() & ph.Documents([90, 110]), "bias": ph.ALiBi(4)},
        {"mask": ph.KeyLengths([150, 200]), "sinks": torch.zeros(4, device="cuda", dtype=dtype)},
    )
    most = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    fast = size in (64, 128) and dtype in (torch.bfloat16, torch.float16)
    for asked in cases:
        if fast and torch.cuda.get_device_capability() >= (9, 0):
            assert ph.explain(q, k, v, **asked).kernel in {"triton", "flex", "sdpa"}
        found = ph.attention(q, k, v, **asked)
        want = ph.attention(*exact, **asked, kernel="reference")
        torch.testing.assert_close(found.double(), want, atol=most[dtype], rtol=most[dtype])


def test_pairs_of_features_match_the_oracle_on_the_device():
    possible = {"dtype": [torch.float32, torch.float16, torch.bfloat16]}
    cells, said = axes.covering_cells(5, possible), Counter[tuple[str, str]]()
    for cell in cells:  # a wrong result raises
        found = matrix.judge(cell, kernels=["triton", "tiled", "sdpa"], device="cuda")
        said.update((name, verdict.partition(":")[0]) for name, verdict in found.items())
    assert {verdict for _, verdict in said} <= {"match", "forward only", "refused"}
    assert said["tiled", "match"] == len(cells)
    assert said["triton", "match"] > len(cells) / 2


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.1, "top_k": 20, "seed": 4}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cuda_graph_gives_the_tokens_of_ordinary_steps(family, sampling):
    model = FAMILIES[family]().to("cuda")
    assert graphs.objection(model, None) is None
    steps = DecoderSteps(model, [PROMPT], model.new_cache(64, kind="dense"))
    first = steps.start()[0]
    sampler = Sampler(GenerationOptions(**sampling).sampling, "cuda")
    step = RepeatedStep(model, steps.cache, sampler, graphs.KERNEL)
    running = Repeating(step, graphs.CudaGraph, lambda: graphs.objection(model, steps.cache))
    found = [*tokens_of(running, first, (), COUNT)]
    assert running.why is None
    assert isinstance(running.graph, graphs.CudaGraph)
    assert found == ordinary(model, sampling)


def test_other_streams_are_respected():
    model = LanguageModel(decoder(), byte_tokenizer(), "tiny").eval().cuda()
    expected = "".join(model.stream("Hello", max_new_tokens=40, graph=False))
    with torch.cuda.stream(torch.cuda.Stream()):
        stream = model.stream("Hello", max_new_tokens=40, graph=True)
        assert "".join(stream) == expected
    assert stream.stats.no_graph is None
