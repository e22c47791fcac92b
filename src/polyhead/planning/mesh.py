"""What one rank of a mesh holds, and what it sends in a step of training.

    ring     forward (N − 1) blocks of keys; backward these again, and N blocks of their gradients
    gather   forward (N − 1) times its own block; backward the same, and its gradients likewise
    heads    queries, keys, values and outputs to N − 1 others, and all gradients back
    tensor   two sums of [B, T, E] a layer forward and two backward, 2 (N − 1) / N of it each
    expert   tokens to their experts and back, and their gradients, if all experts are visited alike
    shard    weights fetched forward, those of layers backward again, and gradients back
    average  gradients of weights that several ranks hold: 2 (N − 1) / N of them, backward

A block is the keys and values of a rank's tokens. A transfer hides where the attention to one block
takes longer than the next block needs to come: both are counted for one step of the ring.

Shape letters: B batch, T tokens of a rank, E embed size, H query heads, G kv heads, N ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from polyhead._utils.checks import check_int
from polyhead.config import HeadLayout, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.planning.activations import activation_elements
from polyhead.planning.flops import attention_flops
from polyhead.planning.memory import caches
from polyhead.planning.weights import check_ranks, parameter_groups, pieces_around

DIMENSIONS = ("data", "shard", "context", "tensor", "expert")


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in one step of training, all layers.

    Attributes:
        what: ``"ring"``, ``"gather"``, ``"heads"``, ``"tensor"``, ``"expert"``, ``"shard"`` or
            ``"average"``.
        forward: In the forward pass.
        backward: In the backward pass.
    """

    what: str
    forward: int
    backward: int


@dataclass(frozen=True)
class MeshPlan:
    """What one rank of a mesh holds and sends.

    Attributes:
        mesh: Dimensions and their sizes.
        tokens: Tokens of each sequence, on the rank that has most.
        weight_bytes: Bytes of the weights of a rank, while none are fetched.
        cache_bytes: Bytes of the tokens that a rank remembers.
        activation_bytes: Bytes of a prompt in one piece, at most.
        sent: In a step of training, by exchange; the three of ``context`` are alternatives.
        step_seconds: Seconds of the attention to one block, and of the transfer of the next; None
            without a link and a rate.
        hides_from: Tokens of a rank from which the transfer takes less time than the attention;
            None without a link and a rate.
    """

    mesh: tuple[tuple[str, int], ...]
    tokens: int
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    sent: tuple[Sent, ...]
    step_seconds: tuple[float, float] | None
    hides_from: int | None

    @property
    def ranks(self) -> int:
        """Processes of the mesh."""
        count = 1
        for _, size in self.mesh:
            count *= size
        return count


def checked_mesh(mesh: object) -> dict[str, int]:
    """Sizes by dimension.

    Raises:
        ConfigError: Not a mapping of known dimensions to whole numbers of at least 1.
    """
    if not isinstance(mesh, Mapping) or not mesh or not {*mesh} <= {*DIMENSIONS}:
        got = ", ".join(map(str, mesh)) if isinstance(mesh, Mapping) else type(mesh).__name__
        raise ConfigError(
            f"mesh must map dimensions ({', '.join(DIMENSIONS)}) to sizes: got {got or 'none'}"
        )
    return {
        name: check_int(f"mesh {name}", mesh[name], least=1, error=ConfigError)
        for name in DIMENSIONS
        if name in mesh
    }


def mesh_plan(
    model: TransformerConfig,
    mesh: Mapping[str, int],
    *,
    tokens: int,
    batch_size: int,
    weight_bits: int,
    kv_dtype: str,
    page_size: int | None = None,
    link: float | None = None,
    flops: float | None = None,
) -> MeshPlan:
    """What one rank holds and sends.

    Args:
        tokens: Tokens of each sequence, on all ranks together.
        weight_bits: Bits of a weight; activations have 16 where weights have fewer.
        page_size: Tokens of a page, or None.
        link: Bytes per second that a rank sends to the next.
        flops: Operations per second of a rank.

    Raises:
        ConfigError: Heads or features that ``tensor`` cannot share, experts that ``expert`` cannot.
    """
    tensor, context, shard, expert, data = (
        mesh.get(name, 1) for name in ("tensor", "context", "shard", "expert", "data")
    )
    check_ranks(model, tensor)
    _check_experts(model, expert)
    T = -(-tokens // context)
    found = [
        (piece, piece.on_rank(tensor) * count) for piece, count in parameter_groups(model).items()
    ]
    routed = sum(count for piece, count in found if piece.experts > 1) // expert
    whole_on_all = sum(count for piece, count in found if piece.experts == 1)
    layers = caches(model, kv_dtype, page_size, tensor)
    size = max(16, weight_bits) // 8
    elements = activation_elements(
        model, tokens=T, batch_size=batch_size, ranks=tensor, half=size == 2
    )
    cut = shard * context if shard > 1 else 1
    kept = whole_on_all // (expert if shard > 1 else 1) + routed
    around = sum(piece.on_rank(tensor) * n for piece, n in pieces_around(model).items())
    # Weights, those that are fetched once, and how many ranks share them.
    shared = (whole_on_all, around, cut * expert), (routed, 0, cut)
    copies = [(kept // cut, data)]
    if shard == 1:
        copies = [(whole_on_all, data * context * expert), (routed, data * context)]
    first = model.layers[0].attention
    seconds = hides = None
    if link is not None and flops is not None and context > 1:
        block = _block(first, T, batch_size, tensor) * size
        # A causal mask leaves half of the pairs, in an order that deals them out evenly.
        work = attention_flops(first, tokens, 0, batch_size) / (tensor * context**2)
        seconds = work / flops, block / link
        hides = -(-int(T * seconds[1] / seconds[0] * 1000) // 1000)
    return MeshPlan(
        mesh=tuple(mesh.items()),
        tokens=T,
        weight_bytes=-(-kept * weight_bits // (8 * cut)),
        cache_bytes=sum(each.bytes(T, batch_size) for each in layers),
        activation_bytes=elements * size,
        sent=(
            *_sent(model, T, batch_size, size, tensor, context),
            *(_fetched(shared, size) if shard > 1 else ()),
            *_to_experts(model, T * batch_size * size, expert),
            *_averaged(copies, size),
        ),
        step_seconds=seconds,
        hides_from=hides,
    )


def _block(shape: HeadLayout, T: int, batch_size: int, tensor: int) -> int:
    """Numbers of the keys and values of a rank's tokens."""
    held = shape.kv
    heads = max(1, held.num_kv_heads // tensor)
    return batch_size * T * heads * (held.key_dim + (0 if held.latent else held.value_dim))


def _sent(
    model: TransformerConfig, T: int, batch_size: int, size: int, tensor: int, context: int
) -> list[Sent]:
    shapes = [layer.attention for layer in (*model.layers, *model.encoder_layers)]
    precise = max(4, size)
    found = []
    if context > 1:
        N, others = context, context - 1
        block = sum(_block(shape, T, batch_size, tensor) for shape in shapes)
        ring = others * block * size
        found.append(Sent("ring", ring, ring + N * block * precise))
        found.append(Sent("gather", ring, ring + others * block * precise))
        if all(_trades(shape, tensor, N) for shape in shapes):
            traded = sum(_traded(shape, T, batch_size, tensor, N) for shape in shapes) * size
            found.append(Sent("heads", traded, traded))
    if tensor > 1:
        share = Fraction(2 * (tensor - 1), tensor)
        stream = batch_size * T * model.embed_dim * size
        crossings = sum(layer.cross_attention is not None for layer in model.layers)
        regions = 2 * len(shapes) + crossings
        # The embedding is one more sum forward; the head's input one more backward.
        sums = int(share * stream * (regions + 1))
        found.append(Sent("tensor", sums, sums))
    return found


def _fetched(shared: Iterable[tuple[int, int, int]], size: int) -> list[Sent]:
    """Of numbers, those of them that stay once they are fetched, and how many ranks share them."""
    weights = sum(size * count * (ranks - 1) // ranks for count, _, ranks in shared)
    once = sum(size * count * (ranks - 1) // ranks for _, count, ranks in shared)
    return [Sent("shard", weights, 2 * weights - once)]


def _averaged(copies: Iterable[tuple[int, int]], size: int) -> list[Sent]:
    """Of numbers and how many ranks hold the same ones."""
    sums = sum(2 * size * count * (ranks - 1) // ranks for count, ranks in copies)
    return [Sent("average", 0, sums)] if sums else []


def _routed(model: TransformerConfig) -> list[tuple[int, int]]:
    """For each layer with experts, their number and how many a token visits."""
    layers = (*model.layers, *model.encoder_layers)
    networks = [network for x in layers for network in x.networks]
    parts = [max((p.experts, p.visited) for p in x.parameter_groups(1)) for x in networks]
    return [(experts, visited) for experts, visited in parts if experts > 1]


def _check_experts(model: TransformerConfig, expert: int) -> None:
    counts = {experts for experts, _ in _routed(model)}
    if expert > 1 and (not counts or any(count % expert for count in counts)):
        had = ", ".join(map(str, sorted(counts))) or "none"
        raise ConfigError(f"mesh expert must divide the number of experts ({had}): got {expert}")


def _to_experts(model: TransformerConfig, number: int, expert: int) -> list[Sent]:
    """Exchanges of tokens that visit K experts each, chosen evenly, there and back."""
    if expert == 1:
        return []
    visits = sum(visited for _, visited in _routed(model))
    once = visits * number * model.embed_dim * (expert - 1) // expert
    return [Sent("expert", 2 * once, 2 * once)]


def _trades(shape: HeadLayout, tensor: int, N: int) -> bool:
    heads, held = shape.num_heads // tensor, max(1, shape.kv.num_kv_heads // tensor)
    return heads % N == 0 and (held % N == 0 or N % held == 0)


def _traded(shape: HeadLayout, T: int, batch_size: int, tensor: int, N: int) -> int:
    """Numbers that a rank sends to the others when tokens become heads and back."""
    held = shape.kv
    heads, kv = shape.num_heads // tensor, max(1, held.num_kv_heads // tensor)
    queries = heads * (held.key_dim + held.value_dim) // N
    keys = max(1, kv // N) * (held.key_dim + (0 if held.latent else held.value_dim))
    return (N - 1) * batch_size * T * (queries + keys)
