"""Random calls for the native code, forward and backward."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

import polyhead as ph

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@st.composite
def problems(draw):
    G = draw(st.integers(1, 3))
    H = G * draw(st.sampled_from([1, 2, 3, 8]))
    B, T, S = draw(st.integers(1, 2)), draw(st.integers(1, 40)), draw(st.integers(1, 300))
    D, V = (draw(st.sampled_from([1, 5, 16, 32, 64, 72])) for _ in range(2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    dtype = draw(st.sampled_from(list(CLOSE)))

    def tensor(*shape):
        x = torch.randn(*shape, generator=generator).to(dtype)
        how = draw(st.sampled_from(["dense", "tokens first", "sliced", "offset"]))
        if how == "tokens first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if how == "sliced":
            return torch.cat((x, x), dim=2)[:, :, ::2][:, :, : shape[2]].copy_(x)
        if how == "offset":
            return torch.cat((x[..., :1], x), dim=3)[..., 1:]
        return x

    q, k, v = tensor(B, H, T, D), tensor(B, G, S, D), tensor(B, G, S, V)
    mask = draw(
        st.sampled_from(
            [
                None,
                ph.Causal(),
                ph.Causal() & ph.Window(draw(st.integers(1, 50))),
                ph.Window(4, ahead=3),
                ph.Prefix(draw(st.integers(0, 9))) | ph.Causal(),
                ph.KeyLengths([draw(st.integers(0, S)) for _ in range(B)]),
                ph.Documents([S // 2, S - S // 2]) & ph.Causal(),
                ph.Keep(torch.rand(B, 1, T, S, generator=generator) < 0.4),
                ph.Drop(torch.rand(S, generator=generator) < 0.4) & ph.Causal(),
            ]
        )
    )
    shape = [draw(st.sampled_from([1, size])) for size in (B, H, T, S)]
    arguments = {
        "mask": mask,
        "softcap": draw(st.sampled_from([None, 3.0])),
        "bias": draw(
            st.sampled_from(
                [
                    None,
                    ph.ALiBi(H),
                    ph.RelativeBias(torch.randn(12, H, generator=generator), max_distance=20),
                    torch.randn(shape, generator=generator),
                ]
            )
        ),
        "sinks": draw(st.sampled_from([None, torch.randn(H, generator=generator)])),
        "scale": draw(st.sampled_from([None, 0.7])),
        "dropout_p": draw(st.sampled_from([0.0, 0.2])),
    }
    return q, k, v, arguments
