/* Methods of DTensor, and the module `partita.tensor._hot_path`. */

#include "hot_path.h"

struct known KNOWN;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *op, *base, *dict;
} Method;

/* Is torch-function enabled, and no TorchFunctionMode there to be asked? -1: an exception. */
static int takes_calls(void) {
    PyObject *on = PyObject_CallNoArgs(KNOWN.is_enabled), *modes = NULL;
    int takes = on ? on == Py_True : -1;
    if (takes == 1) {
        modes = PyObject_CallNoArgs(KNOWN.count_modes);
        takes = modes ? PyLong_AsLong(modes) == 0 : -1;
    }
    Py_XDECREF(modes);
    Py_XDECREF(on);
    return takes;
}

static PyObject *method_call(PyObject *self, PyObject *const *in, size_t flags, PyObject *names) {
    PyObject *op = ((Method *)self)->op, *base = ((Method *)self)->base, *args, *out;
    Py_ssize_t n = PyVectorcall_NARGS(flags);
    int takes = n && !(names && PyTuple_GET_SIZE(names)) ? takes_calls() : 0;
    if (takes < 0) return NULL;
    if (!takes) return PyObject_Vectorcall(base, in, flags, names);
    if (!(args = PyTuple_New(n))) return NULL;
    for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(args, i, Py_NewRef(in[i]));
    out = run_call(op, base, base, args, NULL);
    Py_DECREF(args);
    return out;
}

static void method_dealloc(PyObject *self) {
    Py_CLEAR(((Method *)self)->op);
    Py_CLEAR(((Method *)self)->base);
    Py_CLEAR(((Method *)self)->dict);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *method_get(PyObject *self, PyObject *of, PyObject *type) {
    return of && of != Py_None ? PyMethod_New(self, of) : Py_NewRef(self);
}

static PyObject *method_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *op, *base;
    if (!PyArg_ParseTuple(args, "OO", &op, &base)) return NULL;
    Method *self = (Method *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = method_call;
    self->op = Py_NewRef(op);
    self->base = Py_NewRef(base);
    return (PyObject *)self;
}

PyTypeObject MethodType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "partita.tensor._hot_path.Method",
    .tp_doc = "A method of DTensor that skips torch's argument parser.",
    .tp_basicsize = sizeof(Method),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_vectorcall_offset = offsetof(Method, call),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = method_get,
    .tp_dictoffset = offsetof(Method, dict), /* __name__, __doc__ and the like */
    .tp_dealloc = method_dealloc,
    .tp_new = method_new,
};

/* -- the module -------------------------------------------------------------------------------- */

#define FIELD(name) {#name, &KNOWN.name}
static const struct { const char *name; PyObject **to; } FIELDS[] = {
    FIELD(DTensor), FIELD(Tensor),   FIELD(CallPlan), FIELD(Op),          FIELD(ops),
    FIELD(op_of),   FIELD(call),     FIELD(number),   FIELD(hashable),    FIELD(numbers),
    FIELD(kind),    FIELD(freeze),   FIELD(missing),  FIELD(run_locally), FIELD(is_enabled),
    FIELD(count_modes),
};

#define PLAN_SLOT(name) {&KNOWN.CallPlan, #name, &KNOWN.plan.name}
#define OP_SLOT(name) {&KNOWN.Op, #name, &KNOWN.op.name}
static const struct { PyObject **type; const char *name; Py_ssize_t *to; } SLOTS[] = {
    PLAN_SLOT(direct), PLAN_SLOT(hits),        PLAN_SLOT(kernel),  PLAN_SLOT(bare),
    PLAN_SLOT(spec),   PLAN_SLOT(local_shape), PLAN_SLOT(outputs), OP_SLOT(run),
    OP_SLOT(key),      OP_SLOT(plans),         OP_SLOT(base),
};

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

static PyObject *connect(PyObject *module, PyObject *args, PyObject *kwargs) {
    for (size_t i = 0; i < COUNT(FIELDS); i++) {
        PyObject *value = kwargs ? PyDict_GetItemString(kwargs, FIELDS[i].name) : NULL;
        if (!value) return PyErr_Format(PyExc_TypeError, "connect needs %s", FIELDS[i].name);
        Py_XSETREF(*FIELDS[i].to, Py_NewRef(value));
    }
    for (size_t i = 0; i < COUNT(SLOTS); i++) {
        PyObject *slot = PyObject_GetAttrString(*SLOTS[i].type, SLOTS[i].name);
        if (!slot) return NULL;
        int is_slot = Py_IS_TYPE(slot, &PyMemberDescr_Type);
        if (is_slot) *SLOTS[i].to = ((PyMemberDescrObject *)slot)->d_member->offset;
        Py_DECREF(slot);
        if (!is_slot) return PyErr_Format(PyExc_TypeError, "%s is no slot", SLOTS[i].name);
    }
    Py_RETURN_NONE;
}

static PyMethodDef FUNCTIONS[] = {
    {"connect", (PyCFunction)(void (*)(void))connect, METH_VARARGS | METH_KEYWORDS,
     "Take what stands for partita's classes and functions, by name."},
    {"handle", (PyCFunction)(void (*)(void))handle, METH_FASTCALL, "`DTensor.__torch_function__`."},
    {NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_hot_path", NULL, -1, FUNCTIONS};

#define NAME(field, text) KNOWN.field = PyUnicode_InternFromString(text)

PyMODINIT_FUNC PyInit__hot_path(void) {
    PyObject *module = PyModule_Create(&MODULE);
    NAME(spec_name, "_spec");
    NAME(shape_name, "shape");
    NAME(tag_name, "tag");
    NAME(run_name, "run");
    NAME(class_name, "__class__");
    NAME(inplace_name, "inplace");
    KNOWN.nothing = PyTuple_New(0);
    if (!module || PyModule_AddIntConstant(module, "FORM", FORM)) return NULL;
    if (PyModule_AddType(module, &KeyType) || PyModule_AddType(module, &MethodType)) return NULL;
    return module;
}
