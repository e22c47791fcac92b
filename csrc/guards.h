// A description of modules is valid while they hold the same objects (facts) and their weights have the same
// addresses.

// A tensor that is read by address in every step, as the gate found it.
struct Weight {
    PyObject* tensor;   // borrowed: of what keeps the layer's data
    PyObject* storage;  // weak: the description does not keep memory alive
    View view;
    int64_t bytes;      // that the storage must hold
};

// The attribute of that name is the value (a class is compared without asking); or, without a name, the
// dict has these keys with these objects, in this order.
struct Fact {
    PyObject *thing, *name, *value;
    PyObject** entries;
    Py_ssize_t count;
};

// All that must be unchanged for a description to be valid.
struct Guard {
    Weight* weights = nullptr;
    int64_t weight_count = 0, weight_room = 0;
    Fact* facts = nullptr;
    Py_ssize_t fact_count = 0;
    Guard() = default;
    Guard(const Guard&) = delete;
    ~Guard() {
        for (int64_t i = 0; i < weight_count; ++i) Py_XDECREF(weights[i].storage);
        for (Py_ssize_t i = 0; i < fact_count; ++i) free(facts[i].entries);
        free(weights), free(facts);
    }
};

// False: an exception is set.
bool remember_weight(Guard& guard, PyObject* tensor, const char* name) {
    if (tensor == Py_None) return true;
    if (guard.weight_count == guard.weight_room) {
        const int64_t room = 2 * guard.weight_room + 8;
        Weight* more = (Weight*)realloc((void*)guard.weights, room * sizeof(Weight));
        if (!more) return PyErr_NoMemory(), false;
        guard.weights = more, guard.weight_room = room;
    }
    View view;
    if (!view_of(tensor, name, view)) return false;
    const int64_t offset = whole(call(torch_.storage_offset, tensor));
    PyObject* storage = call(torch_.storage, tensor);
    PyObject* weak = storage ? PyWeakref_NewRef(storage, nullptr) : nullptr;
    Py_XDECREF(storage);
    if (!weak || PyErr_Occurred()) return Py_XDECREF(weak), false;
    guard.weights[guard.weight_count++] = Weight{tensor, weak, view, reach_of(view, offset) * kItemSize[view.kind]};
    return true;
}

// Whether a tensor is as the gate described it; an exception counts as no.
bool is_still(const Weight& w) {
    PyObject* x = w.tensor;
    if ((PyObject*)Py_TYPE(x) != torch_.tensor && (PyObject*)Py_TYPE(x) != torch_.parameter) return false;
    PyObject* address = call(torch_.data_ptr, x);
    bool same = address && PyLong_AsVoidPtr(address) == w.view.at;
    Py_XDECREF(address);
    if (!same) return false;
    PyObject* dtype = PyObject_GetAttr(x, torch_.dtype);
    Py_XDECREF(dtype);
    if (dtype != torch_.kinds[w.view.kind]) return false;
    PyObject* shape = PyObject_GetAttr(x, torch_.shape);
    same = shape && PyTuple_Size(shape) == w.view.dims;
    for (int d = 0; same && d < w.view.dims; ++d) same = PyLong_AsLongLong(PyTuple_GetItem(shape, d)) == w.view.size[d];
    Py_XDECREF(shape);
    if (!same || !is_true(call(torch_.is_contiguous, x)) || is_true(call(torch_.is_neg, x))) return false;
    PyObject* storage = PyWeakref_GetObject(w.storage);
    return storage && storage != Py_None && whole(call(torch_.nbytes, storage)) >= w.bytes;
}

// Copies a dict's content; false if memory ran out.
bool remember_fact(Fact& fact, PyObject* tuple) {
    fact = Fact{PyTuple_GetItem(tuple, 0), PyTuple_GetItem(tuple, 1), PyTuple_GetItem(tuple, 2), nullptr, 0};
    if (fact.name != Py_None) return true;
    fact.count = PyDict_Size(fact.value);
    fact.entries = (PyObject**)malloc((2 * fact.count + 1) * sizeof(PyObject*));
    if (!fact.entries) return PyErr_NoMemory(), false;
    Py_ssize_t at = 0, n = 0;
    for (PyObject *key, *value; n < 2 * fact.count && PyDict_Next(fact.value, &at, &key, &value);)
        fact.entries[n++] = key, fact.entries[n++] = value;
    return true;
}

bool is_fact(const Fact& fact) {
    if (fact.name == torch_.class_name) return (PyObject*)Py_TYPE(fact.thing) == fact.value;
    if (fact.name != Py_None) {
        PyObject* found = PyObject_GetAttr(fact.thing, fact.name);
        Py_XDECREF(found);  // who else holds it is asked for only if it is the one
        return found == fact.value;
    }
    if (PyDict_Size(fact.thing) != fact.count) return false;
    Py_ssize_t at = 0, n = 0;
    for (PyObject *key, *value; n < 2 * fact.count && PyDict_Next(fact.thing, &at, &key, &value); n += 2)
        if (key != fact.entries[n] || value != fact.entries[n + 1]) return false;
    return n == 2 * fact.count;
}

// Whether everything is unchanged; an exception counts as no.
bool is_as_it_was(const Guard& guard) {
    bool same = true;
    for (Py_ssize_t i = 0; same && i < guard.fact_count; ++i) same = is_fact(guard.facts[i]);
    for (int64_t i = 0; same && i < guard.weight_count; ++i) same = is_still(guard.weights[i]);
    if (PyErr_Occurred()) PyErr_Clear(), same = false;
    return same;
}

bool facts_from(PyObject* tuple, Guard& guard) {
    const Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* fact = PyTuple_GetItem(tuple, i);
        const bool good = PyTuple_Check(fact) && PyTuple_Size(fact) == 3;
        if (!good || (PyTuple_GetItem(fact, 1) == Py_None && !(PyDict_Check(PyTuple_GetItem(fact, 0)) && PyDict_Check(PyTuple_GetItem(fact, 2)))))
            return PyErr_SetString(PyExc_TypeError, "a fact must be a thing, a name and a value, or a dict, None and a dict"), false;
    }
    if (count < 0) return PyErr_SetString(PyExc_TypeError, "facts must be a tuple"), false;
    guard.facts = (Fact*)calloc(count + 1, sizeof(Fact));
    if (!guard.facts) return PyErr_NoMemory(), false;
    for (; guard.fact_count < count; ++guard.fact_count)
        if (!remember_fact(guard.facts[guard.fact_count], PyTuple_GetItem(tuple, guard.fact_count))) return false;
    return true;
}
