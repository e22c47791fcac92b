// What crosses between Python and this module. The named tuples of polyhead/native and the calls of its code.py have
// these fields and arguments in this order: native/interface.py compares them when it loads this module.
#pragma once

namespace polyhead {

#define PH_TUPLES(X) \
    X(KVSegment, k, v, first, positions, pages, skipped, paged, coding) \
    X(Coding, group, key_dim, value_dim, k_bits, v_bits, value_group, k_scale, k_zero, v_scale, v_zero) \
    X(ScoreMods, softcap, bounds, keep, q_positions, slopes, by_distance, bias, dropout, batch_invariant, rounded, \
      chosen, chosen_size, chosen_queries) \
    X(Dropout, p, seed, query, key) \
    X(Heads, heads, kv_heads, key_dim, value_dim, scale, softcap, rotary, norm_place) \
    X(Scales, scales, zeros, numbers, rows) \
    X(Weight, weight, bias, type, scales) \
    X(NormWeight, weight, eps, offset, bias, centred) \
    X(Latent, rank, plain, rotated, value, q, q_norm, norm, up) \
    X(Network, gate, up, down, activation, clamp, offset, alphas) \
    X(Routing, router, choice_bias, shared_gate, visited, scoring, normalise, scale, groups, groups_per_token, best_two, jitter) \
    X(Experts, routing, networks, watched, shared, weighs_input) \
    X(LayerWeights, attention_norm, q, k, v, q_norm, k_norm, latent, out, attention_out_norm, feed_forward_norm, network, \
      experts, feed_forward_out_norm, slopes, cross, sinks, temperatures) \
    X(Cross, heads, norm, q, q_norm, out, out_norm) \
    X(LayerForm, dtype, embed_dim, heads, parallel, post, residual_scale, window, clip, chunk, rounded, every, offset, block_size, top_k) \
    X(CacheSegment, k, v, first, length, pages, coding, positions, firsts) \
    X(LayerCall, layer, rotation, segments, by_distance, memory, entries) \
    X(TileSums, entropy, squares, largest, top, received)

// Functions of the code of an instruction set; tensors that the caller makes for results come last.
#define PH_FUNCTIONS(X) \
    X(product, code, threads, x, weights, batch_invariant, y) \
    X(matmul, code, threads, a, b, add, y) \
    X(unpack, code, threads, blocks, y) \
    X(feed_forward, code, threads, x, network, batch_invariant, y) \
    X(route, code, threads, x, routing, weights, chosen) \
    X(sink, code, threads, x, lse, sinks) \
    X(choose_blocks, code, threads, q, entries, own, chosen) \
    X(choose_keys, code, threads, q, weights, segments, mods, chosen) \
    X(recur, code, threads, q, k, v, scale, decay, beta, real, delta, state, out) \
    X(norm, code, threads, x, weight, y) \
    X(rotate, code, threads, x, cos, sin, y) \
    X(attend, code, threads, q, segments, scale, mods, out, lse) \
    X(gradients, code, threads, q, segments, scale, mods, out, lse, grad_out, grad_lse, grad_q, grad_k, grad_v, grad_bias) \
    X(tile_sums, code, threads, logs, first, sums) \
    X(head_product, code, threads, x, weight, summed, y) \
    X(layer, weights, form, watched) \
    X(step, code, threads, x, guard, calls, starts, counts, run, y) \
    X(again, code, threads, x, guard, run, start, rotations, y) \
    X(gated, code, threads, gate, up, activation, y) \
    X(gated_gradients, code, threads, gate, up, activation, grad, grad_gate, grad_up) \
    X(dropped, code, threads, x, plus, dropout, y) \
    X(norm_gradients, code, threads, x, norm, grad, grad_x, grad_weight)

// tuples::Coding::group and arguments::product::x are indexes; `size` is how many there are.
#define PH_INDEXES(name, ...) struct name { enum { __VA_ARGS__, size }; };
namespace tuples { PH_TUPLES(PH_INDEXES) }
namespace arguments { PH_FUNCTIONS(PH_INDEXES) }
#undef PH_INDEXES

// In the order of Dtype and of Activation.
constexpr const char *kDtypes = "float32, bfloat16, float16", *kActivations = "relu, silu, gelu_tanh, relu2, gelu, quick_gelu, xielu";

}  // namespace polyhead
