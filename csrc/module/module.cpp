// The Python module: tensors and numbers in, results computed into tensors that the caller made. What
// crosses is listed in interface.h; every tensor is checked (tensor_check.h), and shapes that do not go
// together are refused here, whatever the Python side has checked before.

#include "choice.h"
#include "interface.h"
#include "rates.h"
#include "recurrence.h"
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
#define PH_PAIR(name) "(sN)"
#define PH_RUNS(name) , #name, PyBool_FromLong(runs_##name())
    return Py_BuildValue("[" PH_CODES(PH_PAIR) "]" PH_CODES(PH_RUNS));
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

// interface() -> what crosses: fields of tuples and arguments of functions by name, dtypes, activations, {number of a
// type of blocks: (numbers of a block, its bytes)} and limits.
PyObject* interface(PyObject*, PyObject*) {
#define PH_TEXTS(...) "ss"
#define PH_TEXT(name, ...) #name, #__VA_ARGS__,
#define PH_SIZES(...) "i(ii)"
#define PH_SIZE(name, number, numbers, bytes) number, numbers, bytes,
    return Py_BuildValue("{" PH_TUPLES(PH_TEXTS) PH_FUNCTIONS(PH_TEXTS) "ssss s{" PH_BLOCKS(PH_SIZES) "} s{sisisisi}}",
                         PH_TUPLES(PH_TEXT) PH_FUNCTIONS(PH_TEXT) "dtypes", kDtypes, "activations", kActivations,
                         "blocks", PH_BLOCKS(PH_SIZE) "limits", "rows", kMaxGemvRows, "step_rows", kMaxStepRows,
                         "weights", kMaxWeights, "segments", kMaxSegments);
}

#define PH_METHOD(name, ...) {#name, (PyCFunction)(void (*)())name, METH_FASTCALL, #__VA_ARGS__},
PyMethodDef kMethods[] = {
    {"codes", codes, METH_NOARGS, "[(name, runs here)] in the order of preference."},
    {"best", best, METH_NOARGS, "The name of the best code for this processor, compiled or not."},
    {"interface", interface, METH_NOARGS, "What crosses: tuples and functions, dtypes, activations, limits."},
    PH_METHOD(unsupported_tensor_kind, tensors)
    {"grids", (PyCFunction)(void (*)())take_grids, METH_FASTCALL, "grids"},
    {"rates", rates, METH_NOARGS, "The instructions that run here."},
    PH_METHOD(at_rate, name, threads, rounds)
    PH_METHOD(read_all, x, threads, rounds)
    {"end_team", end_team, METH_NOARGS, "Ends the threads that this one has for its teams."},
    PH_METHOD(guard, watched)
    PH_METHOD(holds, guard)
    {"run", run, METH_NOARGS, "What step fills for again."},
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
    if (module && !(run_type = Owner<Run>::new_type("polyhead.native._native.Run"))) Py_CLEAR(module);
    look_ahead_here = look_ahead_of_processor();
    return module;
}
