// Guards: a description of modules is valid while everything that was read from them is as it was. A guard keeps no
// module and no weight alive: it holds weakly what can be held so, and the rest (numbers, names) strongly, so that an
// equal address means the same object.
#pragma once

#include "arguments.h"

#include <stdlib.h>

#include <new>

namespace polyhead {

// How an entry of a dict is compared.
enum Compared : uint8_t {
    kIgnored,  // only its key
    kSame,     // the same object, held
    kWeak,     // the same object, which still exists
    kTable,    // a dict of such entries
};

struct Table;
struct Entry {
    PyObject* key;    // held
    PyObject* value;  // kSame: held; kWeak: a weak reference, held
    Table* table;     // kTable
    Compared how;
};

// The entries of a dict, in their order.
struct Table {
    Entry* entries = nullptr;
    Py_ssize_t count = 0;
    Table() = default;
    Table(const Table&) = delete;
    ~Table() {
        for (Py_ssize_t i = 0; i < count; ++i) {
            Py_DECREF(entries[i].key);
            Py_XDECREF(entries[i].value);
            delete entries[i].table;
        }
        free(entries);
    }
};

inline PyObject* held_weakly(PyObject* weak) { return PyWeakref_GetObject(weak); }

// Reads a dict; with `names`, a set, only values under these keys. False: an exception is set.
inline bool watch_dict(Table& table, PyObject* dict, PyObject* names) {
    const Py_ssize_t size = PyDict_Size(dict);
    if (size < 0 || !(table.entries = (Entry*)calloc(size + 1, sizeof(Entry)))) return PyErr_Occurred() || PyErr_NoMemory(), false;
    Py_ssize_t at = 0;
    for (PyObject *key, *value; table.count < size && PyDict_Next(dict, &at, &key, &value);) {
        Entry& entry = table.entries[table.count++];
        Py_INCREF(key);
        entry.key = key;
        const int read = names ? PySequence_Contains(names, key) : 1;
        if (read < 0) return false;
        if (!read) continue;
        if (names && PyDict_Check(value)) {
            entry.how = kTable;
            if (!(entry.table = new (std::nothrow) Table)) return PyErr_NoMemory(), false;
            if (!watch_dict(*entry.table, value, nullptr)) return false;
            continue;
        }
        entry.how = kWeak;
        if ((entry.value = PyWeakref_NewRef(value, nullptr))) continue;
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return false;
        PyErr_Clear();
        entry.how = kSame;
        Py_INCREF(entry.value = value);
    }
    return true;
}

// Whether a dict has the entries that were read.
inline bool is_unchanged(const Table& table, PyObject* dict) {
    if (PyDict_Size(dict) != table.count) return false;
    const Entry* entry = table.entries;
    Py_ssize_t at = 0;
    for (PyObject *key, *value; PyDict_Next(dict, &at, &key, &value); ++entry) {
        if (key != entry->key) return false;
        switch (entry->how) {
            case kIgnored: break;
            case kSame: if (value != entry->value) return false; break;
            case kWeak: if (value != held_weakly(entry->value)) return false; break;
            case kTable: if (!PyDict_Check(value) || !is_unchanged(*entry->table, value)) return false; break;
        }
    }
    return true;
}

// An object by its class and its attributes, or, without a class, a dict that lives as long as the process (a class's).
struct Watched {
    PyObject *object;  // borrowed: compared only
    PyObject *weak;    // null for a dict, which is held as `type`
    PyObject *type;    // held
    Table table;
};

// A tensor that is read by address, as it was found.
struct Known {
    PyObject *tensor = nullptr, *weak = nullptr;  // borrowed; a weak reference to it
    PyObject* storage = nullptr;                  // weak: the memory is not kept
    View view;
    int64_t bytes = 0;                            // that the storage must hold
    Known() = default;
    Known(const Known&) = delete;
    ~Known() { forget(); }
    void forget() {
        Py_CLEAR(weak);
        Py_CLEAR(storage);
        tensor = nullptr;
    }
};

// False: an exception is set, and nothing is known. Calls let other threads run, which may know something else in the
// same place (layers of one description, in several caches): it is written at once, in the end.
inline bool know(Known& known, PyObject* tensor, const char* name) {
    View view;
    if (!view_of(tensor, name, view)) return known.forget(), false;
    const int64_t offset = as_int64(call(torch_.storage_offset, tensor));
    PyObject* object = call(torch_.storage, tensor);
    PyObject* storage = object ? PyWeakref_NewRef(object, nullptr) : nullptr;
    Py_XDECREF(object);
    PyObject* weak = storage ? PyWeakref_NewRef(tensor, nullptr) : nullptr;
    const bool good = weak && !PyErr_Occurred();
    known.forget();
    if (good) {
        known.view = view, known.bytes = reach_of(view, offset) * kItemSize[view.kind];
        known.storage = storage, known.weak = weak, known.tensor = tensor;
    } else {
        Py_XDECREF(storage);
        Py_XDECREF(weak);
    }
    return good;
}

struct Guard {
    Watched* watched = nullptr;
    Known* weights = nullptr;
    int64_t weight_count = 0, weight_capacity = 0;
    Py_ssize_t count = 0;
    Guard() = default;
    Guard(const Guard&) = delete;
    ~Guard() {
        for (int64_t i = 0; i < weight_count; ++i) weights[i].~Known();
        for (Py_ssize_t i = 0; i < count; ++i) Py_XDECREF(watched[i].weak), Py_XDECREF(watched[i].type);
        delete[] watched;
        free(weights);
    }
};

// Reads what a guard watches: ((object, names of its attributes) or (dict, None), ...). False: an exception is set.
inline bool watch(PyObject* tuple, Guard& guard) {
    const Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    if (count < 0) return PyErr_SetString(PyExc_TypeError, "watched must be a tuple"), false;
    if (!(guard.watched = new (std::nothrow) Watched[count + 1]())) return PyErr_NoMemory(), false;
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* pair = PyTuple_GetItem(tuple, i);
        PyObject* object = PyTuple_Check(pair) && PyTuple_Size(pair) == 2 ? PyTuple_GetItem(pair, 0) : nullptr;
        PyObject* names = object ? PyTuple_GetItem(pair, 1) : nullptr;
        if (!object || (names == Py_None && !PyDict_Check(object)))
            return PyErr_SetString(PyExc_TypeError, "watched must be pairs of an object and names, or of a dict and None"), false;
        Watched& w = guard.watched[guard.count++];
        if (names == Py_None) {
            Py_INCREF(w.type = object);
            if (!watch_dict(w.table, object, nullptr)) return false;
            continue;
        }
        w.object = object;
        Py_INCREF(w.type = (PyObject*)Py_TYPE(object));
        PyObject* fields = PyObject_GenericGetDict(object, nullptr);
        const bool good = fields && (w.weak = PyWeakref_NewRef(object, nullptr)) && watch_dict(w.table, fields, names);
        Py_XDECREF(fields);
        if (!good) return false;
    }
    return true;
}

inline bool is_unchanged(const Watched& w) {
    if (!w.weak) return is_unchanged(w.table, w.type);
    if (held_weakly(w.weak) != w.object || (PyObject*)Py_TYPE(w.object) != w.type) return false;
    PyObject* fields = PyObject_GenericGetDict(w.object, nullptr);
    const bool same = fields && is_unchanged(w.table, fields);
    Py_XDECREF(fields);
    return same;
}

// False: an exception is set.
inline bool watch_weight(Guard& guard, PyObject* tensor, const char* name) {
    if (tensor == Py_None) return true;
    if (guard.weight_count == guard.weight_capacity) {
        const int64_t capacity = 2 * guard.weight_capacity + 8;
        Known* more = (Known*)realloc((void*)guard.weights, capacity * sizeof(Known));
        if (!more) return PyErr_NoMemory(), false;
        guard.weights = more, guard.weight_capacity = capacity;
    }
    return know(*new (&guard.weights[guard.weight_count++]) Known, tensor, name);
}

// Whether a tensor is as it was found; an exception counts as no.
inline bool is_unchanged(const Known& w) {
    PyObject* x = w.tensor;
    if (held_weakly(w.weak) != x || !is_still(x, w.view)) return false;
    PyObject* storage = held_weakly(w.storage);
    const int64_t bytes = w.bytes;
    return storage && storage != Py_None && as_int64(call(torch_.nbytes, storage)) >= bytes;
}

// The view of a tensor that was probably seen before; false: an exception is set.
inline bool view_again(Known& known, PyObject* tensor, const char* name, View& view) {
    const View before = known.view;  // another thread may know something else after a call
    const bool same = known.tensor == tensor && is_unchanged(known);
    if (PyErr_Occurred()) PyErr_Clear();
    if (same) return view = before, true;
    return view_of(tensor, name, view) && know(known, tensor, name);
}

// Whether everything is unchanged; an exception counts as no.
inline bool is_unchanged(const Guard& guard) {
    bool same = true;
    for (Py_ssize_t i = 0; same && i < guard.count; ++i) same = is_unchanged(guard.watched[i]);
    for (int64_t i = 0; same && i < guard.weight_count; ++i) same = is_unchanged(guard.weights[i]);
    if (PyErr_Occurred()) PyErr_Clear(), same = false;
    return same;
}

// Asks the processor for what the next guard reads first: weights have gone through the caches since the last token.
inline void prefetch(const Guard& guard) {
    for (Py_ssize_t i = 0; i < guard.count; ++i) __builtin_prefetch(guard.watched[i].object);
    for (int64_t i = 0; i < guard.weight_count; ++i) __builtin_prefetch(guard.weights[i].tensor);
}

inline int traverse(const Table& table, visitproc visit, void* arg) {
    for (Py_ssize_t i = 0; i < table.count; ++i) {
        Py_VISIT(table.entries[i].value);
        if (!table.entries[i].table) continue;
        if (const int stop = traverse(*table.entries[i].table, visit, arg)) return stop;
    }
    return 0;
}

inline int traverse(const Guard& guard, visitproc visit, void* arg) {
    for (Py_ssize_t i = 0; i < guard.count; ++i) {
        Py_VISIT(guard.watched[i].type);
        if (const int stop = traverse(guard.watched[i].table, visit, arg)) return stop;
    }
    return 0;
}

// An object of Python that owns a `Data`, of which `traverse` visits what it holds.
template <class Data> struct Owner {
    PyObject_HEAD
    Data* data;

    static int visited(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        const Data* data = ((Owner*)self)->data;
        return data ? traverse(*data, visit, arg) : 0;
    }
    static int clear(PyObject* self) {
        Owner* owner = (Owner*)self;
        Data* data = owner->data;
        owner->data = nullptr;
        delete data;
        return 0;
    }
    static void dealloc(PyObject* self) {
        PyTypeObject* type = Py_TYPE(self);
        PyObject_GC_UnTrack(self);
        clear(self);
        PyObject_GC_Del(self);
        Py_DECREF(type);
    }
    static PyTypeObject* new_type(const char* name) {
        static PyType_Slot slots[] = {{Py_tp_traverse, (void*)visited}, {Py_tp_clear, (void*)clear}, {Py_tp_dealloc, (void*)dealloc}, {0, nullptr}};
        PyType_Spec spec = {name, sizeof(Owner), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
        return (PyTypeObject*)PyType_FromSpec(&spec);
    }
    // An object whose data is new and empty; null: an exception is set.
    static Owner* make(PyTypeObject* type) {
        Owner* made = PyObject_GC_New(Owner, type);
        if (!made) return nullptr;
        made->data = new (std::nothrow) Data;
        PyObject_GC_Track((PyObject*)made);
        if (made->data) return made;
        Py_DECREF(made);
        PyErr_NoMemory();
        return nullptr;
    }
};

inline PyTypeObject* guard_type;

// guard(watched) -> what `holds` and `step` ask.
inline PyObject* guard(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 1) return wrong("guard takes what is watched");
    Owner<Guard>* made = Owner<Guard>::make(guard_type);
    if (!made || watch(args[0], *made->data)) return (PyObject*)made;
    Py_DECREF(made);
    return nullptr;
}

inline const Guard* guard_from(PyObject* object) {
    if (Py_TYPE(object) == guard_type) return ((Owner<Guard>*)object)->data;
    PyErr_SetString(PyExc_TypeError, "guard must be what guard() returned");
    return nullptr;
}

// holds(guard) -> whether everything that it watches is unchanged.
inline PyObject* holds(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 1) return wrong("holds takes a guard");
    const Guard* guard = guard_from(args[0]);
    return guard ? PyBool_FromLong(is_unchanged(*guard)) : nullptr;
}

}  // namespace polyhead
