/* Key functions: as `plan.operand_key` and `plan.declared_key` make them. */

#include "hot_path.h"

#include <math.h>

#define HAS(set, type) (PySet_Contains(set, (PyObject *)(type)) == 1)

/* What a parameter is to the key; a parameter with KEYWORD is given by name only. */
enum { OPERAND, DECLARED, FLAG, UNREAD, REST, KEYWORD = 8 };
#define WHAT(kinds, i) ((kinds)[i] & ~KEYWORD)

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *slow;      /* the Python function that gives the same key */
    PyObject *names;     /* of the parameters, interned */
    PyObject *kinds;     /* one byte each, of the enum above */
    PyObject *defaults;  /* one each; `missing` where there is none */
    PyObject *harmless;  /* names of arguments that the rule does not read */
    Py_ssize_t rest;     /* from which parameter on names alone count; their number if none */
    Py_ssize_t parts;
    int flagged;
} Key;

static PyObject *frozen(PyObject *value);

/* `(list, *frozen values)` */
static PyObject *frozen_all(PyObject *values) {
    Py_ssize_t n = PyTuple_GET_SIZE(values);
    PyObject *out = PyTuple_New(n + 1);
    if (!out || Py_EnterRecursiveCall(" in the key of a call")) {
        Py_XDECREF(out);
        return NULL;
    }
    PyTuple_SET_ITEM(out, 0, Py_NewRef((PyObject *)&PyList_Type));
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *one = frozen(PyTuple_GET_ITEM(values, i));
        if (!one) {
            Py_CLEAR(out);
            break;
        }
        PyTuple_SET_ITEM(out, i + 1, one);
    }
    Py_LeaveRecursiveCall();
    return out;
}

/* As `plan.freeze_value`. */
static PyObject *frozen(PyObject *value) {
    PyTypeObject *t = Py_TYPE(value);
    if (t == &PyLong_Type || value == Py_None || t == &PyUnicode_Type) return Py_NewRef(value);
    if (IS_DTENSOR(value)) return PyObject_GetAttr(value, KNOWN.spec_name);
    if (t == &PyTuple_Type) {
        Py_ssize_t i = 0, n = PyTuple_GET_SIZE(value);
        while (i < n && HAS(KNOWN.hashable, Py_TYPE(PyTuple_GET_ITEM(value, i)))) i++;
        if (i == n) return Py_NewRef(value);
        return frozen_all(value);
    }
    if (t == &PySlice_Type) {
        PySliceObject *s = (PySliceObject *)value;
        return PyTuple_Pack(4, t, s->start, s->stop, s->step);
    }
    if (t == &PyFloat_Type) return Py_NewRef((PyObject *)t);
    if (t == &PyBool_Type) return PyTuple_Pack(2, t, value);
    if (t == &PyList_Type || PyTuple_Check(value)) {
        PyObject *same = PySequence_Tuple(value), *out = NULL;
        if (same && t == &PyList_Type) out = frozen_all(same);
        else if (same && PyTuple_CheckExact(same)) out = frozen(same);
        Py_XDECREF(same);
        return out;
    }
    return PyObject_CallOneArg(KNOWN.freeze, value);
}

static PyObject *part(int what, PyObject *value) {
    PyTypeObject *t = Py_TYPE(value);
    if (IS_DTENSOR(value)) return PyObject_GetAttr(value, KNOWN.spec_name);
    if (what == OPERAND) {
        if (value == Py_None) return Py_NewRef(value);
        if (HAS(KNOWN.numbers, t)) return Py_NewRef(KNOWN.number);
        return PyObject_CallOneArg(KNOWN.kind, value);
    }
    if (what == FLAG && t == &PyBool_Type) return Py_NewRef(value);
    return HAS(KNOWN.hashable, t) ? Py_NewRef(value) : frozen(value);
}

/* May an argument that the rule does not read pass unseen? -1: Python has to say. */
static int harmless(Key *self, PyObject *name, PyObject *value) {
    if (!HAS(KNOWN.numbers, Py_TYPE(value)) && !HAS(KNOWN.hashable, Py_TYPE(value))) return -1;
    if (PyFloat_CheckExact(value) && !isfinite(PyFloat_AS_DOUBLE(value))) return -1;
    if (!name) return self->flagged && value == Py_True ? -1 : 0;
    if (name == KNOWN.inplace_name) return value == Py_False ? 0 : -1;
    return PySet_Contains(self->harmless, name) == 1 ? 0 : -1;
}

static PyObject *named(Key *self, Py_ssize_t i, PyObject *kwargs) {
    return PyDict_GetItem(kwargs, PyTuple_GET_ITEM(self->names, i));
}

/* All arguments from `i` on, as one part of the key. */
static PyObject *rest_of(PyObject *const *args, Py_ssize_t i, Py_ssize_t n) {
    PyObject *rest = PyTuple_New(n > i ? n - i : 0), *key;
    if (!rest) return NULL;
    for (Py_ssize_t j = i; j < n; j++) PyTuple_SET_ITEM(rest, j - i, Py_NewRef(args[j]));
    key = frozen(rest);
    Py_DECREF(rest);
    return key;
}

/* Is what no parameter takes harmless, where `given` parameters were given by name? */
static int fits(
    Key *self, PyObject *const *args, Py_ssize_t n, PyObject *kwargs, Py_ssize_t given) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->names), place = 0;
    const char *kinds = PyBytes_AS_STRING(self->kinds);
    PyObject *name, *value;
    if (self->rest == count || WHAT(kinds, self->rest) != REST)
        for (Py_ssize_t i = self->rest; i < n; i++)
            if (harmless(self, NULL, args[i])) return 0;
    if (!kwargs || given == PyDict_GET_SIZE(kwargs)) return 1;
    while (PyDict_Next(kwargs, &place, &name, &value)) {
        Py_ssize_t i = 0;
        while (i < count && PyTuple_GET_ITEM(self->names, i) != name) i++;
        int taken_by_place = i < count && (WHAT(kinds, i) == REST || (i < n && i < self->rest));
        /* A parameter's name that is not interned is not found, and then not harmless either. */
        if (taken_by_place || (i == count && harmless(self, name, value))) return 0;
    }
    return 1;
}

/* The key; NULL without an exception where the Python function has to give it, or to complain. */
static PyObject *quick_key(Key *self, PyObject *const *args, Py_ssize_t n, PyObject *kwargs) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->names), at = 0, given = 0;
    const char *kinds = PyBytes_AS_STRING(self->kinds);
    PyObject *key = self->parts == 1 ? NULL : PyTuple_New(self->parts), *one, *value;
    if (self->parts != 1 && !key) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        int what = WHAT(kinds, i);
        if (what == REST) {
            one = rest_of(args, i, n);
        } else {
            if (i < n && i < self->rest) value = args[i];
            else if (kwargs && (value = named(self, i, kwargs))) given++;
            else if ((value = PyTuple_GET_ITEM(self->defaults, i)) == KNOWN.missing) goto fail;
            if (what == UNREAD && HAS(KNOWN.numbers, Py_TYPE(value))) continue;
            one = what == UNREAD ? NULL : part(what, value);
        }
        if (!one) goto fail;
        if (self->parts == 1) key = one;
        else PyTuple_SET_ITEM(key, at++, one);
    }
    if (fits(self, args, n, kwargs, given)) return key;
fail:
    Py_XDECREF(key);
    return NULL;
}

PyObject *key_of(PyObject *key, PyObject *const *args, Py_ssize_t n, PyObject *kwargs) {
    if (!Py_IS_TYPE(key, &KeyType)) return PyObject_VectorcallDict(key, args, n, kwargs);
    PyObject *found = quick_key((Key *)key, args, n, kwargs);
    if (found || PyErr_Occurred()) return found;
    return PyObject_VectorcallDict(((Key *)key)->slow, args, n, kwargs);
}

static PyObject *key_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names) {
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    PyObject *kwargs = NULL, *key;
    if (names && PyTuple_GET_SIZE(names)) {
        if (!(kwargs = PyDict_New())) return NULL;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++)
            if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(names, i), args[n + i])) {
                Py_DECREF(kwargs);
                return NULL;
            }
    }
    key = key_of(self, args, n, kwargs);
    Py_XDECREF(kwargs);
    return key;
}

static PyObject *key_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *slow, *names, *kinds, *defaults, *known;
    int flagged;
    if (!PyArg_ParseTuple(args, "OO!SO!O!p", &slow, &PyTuple_Type, &names, &kinds, &PyTuple_Type,
                          &defaults, &PySet_Type, &known, &flagged)) return NULL;
    Key *self = (Key *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(names);
    self->call = key_call;
    self->slow = Py_NewRef(slow);
    self->names = PyTuple_New(n);
    self->kinds = Py_NewRef(kinds);
    self->defaults = Py_NewRef(defaults);
    self->harmless = Py_NewRef(known);
    self->flagged = flagged;
    self->rest = n;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name = Py_NewRef(PyTuple_GET_ITEM(names, i));
        PyUnicode_InternInPlace(&name);
        PyTuple_SET_ITEM(self->names, i, name);
        char what = PyBytes_AS_STRING(kinds)[i];
        self->parts += (what & ~KEYWORD) != UNREAD;
        if ((what & KEYWORD || what == REST) && self->rest == n) self->rest = i;
    }
    return (PyObject *)self;
}

static void key_dealloc(PyObject *object) {
    Key *self = (Key *)object;
    Py_CLEAR(self->slow);
    Py_CLEAR(self->names);
    Py_CLEAR(self->kinds);
    Py_CLEAR(self->defaults);
    Py_CLEAR(self->harmless);
    Py_TYPE(object)->tp_free(object);
}

static PyMemberDef key_members[] = {
    {"slow", T_OBJECT, offsetof(Key, slow), READONLY, "The function in Python that it stands for."},
    {NULL},
};

PyTypeObject KeyType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "partita.tensor._hot_path.Key",
    .tp_doc = "An op's key function: from the arguments of a call, the key of its plan.",
    .tp_basicsize = sizeof(Key),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Key, call),
    .tp_call = PyVectorcall_Call,
    .tp_dealloc = key_dealloc,
    .tp_members = key_members,
    .tp_new = key_new,
};
