"""``parallelize``: a model on a mesh of processes.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("shard", "context"))
    model = parallel.parallelize(model, mesh)

Dimensions are read by their names:

    data       whole copies, gradients averaged                torch's ``replicate``
    shard      parameters in shares, fetched when needed       torch's ``fully_shard`` (FSDP2)
    context    tokens of a sequence                            ``context.py``
    tensor     heads, hidden features, the vocabulary          ``regions.py``
    expert     experts; of the rest whole copies, as ``data``  ``experts.py``

Gradients are averaged over all but tensor: a loss is the mean over a rank's own tokens, or
``parallel.cross_entropy``, which weighs ranks that hold different numbers of them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from polyhead._utils.checks import check_bool, check_one_of
from polyhead.layers.hooks import Hooked
from polyhead.layers.quantized import refuse_quantized
from polyhead.models import Transformer
from polyhead.parallel.calls import DIMENSIONS, agree_on_calls, same_on_all
from polyhead.parallel.classes import check_classes
from polyhead.parallel.context import Context, check_context, install
from polyhead.parallel.exchanges import EXCHANGES, Exchange, head_shares
from polyhead.parallel.experts import check_experts, mixtures, own_experts, share_experts
from polyhead.parallel.order import ORDERS, Order
from polyhead.parallel.ranks import AVERAGED, Ranks, check_mesh, unsupported
from polyhead.parallel.regions import planned, shard_heads, shard_vocabulary
from polyhead.parallel.sequence import TokenShards, check_sequence
from polyhead.parallel.shards import watch_shards
from polyhead.parallel.single import LAYERS, check_layer, tell_layer
from polyhead.parallel.slices import spread_tokens

_M = TypeVar("_M", bound=nn.Module)


def parallelize(
    model: _M,
    mesh: DeviceMesh,
    *,
    exchange: Exchange = "ring",
    order: Order = "zigzag",
    training: bool = True,
    loss_parallel: bool = False,
    sequence_parallel: bool = False,
    **options: Any,
) -> _M:
    """Spreads a model, or a single layer, over the processes of a mesh, in place.

    Every process builds the same model with the same weights and calls this. Afterwards the model
    is called as before: with a dimension ``context`` each rank hands over its slice of the tokens
    (``parallel.shard``) and gets its slice of the logits.

    Args:
        model: A Transformer, or one of its layers, with the same weights on all ranks.
        mesh: Dimensions named data, shard, context, tensor and expert, any of them.
        exchange: How keys get to the queries of other ranks: ``"ring"``, ``"gather"``, ``"heads"``.
        order: Which rank holds which tokens: ``"contiguous"``, ``"zigzag"``, ``"striped"``.
        training: Whether gradients are averaged over ranks; without, a model serves,
            under ``torch.inference_mode`` too. With a cache (``new_cache``) every rank is given the
            same new tokens, and those remembered lie on the ranks of context.
        loss_parallel: Logits stay where their part of the vocabulary is, a DTensor over tensor, as
            torch's ``loss_parallel`` takes them; ``parallel.cross_entropy`` does.
        sequence_parallel: Between attentions and networks each rank of tensor has some of the
            tokens alone: norms are computed once, and kept once.
        **options: For torch's ``fully_shard`` and ``replicate``, such as ``mp_policy``.

    Returns:
        The same model.

    Raises:
        UnsupportedError: A part that the mesh cannot share, by name; nothing was changed.
        RankError: Ranks were given different models, weights or arguments, or another rank refused;
            names the rank.
        TypeError: Not a Transformer or layer, or not a mesh.
        ValueError: Dimensions that are not named as above, or an unknown exchange or order.
    """
    check_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    tensor = ranks = expert = refused = None
    try:
        check_one_of("exchange", exchange, EXCHANGES)
        check_one_of("order", order, ORDERS)
        check_bool("training", training)
        for name, asked in (
            ("loss_parallel", loss_parallel), ("sequence_parallel", sequence_parallel),
        ):  # fmt: skip
            if check_bool(name, asked) and "tensor" not in names:
                raise ValueError(f"{name} needs a dimension 'tensor': got {', '.join(names)}")
        tensor, ranks, expert = check_model(model, mesh, exchange)
        if not isinstance(model, Transformer) and (loss_parallel or sequence_parallel):
            raise unsupported("loss_parallel or sequence_parallel of a layer alone")
        if isinstance(model, Transformer) and sequence_parallel:
            check_sequence(model)
    except Exception as error:  # whatever it is, other ranks must not wait
        refused = error
    call_fields = exchange, order, training, loss_parallel, sequence_parallel, sorted(options)
    dimensions = [Ranks.of(mesh, name) for name in names]
    number = same_on_all(dimensions, model, call_fields, refused)
    DIMENSIONS[model] = dimensions
    if expert is not None:
        share_experts(model, expert, averaged=training)
    heads: dict[Hooked, tuple[range, int]] = {}
    if tensor is not None:
        for module in _attentions(model):
            H: int = module.num_heads
            heads[module] = head_shares(H, H, tensor.size)[tensor.rank][0], H
        shares = TokenShards(tensor) if sequence_parallel else None
        shard_heads(model, tensor, mesh["tensor"], shares)
        if isinstance(model, Transformer):
            shard_vocabulary(model, tensor, mesh["tensor"], gathered=not loss_parallel)
    context = None if ranks is None else Context(ranks, exchange, order, tensor)
    if not isinstance(model, Transformer):
        _average(model, mesh, training, options)
        if tensor is not None or context is not None:
            tell_layer(model, tensor, heads, context, number)
        return model
    if tensor is not None or context is not None:
        install(model, tensor, heads, context)
    if context is not None:
        spread_tokens(model, context)
    elif tensor is not None:
        agree_on_calls(model, tensor)
    _average(model, mesh, training, options)
    return model


def check_model(
    model: nn.Module, mesh: DeviceMesh, exchange: Exchange = "ring"
) -> tuple[Ranks | None, Ranks | None, Ranks | None]:
    """The ranks of tensor, context and expert; raises for what the mesh cannot do with a model.

    Raises:
        UnsupportedError: Names it.
        TypeError: Not a Transformer.
        ValueError: One that is parallel already.
    """
    if not isinstance(model, Transformer) and type(model) not in LAYERS:
        raise TypeError(
            f"parallelize takes a Transformer, or {', '.join(x.__name__ for x in LAYERS)}: got "
            f"{type(model).__name__}"
        )
    refuse_quantized(model, "a mesh")
    if any(module.is_split for module in _attentions(model)):
        raise ValueError("the model is parallel already")
    names = mesh.mesh_dim_names or ()
    tensor, context, expert = (
        Ranks.of(mesh, name) if name in names else None for name in ("tensor", "context", "expert")
    )
    if expert is not None:
        check_experts(model, expert)
        for module in mixtures(model):
            check_classes(module, "expert")
    if tensor is not None:
        planned(model, tensor)
        check_classes(model, "tensor")
        if isinstance(model, Transformer) and (
            model.config.weights_of or model.config.encoder.weights_of
        ):
            raise unsupported("layers that share weights on the dimension 'tensor'")
    if context is not None:
        check_classes(model, "context")
        if isinstance(model, Transformer):
            check_context(model)
        else:
            check_layer(model)
        shared = 1 if tensor is None else tensor.size
        for module in _attentions(model) if exchange == "heads" else ():
            held = module.config.kv.num_kv_heads
            head_shares(module.config.num_heads // shared, max(1, held // shared), context.size)
    return tensor, context, expert


def _attentions(model: nn.Module) -> list[Any]:
    """All attentions of a model."""
    return [module for module in model.modules() if isinstance(module, Hooked)]


def _average(model: nn.Module, mesh: DeviceMesh, training: bool, options: dict[str, Any]) -> None:
    """Averages gradients over all dimensions but tensor, by torch's own means."""
    names = [name for name in mesh.mesh_dim_names or () if name in AVERAGED]
    if not training and "shard" not in names:
        names = []
    if not names:
        if options:
            raise ValueError(
                f"{', '.join(options)}: no dimension data, shard, context or expert to use it"
            )
        return
    for module in mixtures(model):
        module.calls_all = True
    own, rest = own_experts(model), [name for name in names if name != "expert"]
    if own and rest:
        for expert in own:
            _averaged(expert, mesh, rest, options)
    elif own:  # every rank has all of the gradient of its experts
        ignored = {parameter for expert in own for parameter in expert.parameters()}
        options = {**options, "ignored_params": ignored | options.get("ignored_params", set())}
    layers = (*model.encoder_layers, *model.layers) if isinstance(model, Transformer) else ()
    for each in (*layers, model):
        _averaged(each, mesh, names, options)

    def first(*_: object) -> None:
        handle.remove()
        _allocate(model)

    handle = model.register_forward_pre_hook(first, prepend=True)


def _allocate(model: nn.Module) -> None:
    """Gathers all parameters once if the first call is made under ``torch.inference_mode``.

    torch allocates what they are gathered into at the first call: under inference mode it would
    make tensors of which no later call can take gradients.
    """
    if not torch.is_inference_mode_enabled():
        return
    with torch.inference_mode(False):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()


def _averaged(
    module: nn.Module, mesh: DeviceMesh, names: list[str], options: dict[str, Any]
) -> None:
    if "shard" in names:
        cut = [name for name in names if name != "data"]
        used = _flat(mesh, cut)
        if "data" in names:
            used = mesh["data", "_".join(cut)]
        sharded = fully_shard(module, mesh=used, **options)
        if mesh.device_type == "cpu":
            watch_shards(sharded, _flat(mesh, cut).get_group(), "shard")
    else:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicate(module, mesh=_flat(mesh, names), **options)


def _flat(mesh: DeviceMesh, names: list[str]) -> DeviceMesh:
    """One dimension of all these."""
    if len(names) == 1:
        return mesh[names[0]]
    return mesh[tuple(names)]._flatten("_".join(names))
