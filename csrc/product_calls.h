// Products with weights, and weights unpacked: part of module.cpp.

// Calls of(rows, x, y) for up to kMostRows rows at a time.
template <class Of> void few_at_a_time(const ManyProduct& p, const Of& of) {
    const int64_t size = p.dtype == kFloat32 ? 4 : 2;
    for (int64_t m = 0; m < p.rows; m += kMostRows)
        of(p.rows - m < kMostRows ? p.rows - m : kMostRows, (const char*)p.x + m * p.x_stride * size, (char*)p.y + m * p.y_stride * size);
}

// Whether rows get the bits that they have alone only among few: bfloat16 that meets blocks beside numbers, of which few
// rows multiply blocks in float32 and numbers in pairs. Otherwise many rows multiply all as few do, or all in pairs.
bool chooses_few(ManyProduct& p, const Kinds& kinds, bool by_row) {
    p.pairs = !by_row || !kinds.blocks;
    return by_row && kinds.blocks && kinds.numbers && p.dtype == kBFloat16;
}

// A product of few rows at a time, with room for them in float32.
void few_product(const Code& code, const ManyProduct& p, int threads) {
    float* wide = p.room.at;
    few_at_a_time(p, [&](int64_t rows, const char* x, char* y) {
        code.widen(p.dtype, x, p.x_stride, rows, p.in_features, wide);
        Product few{p.dtype, wide, rows, p.in_features, {}, p.count, y, p.y_stride};
        for (int i = 0; i < p.count; ++i) few.factors[i] = p.factors[i];
        code.product(few, threads);
    });
}

PyObject* product(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = Call_product;
    const Arguments<A> a("product", args, count);
    View x;
    if (!a.code || !rows_of(a[A::x], x)) return nullptr;
    PyObject* weights = a[A::weights];
    const Py_ssize_t number = PySequence_Size(weights);
    if (x.size[0] < 1 || number < 1 || number > kMostFactors) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "product takes 1 to %d weights, and rows", kMostFactors);
        return nullptr;
    }
    ManyProduct p{};
    p.dtype = (Dtype)x.kind, p.x = x.at, p.x_stride = x.stride[0], p.rows = x.size[0], p.in_features = x.size[1];
    for (; p.count < number; ++p.count) {
        PyObject* pair = PySequence_GetItem(weights, p.count);
        const bool good = factor_from(pair, "a weight", x.kind, p.in_features, p.factors[p.count]);
        Py_XDECREF(pair);  // the caller's sequence holds it
        if (!good) return nullptr;
        p.y_stride += p.factors[p.count].out_features;
    }
    p.y = made_for(a[A::y], "y", p.rows * p.y_stride, x.kind);
    if (PyErr_Occurred()) return nullptr;
    bool few = p.rows <= kMostRows;
    Kinds kinds;
    for (int i = 0; i < p.count; ++i) few = few || p.factors[i].eights, kinds.add(p.factors[i]);
    few = chooses_few(p, kinds, a[A::by_row] == Py_True) || few;
    p.room = room_of(p);
    const Room<float> room(few ? kMostRows * p.in_features : p.room.numbers(a.threads));
    if (!(p.room.at = room.get())) return PyErr_NoMemory();
    const Unlocked unlocked;
    if (few) few_product(*a.code, p, a.threads);
    else a.code->many_product(p, a.threads);
    Py_RETURN_NONE;
}

// The numbers of rows of blocks, in the dtype of y.
PyObject* unpack(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = Call_unpack;
    const Arguments<A> a("unpack", args, count);
    View y;
    if (!a.code || !view_of(a[A::y], "y", y)) return nullptr;
    if (y.dims != 2 || y.kind > kOfFloat16 || !y.is_dense_from(0)) return wrong("y must be floating-point [rows, numbers], without gaps");
    Unpacked u{(Dtype)y.kind, {}, y.size[1], y.at};
    if (!blocks_from(a[A::blocks], y.size[0], u.numbers, u.from)) return nullptr;
    const Unlocked unlocked;
    a.code->unpack(u, a.threads);
    Py_RETURN_NONE;
}
