"""``parallelize``: a model on a mesh of processes.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("shard", "context"))
    model = parallel.parallelize(model, mesh)

Dimensions are read by their names:

    data       whole copies, gradients averaged                torch's ``replicate``
    shard      parameters in shares, fetched when needed       torch's ``fully_shard`` (FSDP2)
    context    tokens of a sequence                            ``context.py``
    tensor     heads, hidden features, the vocabulary          ``regions.py``

Gradients are averaged over data, shard and context: a loss is the mean over a rank's own tokens,
or ``parallel.cross_entropy``, which weighs ranks that hold different numbers of them.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from polyhead.checks import flag, one_of
from polyhead.layers.experts import Experts
from polyhead.layers.hooks import Hooked
from polyhead.models import Transformer
from polyhead.parallel.context import Context, check_context, install, same_on_all, spread_tokens
from polyhead.parallel.exchanges import EXCHANGES, Exchange, head_shares
from polyhead.parallel.order import ORDERS, Order
from polyhead.parallel.ranks import Ranks, check_mesh, unsupported
from polyhead.parallel.regions import planned, share_heads, share_vocabulary

AVERAGED = ("data", "shard", "context")
"""Dimensions over which gradients are averaged."""


def parallelize(
    model: Transformer,
    mesh: DeviceMesh,
    *,
    exchange: Exchange = "ring",
    order: Order = "zigzag",
    training: bool = True,
    **options: Any,
) -> Transformer:
    """Spreads a model over the processes of a mesh, in place.

    Every process builds the same model with the same weights and calls this. Afterwards the model
    is called as before: with a dimension ``context`` each rank hands over its slice of the tokens
    (``parallel.shard``) and gets its slice of the logits.

    Args:
        model: With the same weights on all ranks.
        mesh: Dimensions named data, shard, context and tensor, any of them.
        exchange: How keys get to the queries of other ranks: ``"ring"``, ``"gather"``, ``"heads"``.
        order: Which rank holds which tokens: ``"contiguous"``, ``"zigzag"``, ``"striped"``.
        training: Whether gradients are averaged over data and context; without, a model serves,
            under ``torch.inference_mode`` too. With a cache (``new_cache``) every rank is given the
            same new tokens, and those remembered lie on the ranks of context.
        **options: For torch's ``fully_shard`` and ``replicate``, such as ``mp_policy``.

    Returns:
        The same model.

    Raises:
        UnsupportedError: A part that the mesh cannot share, by name; nothing was changed.
        RankError: Ranks were given different models; names the rank.
        TypeError: Not a Transformer, or not a mesh.
        ValueError: Dimensions that are not named as above, or an unknown exchange or order.
    """
    check_mesh(mesh)
    one_of("exchange", exchange, EXCHANGES)
    one_of("order", order, ORDERS)
    flag("training", training)
    tensor, ranks = check_model(model, mesh, exchange)
    names = mesh.mesh_dim_names or ()
    for name in names:
        count = sum(parameter.numel() for parameter in model.parameters())
        same_on_all(Ranks.of(mesh, name), model.config.to_json(), count)
    heads: dict[Hooked, tuple[range, int]] = {}
    if tensor is not None:
        for module in _attentions(model):
            H: int = module.num_heads
            heads[module] = head_shares(H, H, tensor.size)[tensor.rank][0], H
        share_heads(model, tensor, mesh["tensor"])
        share_vocabulary(model, tensor, mesh["tensor"])
    context = None if ranks is None else Context(ranks, exchange, order)
    if tensor is not None or context is not None:
        install(model, tensor, heads, context)
    if context is not None:
        spread_tokens(model, context)
    _average(model, mesh, training, options)
    return model


def check_model(
    model: Transformer, mesh: DeviceMesh, exchange: Exchange = "ring"
) -> tuple[Ranks | None, Ranks | None]:
    """The ranks of tensor and of context; raises for what the mesh cannot do with this model.

    Raises:
        UnsupportedError: Names it.
        TypeError: Not a Transformer.
        ValueError: One that is parallel already.
    """
    if not isinstance(model, Transformer):
        raise TypeError(f"parallelize takes a Transformer: got {type(model).__name__}")
    if any("_computed" in vars(module) for module in _attentions(model)):
        raise ValueError("the model is parallel already")
    names = mesh.mesh_dim_names or ()
    if "expert" in names:
        raise unsupported("the dimension 'expert'; experts are shared by 'tensor'")
    tensor = Ranks.of(mesh, "tensor") if "tensor" in names else None
    context = Ranks.of(mesh, "context") if "context" in names else None
    if tensor is not None:
        planned(model, tensor)
        if model.config.weights_of or model.config.encoder.weights_of:
            raise unsupported("layers that share weights on the dimension 'tensor'")
    if context is not None:
        check_context(model)
        shared = 1 if tensor is None else tensor.size
        for module in _attentions(model) if exchange == "heads" else ():
            held = module.config.cache_shape.kv_heads
            head_shares(module.config.num_heads // shared, max(1, held // shared), context.size)
    return tensor, context


def _attentions(model: Transformer) -> list[Any]:
    """All attentions of a model."""
    return [module for module in model.modules() if isinstance(module, Hooked)]


def _average(model: Transformer, mesh: DeviceMesh, training: bool, options: dict[str, Any]) -> None:
    """Averages gradients over data, shard and context, by torch's own means."""
    names = [name for name in AVERAGED if name in (mesh.mesh_dim_names or ())]
    if not training and "shard" not in names:
        names = []
    if not names:
        if options:
            raise ValueError(f"{', '.join(options)}: no dimension data, shard or context to use it")
        return
    for module in model.modules():
        if isinstance(module, Experts):
            module.calls_all = True
    layers = [*model.encoder_layers, *model.layers]
    if "shard" in names:
        cut = [name for name in names if name != "data"]
        used = _flat(mesh, cut)
        if "data" in names:
            used = mesh["data", "_".join(cut)]
        for each in layers:
            fully_shard(each, mesh=used, **options)
        fully_shard(model, mesh=used, **options)
    else:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        used = _flat(mesh, names)
        for each in layers:
            replicate(each, mesh=used, **options)
        replicate(model, mesh=used, **options)


def _flat(mesh: DeviceMesh, names: list[str]) -> DeviceMesh:
    """One dimension of all these."""
    if len(names) == 1:
        return mesh[names[0]]
    return mesh[tuple(names)]._flatten("_".join(names))
