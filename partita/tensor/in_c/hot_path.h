/* The hot path of dispatch in C: what `dispatch.py` and `plan.py` do in Python.

   A step runs thousands of small ops, and what Python takes to find a plan, run a kernel and tag
   its result is as long as a small kernel takes. Here are the three callables of that path. Each
   stands in for its Python twin and hands everything unusual over to it:

     keys.c      Key: an op's key function: from the arguments of a call, the key of its plan
     dispatch.c  handle: `DTensor.__torch_function__`
     methods.c   Method: an operator or method of DTensor that skips torch's argument parser

   Only Python's own C interface is used, so that one build serves every version of torch. Objects
   of classes with `__slots__` are read by the offsets of their slots. */

#ifndef PARTITA_HOT_PATH_H
#define PARTITA_HOT_PATH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

/* Which form of the contract with Python this is: as `plan.FORM`, raised with each change. */
#define FORM 1

/* What `connect` is given, and names. They live as long as the process. */
struct known {
    PyObject *DTensor, *Tensor, *CallPlan, *Op, *ops, *op_of, *call, *number, *hashable, *numbers,
        *kind, *freeze, *missing, *run_locally, *is_enabled, *count_modes;
    PyObject *spec_name, *shape_name, *tag_name, *run_name, *class_name, *inplace_name, *nothing;
    struct { Py_ssize_t direct, hits, kernel, bare, spec, local_shape, outputs; } plan;
    struct { Py_ssize_t run, key, plans, base; } op;
};
extern struct known KNOWN;

#define SLOT(object, offset) (*(PyObject **)((char *)(object) + (offset)))
#define IS_DTENSOR(object) (Py_TYPE(object) == (PyTypeObject *)KNOWN.DTensor)

extern PyTypeObject KeyType, MethodType;

/* The key of a call by `key`, a Key or any other key function. */
PyObject *key_of(PyObject *key, PyObject *const *args, Py_ssize_t n, PyObject *kwargs);

/* The call of `func`, whose Op is `op`; `base` is what runs on the pieces. `kwargs` may be NULL. */
PyObject *run_call(PyObject *op, PyObject *func, PyObject *base, PyObject *args, PyObject *kwargs);

PyObject *handle(PyObject *module, PyObject *const *args, Py_ssize_t n);

#endif
