// What every function of the module needs: its arguments, Python's lock and exceptions.
#pragma once

#include "tensor_check.h"

#include <time.h>

#include "../common/arena.h"
#include "../instruction_sets/code.h"
#include "../instruction_sets/processors.h"

namespace polyhead {

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

// Nobody else may run Python while one exists; a computation that is watched lets signals in.
class Unlocked : public InterruptCheck {
  public:
    Unlocked() : InterruptCheck{check_signals}, state_(PyEval_SaveThread()), last_(now()) {}
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
    static bool check_signals(InterruptCheck& check) {
        Unlocked& self = static_cast<Unlocked&>(check);
        const int64_t time = now();
        if (time - self.last_ < kEvery) return false;
        const bool raised = self.locked([] { return PyErr_CheckSignals() != 0; });
        self.last_ = now();
        return raised;
    }
    PyThreadState* state_;
    int64_t last_;
};

// Calls compute() without Python's lock, unless an exception is set.
template <class Compute> inline PyObject* run(const Compute& compute) {
    if (PyErr_Occurred()) return nullptr;
    {
        const Unlocked unlocked;
        compute();
    }
    Py_RETURN_NONE;
}
template <class Compute> inline PyObject* run(const Scratch& scratch, const Compute& compute) {
    return scratch ? run(compute) : PyErr_NoMemory();
}

// The same for what may be interrupted: compute(check) returns how it ended.
template <class Compute> inline PyObject* run_interruptible(const Compute& compute) {
    Outcome outcome;
    {
        Unlocked unlocked;
        outcome = compute(unlocked);
    }
    if (outcome == Outcome::no_memory) return PyErr_NoMemory();
    if (PyErr_Occurred()) return nullptr;  // what a signal raised
    Py_RETURN_NONE;
}

// An exception, for functions that return an object and for those that return whether all is well.
struct Wrong {
    operator PyObject*() const { return nullptr; }
    operator bool() const { return false; }
};
inline Wrong wrong(const char* what) {
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
    int64_t as_int64(int field) const { return PyLong_AsLongLong((*this)[field]); }
    float as_float(int field) const { return (float)PyFloat_AsDouble((*this)[field]); }

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
        const int64_t i = as_int64(0), codes = sizeof kCodes / sizeof *kCodes;
        if (i < 0 || i >= codes || !kCodes[i].runs_here()) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no code %lld for this processor", (long long)i);
            return;
        }
        code = kCodes[i].code;
        const int64_t wanted = as_int64(1);
        threads = wanted < 1 ? 1 : wanted > 1024 ? 1024 : (int)wanted;
    }
    PyObject* operator[](int field) const { return args_[field]; }
    int64_t as_int64(int field) const { return PyLong_AsLongLong(args_[field]); }
    float as_float(int field) const { return (float)PyFloat_AsDouble(args_[field]); }
    const Code* code = nullptr;  // null: an exception is set
    int threads = 1;

  private:
    PyObject* const* args_;
};

// None leaves the view empty.
inline bool optional_view_of(PyObject* x, const char* name, View& v) { return x == Py_None || view_of(x, name, v); }

// A pair of tensors, or None.
inline bool pair_of(PyObject* pair, const char* name, View& a, View& b) {
    if (pair == Py_None) return true;
    if (!pair || !PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_TypeError, "%s must be a pair of tensors or None", name);
        return false;
    }
    return view_of(PyTuple_GetItem(pair, 0), name, a) && view_of(PyTuple_GetItem(pair, 1), name, b);
}

// x as rows of `width` numbers without gaps inside; false: an exception is set.
inline bool rows_of(PyObject* x, View& v) {
    return view_of(x, "x", v) && ((v.dims == 2 && v.kind <= kOfFloat16 && v.is_dense_from(1)) ||
                                  wrong("x must be [rows, features] of floating point, its rows without gaps"));
}

}  // namespace polyhead
