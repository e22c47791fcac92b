// The Python module: tensors and numbers in, results computed into tensors that the caller made. What
// crosses is listed in interface.h; every tensor passes the gate (gate.h), and shapes that do not go
// together are refused here, whatever the Python side has checked before.

#include "gate.h"

#include <stdlib.h>
#include <time.h>

#include <initializer_list>
#include <new>

#include "interface.h"
#include "processors.h"

using namespace polyhead;

uint8_t polyhead::grids[kGridBytes];

namespace {

// The codes that were compiled, the best first.
#if !defined(PH_CODES)
#define PH_CODES PH_EVERY_CODE
#endif
struct Compiled {
    const Code* code;
    bool (*runs_here)();
};
#define PH_COMPILED(name) {&name##_code, runs_##name},
const Compiled kCodes[] = {PH_CODES(PH_COMPILED)};

// setup.py reads in a module which codes it has.
#define PH_NAMED(name) " " #name
__attribute__((used)) const char kNamed[] = "polyhead codes:" PH_CODES(PH_NAMED) ";";

// Nobody else may run Python while one exists; a computation that is watched lets signals in.
class Unlocked : public Watch {
  public:
    Unlocked() : Watch{look}, state_(PyEval_SaveThread()), last_(now()) {}
    ~Unlocked() { PyEval_RestoreThread(state_); }
    // What `ask` finds out with Python's lock.
    template <class Ask> bool locked(const Ask& ask) {
        PyEval_RestoreThread(state_);
        const bool found = ask();
        state_ = PyEval_SaveThread();
        return found;
    }

  private:
    static constexpr int64_t kEvery = 100;  // milliseconds
    static int64_t now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return time.tv_sec * 1000 + time.tv_nsec / 1000000;
    }
    // Whether a handler of a signal raised: KeyboardInterrupt, most often.
    static bool look(Watch& watch) {
        Unlocked& self = static_cast<Unlocked&>(watch);
        const int64_t time = now();
        if (time - self.last_ < kEvery) return false;
        const bool raised = self.locked([] { return PyErr_CheckSignals() != 0; });
        self.last_ = now();
        return raised;
    }
    PyThreadState* state_;
    int64_t last_;
};

// Memory to work in, aligned to a cache line; null where there is none left.
template <class T> class Room {
  public:
    explicit Room(int64_t count) : start_((char*)malloc(count * sizeof(T) + 64)) {}
    Room(const Room&) = delete;
    ~Room() { free(start_); }
    T* get() const { return start_ ? (T*)(((uintptr_t)start_ + 63) / 64 * 64) : nullptr; }
    void clear(int64_t count) { if (start_) __builtin_memset(get(), 0, count * sizeof(T)); }

  private:
    char* start_;
};

PyObject* answer_to(Outcome outcome) {
    if (outcome == Outcome::no_memory) return PyErr_NoMemory();
    if (PyErr_Occurred()) return nullptr;  // what a signal raised
    Py_RETURN_NONE;
}

// An exception, for functions that return an object and for those that return whether all is well.
struct Wrong {
    operator PyObject*() const { return nullptr; }
    operator bool() const { return false; }
};
Wrong wrong(const char* what) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, what);
    return {};
}

// The fields of a tuple, borrowed.
template <class Group> class Fields {
  public:
    Fields(PyObject* tuple, const char* name) : tuple_(tuple) {
        good_ = tuple && PyTuple_Check(tuple) && PyTuple_Size(tuple) == Group::size;
        if (!good_ && !PyErr_Occurred())
            PyErr_Format(PyExc_TypeError, "%s must be a tuple of %d fields", name, (int)Group::size);
    }
    explicit operator bool() const { return good_; }
    PyObject* operator[](int field) const { return PyTuple_GetItem(tuple_, field); }
    int64_t whole(int field) const { return PyLong_AsLongLong((*this)[field]); }
    float real(int field) const { return (float)PyFloat_AsDouble((*this)[field]); }

  private:
    PyObject* tuple_;
    bool good_;
};

// The arguments of a function, borrowed, of which the first two are the code and the threads.
template <class Call> class Arguments {
  public:
    Arguments(const char* function, PyObject* const* args, Py_ssize_t count) : args_(args) {
        if (count != Call::size) {
            PyErr_Format(PyExc_TypeError, "%s takes %d arguments: got %zd", function, (int)Call::size, count);
            return;
        }
        const int64_t i = whole(0), codes = sizeof kCodes / sizeof *kCodes;
        if (i < 0 || i >= codes || !kCodes[i].runs_here()) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no code %lld for this processor", (long long)i);
            return;
        }
        code = kCodes[i].code;
        const int64_t wanted = whole(1);
        threads = wanted < 1 ? 1 : wanted > 1024 ? 1024 : (int)wanted;
    }
    PyObject* operator[](int field) const { return args_[field]; }
    int64_t whole(int field) const { return PyLong_AsLongLong(args_[field]); }
    float real(int field) const { return (float)PyFloat_AsDouble(args_[field]); }
    const Code* code = nullptr;  // null: an exception is set
    int threads = 1;

  private:
    PyObject* const* args_;
};

// None leaves the view empty.
bool optional_view_of(PyObject* x, const char* name, View& v) { return x == Py_None || view_of(x, name, v); }

// A pair of tensors, or None.
bool pair_of(PyObject* pair, const char* name, View& a, View& b) {
    if (pair == Py_None) return true;
    if (!pair || !PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_TypeError, "%s must be a pair of tensors or None", name);
        return false;
    }
    return view_of(PyTuple_GetItem(pair, 0), name, a) && view_of(PyTuple_GetItem(pair, 1), name, b);
}

// x as rows of `width` numbers without gaps inside; false: an exception is set.
bool rows_of(PyObject* x, View& v) {
    return view_of(x, "x", v) && ((v.dims == 2 && v.kind <= kOfFloat16 && v.is_dense_from(1)) ||
                                  wrong("x must be [rows, features] of floating point, its rows without gaps"));
}

#include "weight_calls.h"

bool norm_from(PyObject* tuple, const char* name, int kind, int64_t features, NormWeight& n) {
    const Fields<Group_NormWeight> fields(tuple, name);
    View weight, bias;
    if (!fields || !optional_view_of(fields[Group_NormWeight::weight], name, weight) ||
        !optional_view_of(fields[Group_NormWeight::bias], name, bias))
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
    n = NormWeight{weight.at, fields.real(Group_NormWeight::eps), fields.real(Group_NormWeight::offset), bias.at,
                   fields[Group_NormWeight::centred] == Py_True, true, heads};
    return !PyErr_Occurred();
}

#include "product_calls.h"
#include "network_calls.h"

PyObject* norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = Call_norm;
    const Arguments<A> a("norm", args, count);
    View x;
    NormWeight n{};
    if (!a.code || !rows_of(a[A::x], x) || !norm_from(a[A::norm], "norm", x.kind, x.size[1], n)) return nullptr;
    void* y = made_for(a[A::y], "y", x.size[0] * x.size[1], x.kind);
    if (PyErr_Occurred()) return nullptr;
    const Unlocked unlocked;
    a.code->norm(Norm{(Dtype)x.kind, x.at, x.size[0], x.size[1], x.stride[0], n.weight, n.eps, n.offset, y, n.bias, n.centred, n.heads}, a.threads);
    Py_RETURN_NONE;
}

PyObject* rotate(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = Call_rotate;
    const Arguments<A> a("rotate", args, count);
    View x, cos, sin;
    if (!a.code || !view_of(a[A::x], "x", x) || !view_of(a[A::cos], "cos", cos) || !view_of(a[A::sin], "sin", sin))
        return nullptr;
    auto is_table = [&](const View& v) {
        int64_t numbers = 1;
        for (int d = 0; d < v.dims; ++d) numbers *= v.size[d];
        return v.kind == x.kind && v.is_dense_from(0) && numbers == x.size[1] * x.size[3];
    };
    if (x.dims != 4 || x.kind > kOfFloat16 || !x.is_dense_from(3) || !is_table(cos) || !is_table(sin))
        return wrong("x must be [B, T, N, D], its last dimension without gaps, and cos and sin T · D numbers of its dtype");
    Rotation r{};
    r.dtype = (Dtype)x.kind, r.x = x.at;
    r.batch = x.size[0], r.tokens = x.size[1], r.heads = x.size[2], r.dim = x.size[3];
    r.x_batch = x.stride[0], r.x_token = x.stride[1], r.x_head = x.stride[2];
    r.cos = cos.at, r.sin = sin.at;
    r.y = made_for(a[A::y], "y", r.batch * r.tokens * r.heads * r.dim, x.kind);
    if (PyErr_Occurred()) return nullptr;
    const Unlocked unlocked;
    a.code->rotate(r, a.threads);
    Py_RETURN_NONE;
}

#include "attention_calls.h"
#include "step_calls.h"

// codes() -> [(name, runs here)] in the order of preference.
PyObject* codes(PyObject*, PyObject*) {
    PyObject* list = PyList_New(0);
    if (!list) return nullptr;
    for (const Compiled& each : kCodes) {
        PyObject* item = Py_BuildValue("(sN)", each.code->name, PyBool_FromLong(each.runs_here()));
        if (!item || PyList_Append(list, item) < 0) {
            Py_XDECREF(item);
            Py_DECREF(list);
            return nullptr;
        }
        Py_DECREF(item);
    }
    return list;
}

// best() -> the name of the best code for this processor, compiled or not.
PyObject* best(PyObject*, PyObject*) {
#define PH_IF_BEST(name) \
    if (runs_##name()) return PyUnicode_FromString(#name);
    PH_EVERY_CODE(PH_IF_BEST)
    Py_RETURN_NONE;
}

// stranger(*tensors) -> what kind of tensor among these has no memory that is its value, or None.
PyObject* stranger(PyObject*, PyObject* const* args, Py_ssize_t count) {
    char words[128];
    for (Py_ssize_t i = 0; i < count; ++i) {
        const char* why = strangeness(args[i], words, sizeof words);
        if (PyErr_Occurred()) return nullptr;
        if (why) return PyUnicode_FromString(why);
    }
    Py_RETURN_NONE;
}

bool put(PyObject* into, const char* key, PyObject* value) {
    const bool good = value && PyDict_SetItemString(into, key, value) == 0;
    Py_XDECREF(value);
    return good;
}

PyObject* table_of(const FieldName* fields, int count) {
    PyObject* found = PyDict_New();
    for (int i = 0; found && i < count; ++i)
        if (!put(found, fields[i].name, PyUnicode_FromString(fields[i].type))) Py_CLEAR(found);
    return found;
}

template <int N> PyObject* names_of(const char* const (&names)[N]) {
    PyObject* found = PyList_New(0);
    for (int i = 0; found && i < N; ++i) {
        PyObject* name = PyUnicode_FromString(names[i]);
        if (!name || PyList_Append(found, name) < 0) Py_CLEAR(found);
        Py_XDECREF(name);
    }
    return found;
}

#include "training_calls.h"

// {number of a type of blocks: (numbers of a block, its bytes)}
PyObject* block_sizes() {
    PyObject* found = PyDict_New();
    auto add = [&](int number, int numbers, int bytes) {
        PyObject* key = found ? PyLong_FromLong(number) : nullptr;
        PyObject* value = key ? Py_BuildValue("(ii)", numbers, bytes) : nullptr;
        if (!value || PyDict_SetItem(found, key, value) < 0) Py_CLEAR(found);
        Py_XDECREF(key);
        Py_XDECREF(value);
    };
#define PH_ADD(name, number, numbers, bytes) add(number, numbers, bytes);
    PH_BLOCKS(PH_ADD)
#undef PH_ADD
    return found;
}

// Takes the grids of the IQ types: bytes, kGridBytes of them.
PyObject* take_grids(PyObject*, PyObject* const* args, Py_ssize_t count) {
    View from;
    if (count != 1) return wrong("grids takes one tensor");
    if (!view_of(args[0], "grids", from)) return nullptr;
    if (from.dims != 1 || from.kind != kOfUint8 || !from.is(0, kGridBytes) || !from.is_dense_from(0))
        return PyErr_Format(PyExc_ValueError, "grids must be %d bytes without gaps", (int)kGridBytes);
    __builtin_memcpy(grids, from.at, kGridBytes);
    Py_RETURN_NONE;
}

// interface() -> what crosses: groups and functions with their fields, dtypes, activations,
// types of blocks and limits.
PyObject* interface(PyObject*, PyObject*) {
    PyObject* found = PyDict_New();
    bool good = found;
#define PH_PUT_GROUP(group, fields) good = good && put(found, #group, table_of(k_##group, Group_##group::size));
#define PH_PUT_FUNCTION(function, fields) \
    good = good && put(found, #function, table_of(kCall_##function, Call_##function::size));
    PH_GROUPS(PH_PUT_GROUP)
    PH_FUNCTIONS(PH_PUT_FUNCTION)
    good = good && put(found, "dtypes", names_of(kDtypes)) && put(found, "activations", names_of(kActivations)) &&
           put(found, "blocks", block_sizes()) &&
           put(found, "limits", Py_BuildValue("{s:i,s:i,s:i}", "rows", kMostRows, "weights", kMostFactors, "pieces", kMostPieces));
    if (!good) Py_CLEAR(found);
    return found;
}

#define PH_METHOD(name, words) {#name, (PyCFunction)(void (*)())name, METH_FASTCALL, words}
PyMethodDef kMethods[] = {
    {"codes", codes, METH_NOARGS, "[(name, runs here)] in the order of preference."},
    {"best", best, METH_NOARGS, "The name of the best code for this processor, compiled or not."},
    {"interface", interface, METH_NOARGS, "What crosses: groups and functions, dtypes, activations, limits."},
    PH_METHOD(stranger, "What kind of tensor among these has no memory that is its value, or None."),
    {"grids", (PyCFunction)(void (*)())take_grids, METH_FASTCALL, "Takes the grids of the IQ types."},
    PH_METHOD(guard, "What must be unchanged for a description to be valid."),
    PH_METHOD(holds, "Whether everything that a guard watches is unchanged."),
    PH_METHOD(layer, "A layer as data, for step."),
    PH_METHOD(product, "Few rows of x times weights."),
    PH_METHOD(unpack, "Rows of blocks as numbers."),
    PH_METHOD(feed_forward, "A feed-forward network of few rows."),
    PH_METHOD(route, "Which experts a few rows visit."),
    PH_METHOD(sink, "What sinks leave of heads."),
    PH_METHOD(norm, "RMS norm of rows."),
    PH_METHOD(rotate, "Rotary positions."),
    PH_METHOD(head_product, "Few rows times weights, head by head."),
    PH_METHOD(attend, "Attention, forward."),
    PH_METHOD(gradients, "Attention, backward."),
    PH_METHOD(tile_sums, "Statistics of attention weights."),
    PH_METHOD(step, "One token of every batch row through a layer."),
    PH_METHOD(gated, "An activation times what it gates."),
    PH_METHOD(gated_gradients, "The gradients of both."),
    PH_METHOD(dropped, "Dropout of single numbers, and a residual path."),
    PH_METHOD(norm_gradients, "The gradients of an RMS norm."),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_native", nullptr, 0, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&kModule);
    if (module && !find_torch()) Py_CLEAR(module);
    if (module && !(guard_type = Owner<Guard>::new_type("polyhead.native._native.Guard"))) Py_CLEAR(module);
    if (module && !(layer_type = Owner<LayerData>::new_type("polyhead.native._native.Layer"))) Py_CLEAR(module);
    return module;
}
