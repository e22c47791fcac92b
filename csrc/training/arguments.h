// Elementwise parts of layers in training, as the module passes them.
#pragma once

#include "../attention/arguments.h"
#include "../products/arguments.h"

namespace polyhead {

// y = activation(gate) · up, element by element; with `grad`, that of y, the gradients of both.
struct Gated {
    Dtype dtype;
    int64_t count;
    const void *gate, *up, *grad;
    Activation activation;
    void *y, *grad_gate, *grad_up;
};

// y = plus + x after dropout, element by element; the number of an element is the place of its key.
struct Elements {
    Dtype dtype;
    int64_t count;
    const void *x, *plus;               // plus: or null
    bool fp32_plus;                     // plus and y are float32
    Dropout dropout;
    void* y;
};

struct NormGradients {
    Norm norm;                          // without y
    const void* grad;                   // of y, [rows, dim]
    void* grad_x;                       // [rows, dim]
    float *grad_weight, *scratch;          // zeros: [dim], [norm_splits(rows), dim]
};

inline int64_t norm_splits(int64_t rows) { return rows < 16 * 16 ? (rows + 15) / 16 : 16; }

}  // namespace polyhead
