// The Python module: tensors and numbers in, results computed into tensors that the caller made. What
// crosses is listed in interface.h; every tensor passes the gate (tensor_check.h), and shapes that do not go
// together are refused here, whatever the Python side has checked before.

#include "interface.h"
#include "step.h"
#include "training.h"

using namespace polyhead;

uint8_t polyhead::grids[kGridBytes];

namespace {

// setup.py reads in a module which codes it has.
#define PH_NAMED(name) " " #name
__attribute__((used)) const char kNamed[] = "polyhead codes:" PH_CODES(PH_NAMED) ";";

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

// unsupported_tensor_kind(*tensors) -> of the first whose memory is not its value, or None.
PyObject* unsupported_tensor_kind(PyObject*, PyObject* const* args, Py_ssize_t count) {
    char words[128];
    for (Py_ssize_t i = 0; i < count; ++i) {
        const char* why = unsupported_kind(args[i], words, sizeof words);
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

template <int N> PyObject* names_of(const char* const (&names)[N]) {
    PyObject* found = PyList_New(0);
    for (int i = 0; found && i < N; ++i) {
        PyObject* name = PyUnicode_FromString(names[i]);
        if (!name || PyList_Append(found, name) < 0) Py_CLEAR(found);
        Py_XDECREF(name);
    }
    return found;
}

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

// interface() -> what crosses: fields of tuples, arguments of functions, dtypes, activations, types of blocks, limits.
PyObject* interface(PyObject*, PyObject*) {
    PyObject* found = PyDict_New();
    bool good = found;
#define PH_PUT(name, ...) good = good && put(found, #name, PyUnicode_FromString(#__VA_ARGS__));
    PH_TUPLES(PH_PUT)
    PH_FUNCTIONS(PH_PUT)
    good = good && put(found, "dtypes", names_of(kDtypes)) && put(found, "activations", names_of(kActivations)) &&
           put(found, "blocks", block_sizes()) &&
           put(found, "limits", Py_BuildValue("{s:i,s:i,s:i}", "rows", kMaxGemvRows, "weights", kMaxWeights, "segments", kMaxSegments));
    if (!good) Py_CLEAR(found);
    return found;
}

#define PH_METHOD(name, ...) {#name, (PyCFunction)(void (*)())name, METH_FASTCALL, #__VA_ARGS__},
PyMethodDef kMethods[] = {
    {"codes", codes, METH_NOARGS, "[(name, runs here)] in the order of preference."},
    {"best", best, METH_NOARGS, "The name of the best code for this processor, compiled or not."},
    {"interface", interface, METH_NOARGS, "What crosses: tuples and functions, dtypes, activations, limits."},
    PH_METHOD(unsupported_tensor_kind, tensors)
    {"grids", (PyCFunction)(void (*)())take_grids, METH_FASTCALL, "grids"},
    PH_METHOD(guard, watched)
    PH_METHOD(holds, guard)
    PH_FUNCTIONS(PH_METHOD)
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
