// Weights, their scales and norms, as Python hands them over.
#pragma once

#include "arguments.h"
#include "interface.h"

namespace polyhead {

// The scales of a weight [out, in] of a type from kFirstScaled on, of which no number is without one.
inline bool scales_from(PyObject* tuple, int64_t type, int64_t outputs, int64_t inputs, Scales& s) {
    if ((tuple == Py_None) != (type < kFirstScaled)) return wrong("scales must be given for the types that have them in another tensor");
    if (tuple == Py_None) return true;
    using F = tuples::Scales;
    const Fields<F> fields(tuple, "scales");
    View scales, zeros;
    if (!fields || !view_of(fields[F::scales], "scales", scales) || !optional_view_of(fields[F::zeros], "zeros", zeros)) return false;
    s.numbers = fields.as_int64(F::numbers), s.rows = fields.as_int64(F::rows);
    if (PyErr_Occurred()) return false;
    if (s.numbers > inputs) s.numbers = inputs;
    if (s.numbers < kScaledNumbers || s.numbers % kScaledNumbers || s.rows < 1)
        return wrong("scales must be of whole runs of 32 numbers, and of one row or more");
    const int64_t count = outputs ? (outputs - 1) / s.rows + 1 : 0;
    s.row = (inputs - 1) / s.numbers + 1;
    if (scales.dims != 2 || scales.kind > kOfFloat16 || !scales.is(0, count) || !scales.is(1, s.row) || !scales.is_dense_from(0))
        return wrong("scales must be floating-point [rows, groups of numbers], without gaps");
    if (zeros && (type == kFloat8 || zeros.kind != kOfUint8 || zeros.dims != 2 || !zeros.is(0, count) || !zeros.is(1, s.row) ||
                  !zeros.is_dense_from(0)))
        return wrong("zeros must be bytes of the shape of scales, without gaps, of codes that are whole numbers");
    s.scales = scales.at, s.dtype = (Dtype)scales.kind, s.zeros = (const uint8_t*)zeros.at;
    return true;
}

// A weight [out, in] in the dtype of x, or in blocks as bytes [out, n], and its bias [out], without gaps.
inline bool weight_from(PyObject* tuple, const char* name, int kind, int64_t inputs, LinearWeight& f) {
    const Fields<tuples::Weight> fields(tuple, name);
    View weight, bias;
    if (!fields || !view_of(fields[tuples::Weight::weight], name, weight) ||
        !optional_view_of(fields[tuples::Weight::bias], name, bias))
        return false;
    const int64_t told = fields.as_int64(tuples::Weight::type);
    if (PyErr_Occurred()) return false;
    const bool int8_activations = told & kInt8Activations;
    const int64_t type = told & ~(int64_t)kInt8Activations, row_bytes = type ? bytes_of_row(type, inputs) : 0;
    if (int8_activations && (!takes_int8_activations(type) || inputs > kMaxInt8Inputs))
        return wrong("a weight that does not take x in 8 bits");
    if (weight.dims != 2 || weight.kind != (type ? (int)kOfUint8 : kind) || weight.size[1] != (type ? row_bytes : inputs) ||
        !weight.is_dense_from(0) ||
        (bias && (bias.kind != kind || !bias.is_vector(weight.size[0])))) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be a weight [out, %lld] in the dtype of x or in whole blocks, and a bias [out] in the dtype of x, without gaps",
                     name, (long long)inputs);
        return false;
    }
    f = LinearWeight{weight.at, bias.at, weight.size[0], (int)type, row_bytes, int8_activations, {}};
    return scales_from(fields[tuples::Weight::scales], type, f.out_features, inputs, f.scales);
}

// Blocks that are only unpacked: rows may have gaps between them.
inline bool blocks_from(PyObject* tuple, int64_t rows, int64_t numbers, LinearWeight& f) {
    const Fields<tuples::Weight> fields(tuple, "blocks");
    View blocks;
    if (!fields || !view_of(fields[tuples::Weight::weight], "blocks", blocks)) return false;
    const int64_t type = fields.as_int64(tuples::Weight::type);
    if (PyErr_Occurred()) return false;
    if (blocks.dims != 2 || blocks.kind != kOfUint8 || !blocks.is_dense_from(1) || !blocks.is(0, rows) ||
        !blocks.is(1, bytes_of_row(type, numbers)))
        return wrong("blocks must be bytes [rows, n] of whole blocks of a known type, and y [rows, their numbers]");
    f = LinearWeight{blocks.at, nullptr, rows, (int)type, blocks.stride[0], false, {}};
    return scales_from(fields[tuples::Weight::scales], type, rows, numbers, f.scales);
}

inline bool norm_from(PyObject* tuple, const char* name, int kind, int64_t features, NormWeight& n) {
    const Fields<tuples::NormWeight> fields(tuple, name);
    View weight, bias;
    if (!fields || !optional_view_of(fields[tuples::NormWeight::weight], name, weight) ||
        !optional_view_of(fields[tuples::NormWeight::bias], name, bias))
        return false;
    const View& any = weight ? weight : bias;
    const int64_t heads = any.dims == 2 ? any.size[0] : 1;
    auto fits = [&](const View& v) {
        return v.dims == any.dims && (v.dims == 1 || (v.dims == 2 && v.is(0, heads))) && v.kind == kind && v.is(v.dims - 1, features) &&
               v.is_dense_from(0);
    };
    if ((weight && !fits(weight)) || (bias && !fits(bias)) || heads < 1) {
        PyErr_Format(PyExc_ValueError, "%s must be a weight [%lld] or [heads, %lld], and such a bias, in the dtype of x, without gaps",
                     name, (long long)features, (long long)features);
        return false;
    }
    n = NormWeight{weight.at, fields.as_float(tuples::NormWeight::eps), fields.as_float(tuples::NormWeight::offset), bias.at,
                   fields[tuples::NormWeight::centred] == Py_True, true, heads};
    return !PyErr_Occurred();
}

}  // namespace polyhead
