// What crosses from Python into this module, written once: Python's tuples have these fields in this
// order and of these types (polyhead/native/interface.py compares them when it loads), and the module
// reads them by name.
#pragma once

#define PH_PIECE(FIELD) \
    FIELD(k, "Tensor") FIELD(v, "Tensor") FIELD(first, "int") FIELD(positions, "Tensor | None") \
    FIELD(pages, "Tensor | None") FIELD(skipped, "int") FIELD(paged, "int") FIELD(coding, "Coding | None")

#define PH_CODING(FIELD) \
    FIELD(group, "int") FIELD(key_dim, "int") FIELD(value_dim, "int") FIELD(k_bits, "int") \
    FIELD(v_bits, "int") FIELD(value_group, "int") FIELD(k_scale, "Tensor") FIELD(k_zero, "Tensor") \
    FIELD(v_scale, "Tensor | None") FIELD(v_zero, "Tensor | None")

#define PH_EXTRAS(FIELD) \
    FIELD(softcap, "float") FIELD(bounds, "tuple[Tensor, Tensor] | None") FIELD(keep, "Tensor | None") \
    FIELD(q_positions, "Tensor | None") FIELD(slopes, "Tensor | None") \
    FIELD(by_distance, "Tensor | None") FIELD(bias, "Tensor | None") FIELD(dropout, "Dropout | None") \
    FIELD(by_row, "bool") FIELD(rounded, "float")

#define PH_DROPOUT(FIELD) FIELD(p, "float") FIELD(seed, "Tensor") FIELD(query, "int") FIELD(key, "int")

#define PH_HEADS(FIELD) \
    FIELD(heads, "int") FIELD(kv_heads, "int") FIELD(key_dim, "int") FIELD(value_dim, "int") \
    FIELD(scale, "float") FIELD(softcap, "float") FIELD(rotary, "int") FIELD(norm_place, "int")

#define PH_SCALES(FIELD) FIELD(scales, "Tensor") FIELD(zeros, "Tensor | None") FIELD(numbers, "int") FIELD(rows, "int")

#define PH_WEIGHT(FIELD) FIELD(weight, "Tensor") FIELD(bias, "Tensor | None") FIELD(type, "int") FIELD(scales, "Scales | None")

#define PH_NORM(FIELD) \
    FIELD(weight, "Tensor | None") FIELD(eps, "float") FIELD(offset, "float") FIELD(bias, "Tensor | None") FIELD(centred, "bool")

#define PH_LATENT(FIELD) \
    FIELD(rank, "int") FIELD(plain, "int") FIELD(rotated, "int") FIELD(value, "int") FIELD(q, "Weight | None") \
    FIELD(q_norm, "NormWeight | None") FIELD(norm, "NormWeight | None") FIELD(up, "Tensor")

#define PH_LAYER(FIELD) \
    FIELD(attention_norm, "NormWeight | None") FIELD(q, "Weight") FIELD(k, "Weight") FIELD(v, "Weight | None") \
    FIELD(q_norm, "NormWeight | None") FIELD(k_norm, "NormWeight | None") FIELD(latent, "Latent | None") \
    FIELD(out, "Weight") FIELD(attention_out_norm, "NormWeight | None") FIELD(feed_forward_norm, "NormWeight | None") \
    FIELD(network, "Network | None") FIELD(experts, "Experts | None") \
    FIELD(feed_forward_out_norm, "NormWeight | None") FIELD(slopes, "Tensor | None") FIELD(cross, "Cross | None") \
    FIELD(sinks, "Tensor | None") FIELD(temperatures, "Tensor | None")

#define PH_NETWORK(FIELD) \
    FIELD(gate, "Weight | None") FIELD(up, "Weight") FIELD(down, "Weight") FIELD(activation, "int") FIELD(clamp, "float") \
    FIELD(offset, "float") FIELD(alphas, "tuple[Tensor, Tensor] | None")

#define PH_ROUTING(FIELD) \
    FIELD(router, "Weight") FIELD(choice_bias, "Tensor | None") FIELD(shared_gate, "Weight | None") FIELD(visited, "int") \
    FIELD(scoring, "int") FIELD(normalise, "bool") FIELD(scale, "float") FIELD(groups, "int") FIELD(groups_per_token, "int") \
    FIELD(best_two, "bool") FIELD(jitter, "float")

#define PH_EXPERTS(FIELD) \
    FIELD(routing, "Routing") FIELD(networks, "tuple[Network, ...]") FIELD(watched, "tuple[tuple[Any, ...], ...]") \
    FIELD(shared, "Network | None") FIELD(weighs_input, "bool")

#define PH_CROSS(FIELD) \
    FIELD(heads, "Heads") FIELD(norm, "NormWeight | None") FIELD(q, "Weight") FIELD(q_norm, "NormWeight | None") \
    FIELD(out, "Weight") FIELD(out_norm, "NormWeight | None")

#define PH_FORM(FIELD) \
    FIELD(dtype, "int") FIELD(embed_dim, "int") FIELD(heads, "Heads") FIELD(parallel, "int") \
    FIELD(post, "bool") FIELD(residual_scale, "float") FIELD(window, "int | None") FIELD(clip, "float") \
    FIELD(chunk, "int | None") FIELD(rounded, "float") FIELD(every, "int") FIELD(offset, "int")

#define PH_HELD(FIELD) \
    FIELD(k, "Tensor") FIELD(v, "Tensor | None") FIELD(first, "int") FIELD(length, "int") FIELD(pages, "Tensor | None") \
    FIELD(coding, "Coding | None")

#define PH_LAYER_CALL(FIELD) \
    FIELD(layer, "Layer") FIELD(rotation, "tuple[Tensor, Tensor] | None") FIELD(held, "list[Held]") \
    FIELD(by_distance, "Tensor | None") FIELD(memory, "Held | None")

#define PH_TILE_SUMS(FIELD) \
    FIELD(entropy, "Tensor | None") FIELD(squares, "Tensor | None") \
    FIELD(largest, "tuple[Tensor, Tensor] | None") FIELD(top, "tuple[Tensor, Tensor] | None") \
    FIELD(received, "Tensor | None")

// The tuples, by their names in Python.
#define PH_GROUPS(GROUP) \
    GROUP(Piece, PH_PIECE) GROUP(Coding, PH_CODING) GROUP(Extras, PH_EXTRAS) GROUP(Dropout, PH_DROPOUT) GROUP(Heads, PH_HEADS) \
    GROUP(Scales, PH_SCALES) GROUP(Weight, PH_WEIGHT) GROUP(NormWeight, PH_NORM) GROUP(Latent, PH_LATENT) GROUP(Network, PH_NETWORK) \
    GROUP(Routing, PH_ROUTING) GROUP(Experts, PH_EXPERTS) \
    GROUP(LayerWeights, PH_LAYER) GROUP(Cross, PH_CROSS) GROUP(LayerForm, PH_FORM) GROUP(Held, PH_HELD) GROUP(LayerCall, PH_LAYER_CALL) \
    GROUP(TileSums, PH_TILE_SUMS)

// The arguments of the module's functions. Those that the caller makes for results come last.
#define PH_PRODUCT_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(x, "Tensor") FIELD(weights, "Sequence[Weight]") FIELD(by_row, "bool") \
    FIELD(y, "Tensor")

#define PH_UNPACK_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(blocks, "Weight") FIELD(y, "Tensor")

#define PH_FEED_FORWARD_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(x, "Tensor") FIELD(network, "Network") FIELD(by_row, "bool") \
    FIELD(y, "Tensor")

#define PH_ROUTE_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(x, "Tensor") FIELD(routing, "Routing") FIELD(weights, "Tensor") \
    FIELD(chosen, "Tensor")

#define PH_SINK_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(x, "Tensor") FIELD(lse, "Tensor") FIELD(sinks, "Tensor")

#define PH_NORM_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(x, "Tensor") FIELD(norm, "NormWeight") FIELD(y, "Tensor")

#define PH_ROTATE_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(x, "Tensor") FIELD(cos, "Tensor") FIELD(sin, "Tensor") \
    FIELD(y, "Tensor")

#define PH_ATTEND_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(q, "Tensor") FIELD(pieces, "Sequence[Piece]") \
    FIELD(scale, "float") FIELD(extras, "Extras") FIELD(out, "Tensor") FIELD(lse, "Tensor | None")

#define PH_GRADIENTS_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(q, "Tensor") FIELD(pieces, "Sequence[Piece]") \
    FIELD(scale, "float") FIELD(extras, "Extras") FIELD(out, "Tensor") FIELD(lse, "Tensor") \
    FIELD(grad_out, "Tensor") FIELD(grad_lse, "Tensor") FIELD(grad_q, "Tensor") FIELD(grad_k, "Tensor") \
    FIELD(grad_v, "Tensor") FIELD(grad_bias, "Tensor | None")

#define PH_TILE_SUMS_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(logs, "Tensor") FIELD(first, "int") FIELD(sums, "TileSums")

#define PH_HEAD_PRODUCT_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(x, "Tensor") FIELD(weight, "Tensor") FIELD(summed, "int") \
    FIELD(y, "Tensor")

#define PH_LAYER_ARGUMENTS(FIELD) FIELD(weights, "LayerWeights") FIELD(form, "LayerForm") FIELD(watched, "tuple")

#define PH_STEP_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(x, "Tensor") FIELD(guard, "Guard") FIELD(calls, "list[LayerCall]") FIELD(starts, "int | list[int]") \
    FIELD(y, "Tensor")

#define PH_GATED_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(gate, "Tensor") FIELD(up, "Tensor") FIELD(activation, "int") \
    FIELD(y, "Tensor")

#define PH_GATED_GRADIENTS_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(gate, "Tensor") FIELD(up, "Tensor") FIELD(activation, "int") \
    FIELD(grad, "Tensor") FIELD(grad_gate, "Tensor") FIELD(grad_up, "Tensor")

#define PH_DROPPED_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(x, "Tensor") FIELD(plus, "Tensor | None") \
    FIELD(dropout, "Dropout") FIELD(y, "Tensor")

#define PH_NORM_GRADIENTS_ARGUMENTS(FIELD) \
    FIELD(code, "int") FIELD(threads, "int") FIELD(x, "Tensor") FIELD(norm, "NormWeight") FIELD(grad, "Tensor") \
    FIELD(grad_x, "Tensor") FIELD(grad_weight, "Tensor")

#define PH_FUNCTIONS(GROUP) \
    GROUP(product, PH_PRODUCT_ARGUMENTS) GROUP(unpack, PH_UNPACK_ARGUMENTS) GROUP(feed_forward, PH_FEED_FORWARD_ARGUMENTS) \
    GROUP(route, PH_ROUTE_ARGUMENTS) GROUP(sink, PH_SINK_ARGUMENTS) \
    GROUP(norm, PH_NORM_ARGUMENTS) GROUP(rotate, PH_ROTATE_ARGUMENTS) GROUP(attend, PH_ATTEND_ARGUMENTS) \
    GROUP(gradients, PH_GRADIENTS_ARGUMENTS) GROUP(tile_sums, PH_TILE_SUMS_ARGUMENTS) \
    GROUP(head_product, PH_HEAD_PRODUCT_ARGUMENTS) GROUP(layer, PH_LAYER_ARGUMENTS) GROUP(step, PH_STEP_ARGUMENTS) GROUP(gated, PH_GATED_ARGUMENTS) \
    GROUP(gated_gradients, PH_GATED_GRADIENTS_ARGUMENTS) GROUP(dropped, PH_DROPPED_ARGUMENTS) \
    GROUP(norm_gradients, PH_NORM_GRADIENTS_ARGUMENTS)

namespace polyhead {

struct FieldName {
    const char *name, *type;
};

// GroupPiece::k is the index of the field k of Piece, and kPiece[GroupPiece::k] its name and type.
#define PH_INDEX(name, type) name,
#define PH_NAME_AND_TYPE(name, type) {#name, type},
#define PH_DECLARE(group, fields) \
    struct Group_##group { enum { fields(PH_INDEX) size }; }; \
    constexpr FieldName k_##group[] = {fields(PH_NAME_AND_TYPE)};
PH_GROUPS(PH_DECLARE)

#define PH_DECLARE_FUNCTION(function, fields) \
    struct Call_##function { enum { fields(PH_INDEX) size }; }; \
    constexpr FieldName kCall_##function[] = {fields(PH_NAME_AND_TYPE)};
PH_FUNCTIONS(PH_DECLARE_FUNCTION)

constexpr const char* kDtypes[] = {"float32", "bfloat16", "float16"};     // in the order of Dtype
constexpr const char* kActivations[] = {"relu", "silu", "gelu_tanh", "relu2", "gelu", "quick_gelu", "xielu"};  // in the order of Activation

}  // namespace polyhead
