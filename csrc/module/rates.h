// The module's functions for threads, and for what the processor does at most: instruction_sets/rates.h.
#pragma once

#include "arguments.h"

#include "../common/team.h"
#include "../instruction_sets/rates.h"

namespace polyhead {

// rates() -> the instructions that run here.
inline PyObject* rates(PyObject*, PyObject*) {
    PyObject* found = PyList_New(0);
    for (const Rate& rate : kRates) {
        if (!found || !rate.runs_here()) continue;
        PyObject* name = PyUnicode_FromString(rate.name);
        if (!name || PyList_Append(found, name)) Py_CLEAR(found);
        Py_XDECREF(name);
    }
    return found;
}

// at_rate(name, threads, rounds) -> the operations that all threads have done.
inline PyObject* at_rate(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 3) return wrong("at_rate takes a name, threads and rounds");
    const int64_t threads = PyLong_AsLongLong(args[1]), rounds = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return nullptr;
    if (threads < 1 || threads > 1024 || rounds < 1) return wrong("threads and rounds must be at least 1");
    for (const Rate& rate : kRates) {
        if (!rate.runs_here() || !PyUnicode_Check(args[0])) continue;
        if (PyUnicode_CompareWithASCIIString(args[0], rate.name)) continue;
        double done = 0;
        {
            const Unlocked unlocked;
            in_team((int)threads, [&](int64_t thread, int64_t team) {
                const double own = rate.compute(rounds);
                if (thread == 0) done = own * (double)team;
            });
        }
        return PyFloat_FromDouble(done);
    }
    return PyErr_Format(PyExc_ValueError, "rates must be one that runs here: got %S", args[0]);
}

// read_all(x, threads, rounds): reads a tensor so often; False where no instructions for it run here.
inline PyObject* read_all(PyObject*, PyObject* const* args, Py_ssize_t count) {
    View x;
    if (count != 3) return wrong("read_all takes a tensor, threads and rounds");
    if (!view_of(args[0], "x", x)) return nullptr;
    const int64_t threads = PyLong_AsLongLong(args[1]), rounds = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return nullptr;
    constexpr int64_t kPiece = 512;
    if (x.kind != kOfUint8 || !x.is_dense_from(0) || x.numbers() % kPiece) return wrong("x must be bytes, in pieces of 512");
    for (const Reader& reader : kReaders) {
        if (!reader.runs_here()) continue;
        {
            const Unlocked unlocked;
            over_range(x.numbers() / kPiece, threads < 1 ? 1 : (int)threads, [&](int64_t first, int64_t last) {
                for (int64_t n = 0; n < rounds; ++n) reader.read((const char*)x.at + first * kPiece, (last - first) * kPiece);
            });
        }
        Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

// end_team(): ends the threads that this one has for its teams.
inline PyObject* end_team(PyObject*, PyObject*) {
    if (!barrier_of_team && !kept_team) end_team();
    Py_RETURN_NONE;
}

}  // namespace polyhead
