"""torch's scaled_dot_product_attention, for what it computes exactly.

Its causal mask is top-left, a bool mask becomes a T×S float tensor, a value size that differs from
the key size falls to a path that builds T×S, and masked NaN leaks: so it is used where everything
is visible, or where plain causal order is all there is; keys and values that are not finite are
set to 0 first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.kernels.base import Kernel, Refusal
from polyhead.native.tensor_check import is_exported_to_onnx
from polyhead.semantics import Call, Causal, DenseSource, State, Visibility
from polyhead.semantics.scores import is_distributed, zero_nonfinite


class SdpaKernel(Kernel[bool]):
    name = "sdpa"
    summary = "torch's fused attention; no mask beyond plain causal, no bias, no softcap"
    needs_contiguous_kv = True

    def plan(self, call: Call) -> bool | Refusal:
        """Whether plain causal order is left of the mask, or nothing."""
        spec = call.spec
        if spec.softcap is not None:
            return Refusal(f"softcap={spec.softcap}")
        if spec.bias is not None:
            return Refusal(f"bias={spec.bias!r} (it would need a T×S tensor)")
        if spec.dropout_p:
            return Refusal(f"dropout_p={spec.dropout_p} (its random numbers take no generator)")
        if call.source.key_dim != call.source.value_dim:
            return Refusal(
                f"a value size {call.source.value_dim} beside key size {call.source.key_dim} "
                "(it would build the T×S matrix)"
            )
        if not _rows_are_dense(call):
            return Refusal(
                "a last dimension with strides (it would read past it, or build the T×S matrix)"
            )
        if not (call.q_tokens.length and call.source.tokens.length):
            return Refusal("no queries or no keys")
        is_causal = call.visibility is not Visibility.ALL
        if is_causal and not _is_top_left_causal(call):
            return Refusal(
                f"mask={spec.mask!r} over these positions (only plain causal with T = S)"
            )
        if call.needs_lse and call.q.device.type != "cpu":
            return Refusal("return_lse on a device other than the CPU")
        if call.needs_lse and torch.compiler.is_exporting() and is_exported_to_onnx():
            return Refusal("return_lse in torch.onnx.export (which gives it another shape)")
        if call.needs_lse and call.requires_grad:
            return Refusal("a gradient through lse")
        if spec.deterministic and call.requires_grad:
            return Refusal("deterministic gradients (torch computes them on all threads)")
        if call.q.is_cpu and is_distributed(*call.tensors().values()):
            return Refusal(
                "DTensors on a CPU (torch knows no sharding of its fused operator there)"
            )
        return is_causal

    def run(self, call: Call, plan: bool) -> State:
        k, v = call.source.gather()
        if not plan:
            return _fused(call, k, v, is_causal=False)
        k, v, bad = zero_nonfinite(k, v)
        out, lse = _fused(call, k, v, is_causal=True)
        if bad is None:
            return State(out, lse)
        # In causal order a row sees a key that is not finite from that key's position on.
        sees_bad = bad.long().cumsum(dim=-1).bool().repeat_interleave(call.groups, dim=1)
        return State(out.masked_fill(sees_bad[..., None], torch.nan), lse)


def _rows_are_dense(call: Call) -> bool:
    """Whether the last dimension of q, k and v lies in one piece, as the fused operator assumes."""
    if call.source.key_dim == 1:
        return True
    dense = call.q.stride(-1) == 1
    if type(call.source) is DenseSource:
        dense = dense and call.source.k.stride(-1) == 1 == call.source.v.stride(-1)
    return dense


def _is_top_left_causal(call: Call) -> bool:
    """Whether the mask is Causal() alone over T = S tokens that stand in order."""
    q, k = call.q_tokens, call.source.tokens
    in_order = q.positions is None and k.positions is None and q.stride == k.stride
    return type(call.spec.mask) is Causal and in_order and q.places == k.places


def _fused(call: Call, k: Tensor, v: Tensor, *, is_causal: bool) -> State:
    q, scale = call.q, call.spec.scale
    if call.needs_lse:
        # The operator that F.scaled_dot_product_attention itself calls on a CPU, bit for bit.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return State(out, lse)
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=bool(call.groups > 1)
    )
    return State(out, None)
