/* `DTensor.__torch_function__`, and how a plan is found and run: as `dispatch.handle`. */

#include "hot_path.h"

static int retag(PyObject *out, PyObject *spec) {
    if (PyObject_SetAttr(out, KNOWN.class_name, KNOWN.DTensor)) return -1;
    return PyObject_SetAttr(out, KNOWN.spec_name, spec);
}

/* Is `out` a new local tensor of this shape? */
static int promised(PyObject *out, PyObject *local_shape) {
    if (Py_TYPE(out) != (PyTypeObject *)KNOWN.Tensor) return 0;
    if (!local_shape || local_shape == Py_None) return 0;
    PyObject *has = PyObject_GetAttr(out, KNOWN.shape_name);
    int same = has ? PyObject_RichCompareBool(has, local_shape, Py_EQ) : -1;
    Py_XDECREF(has);
    return same;
}

/* As the loop over `outputs` in `CallPlan.tag`; 0 where that has to look. */
static int tag_several(PyObject *outs, PyObject *told) {
    if (!PyList_CheckExact(outs) && !PyTuple_CheckExact(outs)) return 0;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(outs);
    if (!told || PyTuple_GET_SIZE(told) != n) return 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *out = PySequence_Fast_GET_ITEM(outs, i);
        int fine = promised(out, PyTuple_GET_ITEM(PyTuple_GET_ITEM(told, i), 1));
        if (fine != 1) return fine;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *spec = PyTuple_GET_ITEM(PyTuple_GET_ITEM(told, i), 0);
        if (retag(PySequence_Fast_GET_ITEM(outs, i), spec)) return -1;
    }
    return 1;
}

static int count_hit(PyObject *plan) {
    PyObject *hits = SLOT(plan, KNOWN.plan.hits);
    PyObject *more = PyLong_FromSsize_t(PyLong_AsSsize_t(hits) + 1);
    if (!more) return -1;
    SLOT(plan, KNOWN.plan.hits) = more;
    Py_DECREF(hits);
    return 0;
}

/* Run the kernel of a direct plan on the pieces, and tag what comes out. */
static PyObject *run_direct(PyObject *plan, PyObject *base, PyObject *args, PyObject *kwargs) {
    PyObject *kernel = SLOT(plan, KNOWN.plan.kernel), *bare = SLOT(plan, KNOWN.plan.bare), *out;
    if (!kernel || kernel == Py_None) {
        kernel = base;
        if (bare && bare != Py_None
            && PyLong_AsSsize_t(PyTuple_GET_ITEM(bare, 1)) == PyTuple_GET_SIZE(args)) {
            kernel = PyTuple_GET_ITEM(bare, 0);
            kwargs = NULL;
        }
    }
    PyObject *call[4] = {kernel, KNOWN.nothing, args, kwargs};
    Py_INCREF(kernel);
    out = PyObject_Vectorcall(KNOWN.run_locally, call, kwargs ? 4 : 3, NULL);
    Py_DECREF(kernel);
    /* In place, nothing is new: of a direct plan the operand's shape is what it was. */
    if (!out || IS_DTENSOR(out)) return out;
    int fine = promised(out, SLOT(plan, KNOWN.plan.local_shape));
    if (fine == 1) fine = retag(out, SLOT(plan, KNOWN.plan.spec)) ? -1 : 1;
    else if (fine == 0) fine = tag_several(out, SLOT(plan, KNOWN.plan.outputs));
    if (fine == 1) return out;
    PyObject *tagged = fine < 0 ? NULL : PyObject_CallMethodOneArg(plan, KNOWN.tag_name, out);
    Py_DECREF(out);
    return tagged;
}

/* The plan of a call, a new reference; NULL without an exception where there is none. */
static PyObject *find_plan(PyObject *op, PyObject *args, PyObject *kwargs) {
    PyObject *key_function = Py_NewRef(SLOT(op, KNOWN.op.key)), *plan = NULL;
    PyObject **first = &PyTuple_GET_ITEM(args, 0);
    PyObject *key = key_of(key_function, first, PyTuple_GET_SIZE(args), kwargs);
    Py_DECREF(key_function);
    if (key) {
        plan = PyDict_GetItemWithError(SLOT(op, KNOWN.op.plans), key);
        if (plan && !Py_IS_TYPE(plan, (PyTypeObject *)KNOWN.CallPlan)) plan = NULL;
        Py_XINCREF(plan);
        Py_DECREF(key);
    }
    /* Arguments that do not fit, or that have no hash: the long way says what is to be said. */
    if (!plan && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Clear();
    return plan;
}

/* The call of `func`, whose Op is `op`. */
PyObject *run_call(PyObject *op, PyObject *func, PyObject *base, PyObject *args, PyObject *kwargs) {
    PyObject *plan = find_plan(op, args, kwargs);
    PyObject *out = NULL, *named = NULL;
    if (!plan && PyErr_Occurred()) return NULL;
    if (plan && count_hit(plan)) goto done;
    if (plan && SLOT(plan, KNOWN.plan.direct) == Py_True) {
        out = run_direct(plan, base, args, kwargs);
        goto done;
    }
    if (!(named = kwargs ? Py_NewRef(kwargs) : PyDict_New())) goto done;
    if (plan) out = PyObject_CallMethodObjArgs(plan, KNOWN.run_name, func, args, named, NULL);
    else out = PyObject_CallFunctionObjArgs(KNOWN.call, func, args, named, NULL);
done:
    Py_XDECREF(named);
    Py_XDECREF(plan);
    return out;
}

/* What runs instead of a plan: `run(func, args, kwargs, op)`. */
static PyObject *run_instead(
    PyObject *run, PyObject *func, PyObject *args, PyObject *kwargs, PyObject *op) {
    PyObject *named = kwargs ? Py_NewRef(kwargs) : PyDict_New(), *out = NULL;
    Py_INCREF(run);
    if (named) out = PyObject_CallFunctionObjArgs(run, func, args, named, op, NULL);
    Py_DECREF(run);
    Py_XDECREF(named);
    return out;
}

PyObject *handle(PyObject *module, PyObject *const *in, Py_ssize_t n) {
    if (n < 2 || n > 4) return PyErr_Format(PyExc_TypeError, "handle takes 2 to 4 arguments");
    PyObject *func = in[0], *kwargs = n > 3 && in[3] != Py_None ? in[3] : NULL, *out;
    PyObject *op = PyDict_GetItemWithError(KNOWN.ops, func);
    if (!op && PyErr_Occurred()) return NULL;
    PyObject *args = n > 2 ? PySequence_Tuple(in[2]) : Py_NewRef(KNOWN.nothing);
    op = op ? Py_NewRef(op) : PyObject_CallOneArg(KNOWN.op_of, func);
    int wrong = kwargs && !PyDict_Check(kwargs);
    if (wrong) PyErr_SetString(PyExc_TypeError, "arguments by name are no dictionary");
    if (kwargs && !wrong && !PyDict_GET_SIZE(kwargs)) kwargs = NULL;
    if (!args || !op || wrong) {
        out = NULL;
    } else if (SLOT(op, KNOWN.op.run) != Py_None) {
        out = run_instead(SLOT(op, KNOWN.op.run), func, args, kwargs, op);
    } else {
        PyObject *base = Py_NewRef(SLOT(op, KNOWN.op.base));
        out = run_call(op, func, base, args, kwargs);
        Py_DECREF(base);
    }
    Py_XDECREF(args);
    Py_XDECREF(op);
    return out;
}
