/* The ordinary step of both sides: what Python does as well, at a fraction of its cost.
 *
 * Nothing is decided here that Python does not decide in the same way, and whatever is out of the
 * ordinary is left to Python: `worker/env_runner.py` says what an ordinary step of a worker is,
 * `core/submit.py` and `core/collect.py` what one of a trainer is. Without this module all of envmgr
 * works as it does with it (`envmgr/hot.py` says when it is used). Numbers that both know (columns, flags,
 * phases) are given by Python when objects are made; none of them stands here.
 *
 * The limited API of Python 3.11, without headers of numpy: arrays are known by their buffers.
 *
 * Signals: handlers run in code of Python only, so between two calls of Python code all that is
 * done here is done at once.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define ABI 11

static PyObject *name_step, *name_fields, *name_abnormal, *name_nbytes, *name_kind;

static double monotonic(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Take a view of a column of numbers, or of an array: 0 if it has this many dimensions, else -1. */
static int view_of(PyObject *object, Py_buffer *view, int flags, int ndim, Py_ssize_t itemsize) {
    if (PyObject_GetBuffer(object, view, flags | PyBUF_STRIDES | PyBUF_FORMAT) < 0) {
        view->obj = NULL;
        return -1;
    }
    if ((ndim >= 0 && view->ndim != ndim) || (itemsize > 0 && view->itemsize != itemsize)) {
        PyErr_SetString(PyExc_ValueError, "a column of another form");
        return -1;
    }
    return 0;
}

/* The address of an item of a column of one dimension; NULL, with an error, if there is none. */
static void *item_of(const Py_buffer *column, Py_ssize_t index) {
    if (index < 0 || index >= column->shape[0]) {
        PyErr_SetString(PyExc_IndexError, "a row that the column does not have");
        return NULL;
    }
    return (char *)column->buf + index * column->strides[0];
}

/* What allocates tuples of a type, which `tuple_by` fills; NULL: `tuple` itself makes them. From Python 3.14 on
 * tuples keep their hash: those that were only allocated would have that of 0. */
static allocfunc allocator_of(PyObject *type) {
    return Py_Version >= 0x030E0000 ? NULL : (allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc);
}

/* A tuple of this type, which takes these items over; without them, whatever becomes of it. */
static PyObject *tuple_by(allocfunc alloc, PyObject *type, PyObject **items, Py_ssize_t count) {
    PyObject *made = alloc == NULL ? PyTuple_New(count) : alloc((PyTypeObject *)type, count);
    for (Py_ssize_t k = 0; k < count; k++) {
        if (made == NULL)
            Py_DECREF(items[k]);
        else
            PyTuple_SetItem(made, k, items[k]); /* nothing is made meanwhile that could look at it */
    }
    if (alloc != NULL || made == NULL)
        return made;
    PyObject *plain = made, *args = PyTuple_Pack(1, plain);
    made = NULL;
    if (args != NULL)
        made = ((newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new))((PyTypeObject *)type, args, NULL);
    Py_XDECREF(args);
    Py_DECREF(plain);
    return made;
}

/* -- the worker: infos that are records ------------------------------------------------------- */

#define MOST_FIELDS 32
#define RECORD_BYTES 1024

typedef struct {
    PyObject_HEAD
    PyObject *otherwise; /* (info): writes an info that is another one, and returns whether it has */
    Py_buffer record, numbers, versions;
    uint8_t *number;     /* says of which form the record is */
    int64_t *version;    /* of what is known of forms; what was learnt before does not hold */
    int64_t learnt_at;
    PyObject *keys, *types; /* of the infos that are written here; NULL: of none */
    int count;
    char codes[MOST_FIELDS]; /* of their values, as those of `struct` */
    uint16_t offsets[MOST_FIELDS];
    uint8_t form;
    Py_ssize_t nbytes;
    char packed[RECORD_BYTES];
} PlainInfos;

static int infos_traverse(PlainInfos *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->otherwise);
    Py_VISIT(self->keys);
    Py_VISIT(self->types);
    return 0;
}

static int infos_clear(PlainInfos *self) {
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->keys);
    Py_CLEAR(self->types);
    return 0;
}

static void infos_dealloc(PlainInfos *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    infos_clear(self);
    PyBuffer_Release(&self->record);
    PyBuffer_Release(&self->numbers);
    PyBuffer_Release(&self->versions);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyObject *infos_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"otherwise", "record", "numbers", "row", "versions", NULL};
    PyObject *otherwise, *record, *numbers, *versions;
    Py_ssize_t row;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOnO", names, &otherwise, &record, &numbers, &row,
                                     &versions))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PlainInfos *self = (PlainInfos *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (view_of(record, &self->record, PyBUF_WRITABLE, 1, 1) < 0 ||
        view_of(numbers, &self->numbers, PyBUF_WRITABLE, 1, sizeof(uint8_t)) < 0 ||
        view_of(versions, &self->versions, 0, 1, sizeof(int64_t)) < 0 ||
        (self->number = item_of(&self->numbers, row)) == NULL ||
        (self->version = item_of(&self->versions, 0)) == NULL)
        goto failed;
    if (!PyBuffer_IsContiguous(&self->record, 'C')) {
        PyErr_SetString(PyExc_ValueError, "a record of another form");
        goto failed;
    }
    self->otherwise = Py_NewRef(otherwise);
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

PyDoc_STRVAR(learn_doc,
             "learn(version, form, presence, keys, types, codes, offsets, nbytes)\n--\n\n"
             "Write infos with these keys and values of these types, as long as this version holds.");

static PyObject *infos_learn(PlainInfos *self, PyObject *args) {
    PyObject *keys, *types, *offsets;
    const char *codes;
    long long version;
    unsigned int presence;
    unsigned char form;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "LbIO!O!sO!n", &version, &form, &presence, &PyTuple_Type, &keys, &PyTuple_Type,
                          &types, &codes, &PyTuple_Type, &offsets, &nbytes))
        return NULL;
    Py_ssize_t count = PyTuple_Size(keys);
    if (count < 1 || count > MOST_FIELDS || PyTuple_Size(types) != count ||
        (Py_ssize_t)strlen(codes) != count || PyTuple_Size(offsets) != count ||
        nbytes < (Py_ssize_t)sizeof presence || nbytes > RECORD_BYTES || nbytes > self->record.len)
        goto unsound;
    uint16_t found[MOST_FIELDS];
    for (Py_ssize_t k = 0; k < count; k++) {
        static const char known[] = "dqQiIhHbB?";
        static const int sizes[] = {8, 8, 8, 4, 4, 2, 2, 1, 1, 1};
        const char *code = strchr(known, codes[k]);
        Py_ssize_t offset = PyLong_AsSsize_t(PyTuple_GetItem(offsets, k));
        if (PyErr_Occurred())
            return NULL;
        if (code == NULL || offset < (Py_ssize_t)sizeof presence || offset > nbytes - sizes[code - known] ||
            !PyUnicode_CheckExact(PyTuple_GetItem(keys, k)))
            goto unsound;
        found[k] = (uint16_t)offset;
    }
    PyObject *keys_before = self->keys, *types_before = self->types;
    self->keys = Py_NewRef(keys);
    self->types = Py_NewRef(types);
    self->count = (int)count;
    memcpy(self->codes, codes, count);
    memcpy(self->offsets, found, sizeof found);
    memset(self->packed, 0, sizeof self->packed);
    memcpy(self->packed, &presence, sizeof presence);
    self->nbytes = nbytes;
    self->form = form;
    self->learnt_at = version;
    Py_XDECREF(keys_before);
    Py_XDECREF(types_before);
    return Py_NewRef(Py_None);
unsound:
    PyErr_SetString(PyExc_ValueError, "these are not the fields of an info");
    return NULL;
}

/* Pack a value, of the type that was learnt: 1; 0 if it is too large. */
static int pack(char code, char *at, PyObject *value) {
    if (code == 'd') {
        double number = PyFloat_AsDouble(value);
        memcpy(at, &number, sizeof number);
    } else if (code == '?') {
        *at = value == Py_True || (value != Py_False && PyObject_IsTrue(value) == 1);
    } else {
        PyObject *index = PyLong_CheckExact(value) ? Py_NewRef(value) : PyNumber_Index(value);
        if (index == NULL)
            goto failed;
        union {
            int64_t q;
            uint64_t Q;
            int32_t i;
            uint32_t I;
            int16_t h;
            uint16_t H;
            int8_t b;
            uint8_t B;
        } number = {0};
        int64_t plain = 0;
        if (code == 'Q')
            number.Q = PyLong_AsUnsignedLongLong(index);
        else
            plain = PyLong_AsLongLong(index);
        Py_DECREF(index);
        size_t size = 8;
        switch (code) {
        case 'q': number.q = plain; break;
        case 'i': number.i = (int32_t)plain; size = 4; break;
        case 'I': number.I = (uint32_t)plain; size = 4; break;
        case 'h': number.h = (int16_t)plain; size = 2; break;
        case 'H': number.H = (uint16_t)plain; size = 2; break;
        case 'b': number.b = (int8_t)plain; size = 1; break;
        case 'B': number.B = (uint8_t)plain; size = 1; break;
        }
        memcpy(at, &number, size);
    }
    if (!PyErr_Occurred())
        return 1;
failed:
    PyErr_Clear();
    return 0;
}

/* Write an info, a dict that is not empty: a new reference to whether it is written. */
static PyObject *write_info(PlainInfos *self, PyObject *info) {
    if (self->keys == NULL || *self->version != self->learnt_at || !PyDict_CheckExact(info) ||
        PyDict_Size(info) != self->count)
        return PyObject_CallFunctionObjArgs(self->otherwise, info, NULL);
    PyObject *key, *value;
    Py_ssize_t position = 0;
    for (int k = 0; PyDict_Next(info, &position, &key, &value); k++) {
        PyObject *known = PyTuple_GetItem(self->keys, k);
        if ((key != known && !(PyUnicode_CheckExact(key) && PyUnicode_Compare(key, known) == 0)) ||
            (PyObject *)Py_TYPE(value) != PyTuple_GetItem(self->types, k) ||
            !pack(self->codes[k], self->packed + self->offsets[k], value))
            return PyObject_CallFunctionObjArgs(self->otherwise, info, NULL);
    }
    memcpy(self->record.buf, self->packed, self->nbytes);
    *self->number = self->form;
    return Py_NewRef(Py_True);
}

static PyObject *infos_call(PlainInfos *self, PyObject *args, PyObject *kwargs) {
    PyObject *info;
    if (!PyArg_ParseTuple(args, "O", &info))
        return NULL;
    return write_info(self, info);
}

static PyMethodDef infos_methods[] = {
    {"learn", (PyCFunction)infos_learn, METH_VARARGS, learn_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot infos_slots[] = {
    {Py_tp_new, infos_new},
    {Py_tp_dealloc, infos_dealloc},
    {Py_tp_traverse, infos_traverse},
    {Py_tp_clear, infos_clear},
    {Py_tp_call, infos_call},
    {Py_tp_methods, infos_methods},
    {Py_tp_doc, "Writes those infos of an env that are mostly the same: see `wire.info_forms.InfoWriter`."},
    {0, NULL},
};

static PyType_Spec infos_spec = {
    "envmgr._hot.PlainInfos", sizeof(PlainInfos), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, infos_slots,
};

/* -- infos of envs in the trainer's process ----------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *infos;     /* a list: where the trainer finds those of each env */
    PyObject *otherwise; /* (info): hands over an info that is another one, and returns whether it has */
    PyObject *types;     /* those of values that a copy may share */
    Py_ssize_t row;
} HandedInfos;

static int handed_traverse(HandedInfos *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->infos);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->types);
    return 0;
}

static int handed_clear(HandedInfos *self) {
    Py_CLEAR(self->infos);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->types);
    return 0;
}

static void handed_dealloc(HandedInfos *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    handed_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyObject *handed_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"infos", "row", "otherwise", "types", NULL};
    PyObject *infos, *otherwise, *types;
    Py_ssize_t row;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!nOO!", names, &PyList_Type, &infos, &row,
                                     &otherwise, &PyTuple_Type, &types))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    HandedInfos *self = (HandedInfos *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->infos = Py_NewRef(infos);
    self->otherwise = Py_NewRef(otherwise);
    self->types = Py_NewRef(types);
    self->row = row;
    return (PyObject *)self;
}

/* Whether a tuple has this type; no code but this is run, unlike for looking it up by a hash. */
static int has_type(PyObject *types, PyObject *type) {
    for (Py_ssize_t k = PyTuple_Size(types); k-- > 0;)
        if (PyTuple_GetItem(types, k) == type)
            return 1;
    return 0;
}

/* Hand over a copy of an info: a new reference to whether that was done. */
static PyObject *hand_over(HandedInfos *self, PyObject *info) {
    PyObject *key, *value, *known = NULL;
    Py_ssize_t position = 0;
    if (!PyDict_CheckExact(info))
        return PyObject_CallFunctionObjArgs(self->otherwise, info, NULL);
    while (PyDict_Next(info, &position, &key, &value)) {
        PyObject *type = (PyObject *)Py_TYPE(value);
        if (type != known && !has_type(self->types, type))
            return PyObject_CallFunctionObjArgs(self->otherwise, info, NULL);
        known = type;
    }
    PyObject *copy = PyDict_Copy(info);
    if (copy == NULL || PyList_SetItem(self->infos, self->row, copy) < 0) /* which takes it over */
        return NULL;
    return Py_NewRef(Py_True);
}

static PyObject *handed_call(HandedInfos *self, PyObject *args, PyObject *kwargs) {
    PyObject *info;
    if (!PyArg_ParseTuple(args, "O", &info))
        return NULL;
    return hand_over(self, info);
}

static PyType_Slot handed_slots[] = {
    {Py_tp_new, handed_new},
    {Py_tp_dealloc, handed_dealloc},
    {Py_tp_traverse, handed_traverse},
    {Py_tp_clear, handed_clear},
    {Py_tp_call, handed_call},
    {Py_tp_doc, "Hands infos over to the trainer in the same process: see `worker.sinks.BlockSink`."},
    {0, NULL},
};

static PyType_Spec handed_spec = {
    "envmgr._hot.HandedInfos", sizeof(HandedInfos), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, handed_slots,
};

/* Write an info by whatever writes those of an env: a new reference to whether it is written. */
static PyObject *write_by(PyObject *writer, PyObject *info) {
    void *call = PyType_GetSlot(Py_TYPE(writer), Py_tp_call);
    if (call == (void *)infos_call)
        return write_info((PlainInfos *)writer, info);
    if (call == (void *)handed_call)
        return hand_over((HandedInfos *)writer, info);
    return PyObject_CallFunctionObjArgs(writer, info, NULL);
}

/* -- the worker: one step of one env ---------------------------------------------------------- */

#define MOST_BUFFERS 16
#define MOST_LEAVES 16

/* An array, a number or a text that observations consist of. */
typedef struct {
    char finite;        /* 'f' or 'd': its numbers have to be finite; else 0 */
    char takes_int;     /* it may be an int of Python */
    PyObject *number;   /* the type of numpy's numbers that it may be, besides arrays; NULL: none */
    PyObject *pack;     /* of texts: (text): the bytes to write; NULL of others */
    PyObject *text, *packed; /* the latest of them, which mostly is the next one, too */
} Leaf;

/* What was found in the place of a leaf, and fits. */
typedef struct {
    PyObject *source;   /* an array, a number of numpy's or bytes; NULL: nothing yet, or an int */
    Py_buffer view;     /* of what is no bytes */
    int64_t number;     /* the int */
    char kind;          /* 0: nothing was found */
} Found;

enum { AN_ARRAY = 1, A_SPREAD_ARRAY, AN_INT, A_TEXT };

typedef struct {
    PyObject_HEAD
    PyObject *env;      /* its `step` is called */
    PyObject *rest;     /* (token, result): goes on with a result that is out of the ordinary */
    PyObject *failed;   /* (token, error): goes on with what `env.step`, or its result, has raised; with a
                         * third argument, True, if that was the end of an episode, which counts all the same */
    PyObject *end;      /* (token, flags, terminated, truncated): goes on with the end of an episode */
    PyObject *write_info; /* (info): writes an info that is not empty, and returns whether it has */
    PyObject *ndarray, *float64;
    PyObject *fields;   /* of an `EnvTimestep`; NULL if the env returns gymnasium's five values */
    PyObject *four;     /* a type that has these fields, once one was seen */
    PyObject *skeleton; /* how observations are nested: the number of a leaf, or a dict or tuple of such */
    PyObject *arrays;   /* the buffers, a tuple of a target for each leaf, for what numpy copies */
    Py_buffer *targets; /* the same, one tuple after the other */
    Leaf *leaves;
    int n_targets, n_leaves, n_buffers;
    Py_buffer cell, rewards, flags, replies;
    uint8_t *buffer;    /* that the next observation goes into */
    uint8_t after[MOST_BUFFERS]; /* for each buffer the one after it */
    double *reward;
    uint16_t *flag;
    uint64_t *reply;
    uint16_t codes[MOST_BUFFERS];         /* what is flagged of a reward that is a float, by buffer */
    uint16_t codes_of_float32[MOST_BUFFERS]; /* likewise of one that is an array of one number */
    uint16_t codes_of_float64[MOST_BUFFERS];
    char refuses_non_finite; /* rewards have to be finite */
    uint16_t has_info;  /* the flag of a reply with an info */
} OrdinaryStep;

static int step_traverse(OrdinaryStep *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->env);
    Py_VISIT(self->rest);
    Py_VISIT(self->failed);
    Py_VISIT(self->end);
    Py_VISIT(self->write_info);
    Py_VISIT(self->skeleton);
    Py_VISIT(self->arrays);
    Py_VISIT(self->four);
    for (int k = 0; k < self->n_leaves; k++)
        Py_VISIT(self->leaves[k].pack);
    return 0;
}

static int step_clear(OrdinaryStep *self) {
    Py_CLEAR(self->env);
    Py_CLEAR(self->rest);
    Py_CLEAR(self->failed);
    Py_CLEAR(self->end);
    Py_CLEAR(self->write_info);
    Py_CLEAR(self->skeleton);
    Py_CLEAR(self->arrays);
    Py_CLEAR(self->four);
    for (int k = 0; k < self->n_leaves; k++)
        Py_CLEAR(self->leaves[k].pack);
    return 0;
}

static void step_dealloc(OrdinaryStep *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    step_clear(self);
    Py_CLEAR(self->ndarray);
    Py_CLEAR(self->float64);
    Py_CLEAR(self->fields);
    for (int k = 0; k < self->n_leaves; k++) {
        Py_CLEAR(self->leaves[k].number);
        Py_CLEAR(self->leaves[k].text);
        Py_CLEAR(self->leaves[k].packed);
    }
    for (int k = 0; k < self->n_targets; k++)
        PyBuffer_Release(&self->targets[k]);
    PyMem_Free(self->leaves);
    PyMem_Free(self->targets);
    PyBuffer_Release(&self->cell);
    PyBuffer_Release(&self->rewards);
    PyBuffer_Release(&self->flags);
    PyBuffer_Release(&self->replies);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

/* Read a list of as many flags as there are buffers. */
static int read_codes(PyObject *list, uint16_t *codes, int count) {
    if (!PyList_Check(list) || PyList_Size(list) != count) {
        PyErr_SetString(PyExc_ValueError, "flags for each buffer are needed");
        return -1;
    }
    for (int buffer = 0; buffer < count; buffer++) {
        long code = PyLong_AsLong(PyList_GetItem(list, buffer));
        if (code < 0 || code > UINT16_MAX) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "flags have 16 bits");
            return -1;
        }
        codes[buffer] = (uint16_t)code;
    }
    return 0;
}

/* Have the leaves of observations, and where each is written; -1 with an error. */
static int take_leaves(OrdinaryStep *self, PyObject *leaves, PyObject *targets) {
    Py_ssize_t n_leaves = PyList_Size(leaves), n_buffers = PyList_Size(targets);
    if (n_leaves < 1 || n_leaves > MOST_LEAVES || n_buffers < 1 || n_buffers > MOST_BUFFERS) {
        PyErr_SetString(PyExc_ValueError, "too many leaves or buffers, or too few");
        return -1;
    }
    self->leaves = PyMem_Calloc(n_leaves, sizeof *self->leaves);
    self->targets = PyMem_Calloc(n_leaves * n_buffers, sizeof *self->targets);
    if (self->leaves == NULL || self->targets == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->n_buffers = (int)n_buffers;
    for (Py_ssize_t buffer = 0; buffer < n_buffers; buffer++) {
        PyObject *of_buffer = PyList_GetItem(targets, buffer);
        if (!PyTuple_CheckExact(of_buffer) || PyTuple_Size(of_buffer) != n_leaves) {
            PyErr_SetString(PyExc_ValueError, "a buffer has a target for each leaf");
            return -1;
        }
        for (Py_ssize_t k = 0; k < n_leaves; k++) {
            Py_buffer *view = &self->targets[self->n_targets];
            if (view_of(PyTuple_GetItem(of_buffer, k), view, PyBUF_WRITABLE, -1, 0) < 0)
                return -1;
            self->n_targets++;
            if (!PyBuffer_IsContiguous(view, 'C')) {
                PyErr_SetString(PyExc_ValueError, "a buffer of another form");
                return -1;
            }
        }
    }
    for (; self->n_leaves < n_leaves; self->n_leaves++) {
        Leaf *leaf = &self->leaves[self->n_leaves];
        const Py_buffer *target = &self->targets[self->n_leaves];
        PyObject *number, *pack;
        int tests_finite;
        if (!PyTuple_Check(PyList_GetItem(leaves, self->n_leaves))) {
            PyErr_SetString(PyExc_TypeError, "a leaf is a tuple");
            return -1;
        }
        if (!PyArg_ParseTuple(PyList_GetItem(leaves, self->n_leaves), "pOO", &tests_finite, &number, &pack))
            return -1;
        const char *format = target->format;
        if (tests_finite && strcmp(format, "f") != 0 && strcmp(format, "d") != 0) {
            PyErr_SetString(PyExc_ValueError, "numbers that are not tested here");
            return -1;
        }
        leaf->finite = tests_finite ? format[0] : 0;
        if (number != Py_None) {
            leaf->number = Py_NewRef(number);
            leaf->takes_int = target->ndim == 0 && target->itemsize == sizeof(int64_t) &&
                              (strcmp(format, "l") == 0 || strcmp(format, "q") == 0);
        }
        if (pack != Py_None)
            leaf->pack = Py_NewRef(pack);
    }
    return 0;
}

static PyObject *step_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"env", "step_buffer", "rest", "failed", "end", "write_info", "after", "ndarray",
                            "float64", "fields", "skeleton", "leaves", "targets", "rewards", "flags",
                            "replies", "row", "codes", "codes_of_float32", "codes_of_float64",
                            "refuses_non_finite", "has_info", NULL};
    PyObject *env, *step_buffer, *rest, *failed, *end, *write_info, *after, *ndarray, *float64, *fields;
    PyObject *skeleton, *leaves, *targets, *rewards, *flags, *replies, *codes, *of_float32, *of_float64;
    Py_ssize_t row;
    int refuses, has_info;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOO!OOOOO!O!OOOnOOOpi", names, &env, &step_buffer, &rest, &failed, &end,
            &write_info, &PyList_Type, &after, &ndarray, &float64, &fields, &skeleton, &PyList_Type, &leaves,
            &PyList_Type, &targets, &rewards, &flags, &replies, &row, &codes, &of_float32, &of_float64,
            &refuses, &has_info))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    OrdinaryStep *self = (OrdinaryStep *)alloc(type, 0); /* all of it zero */
    if (self == NULL)
        return NULL;
    if (take_leaves(self, leaves, targets) < 0)
        goto failed;
    if (PyList_Size(after) < self->n_buffers) {
        PyErr_SetString(PyExc_ValueError, "a buffer without one after it");
        goto failed;
    }
    for (int buffer = 0; buffer < self->n_buffers; buffer++) {
        long next = PyLong_AsLong(PyList_GetItem(after, buffer));
        if (next < 0 || next >= self->n_buffers) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a buffer after one that there is not");
            goto failed;
        }
        self->after[buffer] = (uint8_t)next;
    }
    if (view_of(step_buffer, &self->cell, PyBUF_WRITABLE, 1, sizeof(uint8_t)) < 0 ||
        (self->buffer = item_of(&self->cell, 0)) == NULL ||
        view_of(rewards, &self->rewards, PyBUF_WRITABLE, 1, sizeof(double)) < 0 ||
        view_of(flags, &self->flags, PyBUF_WRITABLE, 1, sizeof(uint16_t)) < 0 ||
        view_of(replies, &self->replies, PyBUF_WRITABLE, 1, sizeof(uint64_t)) < 0)
        goto failed;
    if ((self->reward = item_of(&self->rewards, row)) == NULL ||
        (self->flag = item_of(&self->flags, row)) == NULL ||
        (self->reply = item_of(&self->replies, row)) == NULL)
        goto failed;
    if (read_codes(codes, self->codes, self->n_buffers) < 0 ||
        read_codes(of_float32, self->codes_of_float32, self->n_buffers) < 0 ||
        read_codes(of_float64, self->codes_of_float64, self->n_buffers) < 0)
        goto failed;
    self->refuses_non_finite = (char)refuses;
    self->env = Py_NewRef(env);
    self->rest = Py_NewRef(rest);
    self->failed = Py_NewRef(failed);
    self->end = Py_NewRef(end);
    self->write_info = Py_NewRef(write_info);
    self->has_info = (uint16_t)has_info;
    self->skeleton = Py_NewRef(skeleton);
    self->arrays = Py_NewRef(targets);
    self->ndarray = Py_NewRef(ndarray);
    self->float64 = Py_NewRef(float64);
    self->fields = fields == Py_None ? NULL : Py_NewRef(fields);
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* Whether a result is a named tuple with the fields of an `EnvTimestep`; -1 with an error. */
static int has_fields(OrdinaryStep *self, PyObject *result) {
    PyObject *type = (PyObject *)Py_TYPE(result);
    if (!PyTuple_Check(result) || PyTuple_Size(result) != 4)
        return 0;
    if (type == self->four)
        return 1;
    if (PyType_GetSlot((PyTypeObject *)type, Py_tp_iter) != PyType_GetSlot(&PyTuple_Type, Py_tp_iter))
        return 0; /* it need not give what it holds */
    PyObject *found = PyObject_GetAttr(type, name_fields);
    if (found == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    int same = PyTuple_CheckExact(found) ? PyObject_RichCompareBool(found, self->fields, Py_EQ) : 0;
    Py_DECREF(found);
    if (same == 1) {
        PyObject *before = self->four;
        self->four = Py_NewRef(type);
        Py_XDECREF(before);
    }
    return same;
}

/* The number that a reward is, and the flags for it; NULL if it is out of the ordinary. */
static const uint16_t *reward_of(OrdinaryStep *self, PyObject *reward, double *number) {
    const uint16_t *codes = NULL;
    PyObject *type = (PyObject *)Py_TYPE(reward);
    if (type == (PyObject *)&PyFloat_Type) {
        *number = PyFloat_AsDouble(reward);
        codes = self->codes;
    } else if (self->fields == NULL) { /* gymnasium's rewards become floats */
        if (type == self->float64) {
            *number = PyFloat_AsDouble(reward);
            codes = self->codes;
        } else if (type == (PyObject *)&PyLong_Type) {
            *number = PyLong_AsDouble(reward);
            codes = self->codes;
        }
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return NULL;
        }
    } else if (type == self->ndarray) {
        Py_buffer view;
        if (PyObject_GetBuffer(reward, &view, PyBUF_STRIDES | PyBUF_FORMAT) < 0) {
            PyErr_Clear();
            return NULL;
        }
        if (view.ndim == 1 && view.shape[0] == 1) { /* a format of one letter: native and aligned */
            if (strcmp(view.format, "f") == 0) {
                float single;
                memcpy(&single, view.buf, sizeof single);
                *number = single;
                codes = self->codes_of_float32;
            } else if (strcmp(view.format, "d") == 0) {
                memcpy(number, view.buf, sizeof *number);
                codes = self->codes_of_float64;
            }
        }
        PyBuffer_Release(&view);
    }
    return codes == NULL || (self->refuses_non_finite && !isfinite(*number)) ? NULL : codes;
}

static int is_finite(const char *numbers, Py_ssize_t nbytes, char format) {
    if (format == 'f') {
        for (const float *at = (const float *)numbers, *stop = at + nbytes / sizeof *at; at < stop; at++)
            if (!isfinite(*at))
                return 0;
    } else {
        for (const double *at = (const double *)numbers, *stop = at + nbytes / sizeof *at; at < stop; at++)
            if (!isfinite(*at))
                return 0;
    }
    return 1;
}

/* Leave what was raised here, by no code of Python, to Python, which comes upon it, too: 0. */
static int left_to_python(void) {
    PyErr_Clear();
    return 0;
}

/* Functions that check return 1; 0 if something is out of the ordinary; -1 with an error. */

static int check_text(Leaf *leaf, PyObject *text, const Py_buffer *target, Found *found) {
    if (!PyUnicode_CheckExact(text))
        return 0;
    if (text != leaf->text && (leaf->text == NULL || PyUnicode_Compare(text, leaf->text) != 0)) {
        PyObject *packed = PyObject_CallFunctionObjArgs(leaf->pack, text, NULL);
        if (packed == NULL) /* by code of the space, or by a signal handler in it */
            return -1;
        if (!PyBytes_CheckExact(packed) || PyBytes_Size(packed) > target->len) {
            Py_DECREF(packed);
            return 0;
        }
        PyObject *text_before = leaf->text, *packed_before = leaf->packed;
        leaf->text = Py_NewRef(text);
        leaf->packed = packed;
        Py_XDECREF(text_before);
        Py_XDECREF(packed_before);
    }
    found->source = Py_NewRef(leaf->packed);
    found->kind = A_TEXT;
    return 1;
}

/* Equal formats are those of aligned arrays: others have a sign for that. */
static int check_leaf(OrdinaryStep *self, Py_ssize_t k, PyObject *value, Py_ssize_t buffer, Found *found) {
    if (k < 0 || k >= self->n_leaves || found[k].kind != 0)
        return 0;
    Leaf *leaf = &self->leaves[k];
    const Py_buffer *target = &self->targets[buffer * self->n_leaves + k];
    found += k;
    if (leaf->pack != NULL)
        return check_text(leaf, value, target, found);
    if (leaf->takes_int && PyLong_CheckExact(value)) {
        found->number = PyLong_AsLongLong(value);
        if (found->number == -1 && PyErr_Occurred())
            return left_to_python();
        found->kind = AN_INT;
        return 1;
    }
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (type != self->ndarray && type != leaf->number)
        return 0;
    Py_buffer *view = &found->view;
    if (PyObject_GetBuffer(value, view, PyBUF_STRIDES | PyBUF_FORMAT) < 0)
        return left_to_python();
    int is_contiguous = PyBuffer_IsContiguous(view, 'C');
    int fits = view->ndim == target->ndim && view->itemsize == target->itemsize &&
               strcmp(view->format, target->format) == 0 &&
               (view->ndim == 0 ||
                memcmp(view->shape, target->shape, view->ndim * sizeof *view->shape) == 0);
    if (fits && leaf->finite) /* Python looks at those that are spread */
        fits = is_contiguous && is_finite(view->buf, view->len, leaf->finite);
    if (!fits) {
        PyBuffer_Release(view);
        return 0;
    }
    found->source = Py_NewRef(value);
    found->kind = is_contiguous ? AN_ARRAY : A_SPREAD_ARRAY;
    return 1;
}

/* Whether a dict has only keys that are found without any code of Python. */
static int has_plain_keys(PyObject *dict) {
    PyObject *key, *part;
    Py_ssize_t at = 0;
    while (PyDict_Next(dict, &at, &key, &part))
        if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key))
            return 0;
    return 1;
}

static int check_part(OrdinaryStep *self, PyObject *skeleton, PyObject *value, Py_ssize_t buffer, Found *found) {
    if (PyLong_CheckExact(skeleton)) {
        Py_ssize_t k = PyLong_AsSsize_t(skeleton);
        return k == -1 && PyErr_Occurred() ? left_to_python() : check_leaf(self, k, value, buffer, found);
    }
    int fits = 1;
    if (Py_EnterRecursiveCall(" in an observation"))
        return left_to_python();
    if (PyDict_CheckExact(skeleton)) {
        PyObject *key, *part;
        Py_ssize_t at = 0;
        fits = PyDict_CheckExact(value) && PyDict_Size(value) == PyDict_Size(skeleton) &&
               has_plain_keys(value) && has_plain_keys(skeleton);
        while (fits == 1 && PyDict_Next(skeleton, &at, &key, &part)) {
            PyObject *item = PyDict_GetItemWithError(value, key);
            if (item == NULL) {
                fits = PyErr_Occurred() ? left_to_python() : 0;
            } else {
                Py_INCREF(item);
                fits = check_part(self, part, item, buffer, found);
                Py_DECREF(item);
            }
        }
    } else {
        Py_ssize_t count = PyTuple_CheckExact(skeleton) ? PyTuple_Size(skeleton) : -1;
        fits = (PyTuple_CheckExact(value) || PyList_CheckExact(value)) && PyObject_Size(value) == count;
        for (Py_ssize_t k = 0; fits == 1 && k < count; k++) {
            PyObject *item = PySequence_GetItem(value, k);
            fits = item == NULL ? left_to_python()
                                : check_part(self, PyTuple_GetItem(skeleton, k), item, buffer, found);
            Py_XDECREF(item);
        }
    }
    Py_LeaveRecursiveCall();
    return fits;
}

/* Write an observation into a buffer: 1; 0 if it is out of the ordinary, and nothing was written; -1 with
 * an error. All of it is checked first. */
static int write_observation(OrdinaryStep *self, PyObject *obs, Py_ssize_t buffer) {
    Found found[MOST_LEAVES];
    for (int k = 0; k < self->n_leaves; k++)
        found[k].kind = 0;
    int fits = check_part(self, self->skeleton, obs, buffer, found);
    for (int k = 0; fits == 1 && k < self->n_leaves; k++)
        fits = found[k].kind != 0;
    for (int k = 0; k < self->n_leaves; k++) {
        void *target = self->targets[buffer * self->n_leaves + k].buf;
        char kind = found[k].kind;
        if (kind == 0)
            continue;
        if (fits == 1 && kind == AN_ARRAY)
            memmove(target, found[k].view.buf, found[k].view.len);
        else if (fits == 1 && kind == AN_INT)
            memcpy(target, &found[k].number, sizeof found[k].number);
        else if (fits == 1 && kind == A_TEXT)
            memcpy(target, PyBytes_AsString(found[k].source), PyBytes_Size(found[k].source));
        else if (fits == 1 &&
                 PyObject_SetItem(PyTuple_GetItem(PyList_GetItem(self->arrays, buffer), k), Py_Ellipsis,
                                  found[k].source) < 0)
            fits = -1;
        if (kind == AN_ARRAY || kind == A_SPREAD_ARRAY)
            PyBuffer_Release(&found[k].view);
        if (kind != AN_INT)
            Py_DECREF(found[k].source);
    }
    return fits;
}

/* Go on with what code of the env has raised. */
static PyObject *report_failed(OrdinaryStep *self, PyObject *token, int has_ended) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    PyObject *follows = PyObject_CallFunctionObjArgs(self->failed, token, error, has_ended ? Py_True : NULL, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return follows;
}

/* Take one step; as the function that `ordinary_steps` returns without this module. */
static PyObject *take_step(OrdinaryStep *self, PyObject *token, PyObject *action) {
    PyObject *result = PyObject_CallMethodObjArgs(self->env, name_step, action, NULL);
    if (result == NULL)
        return report_failed(self, token, 0);
    int has_ended = 0;
    PyObject *obs, *reward, *terminated, *truncated, *info;
    if (self->fields == NULL) {
        if (!PyTuple_CheckExact(result) || PyTuple_Size(result) != 5)
            goto rest;
        terminated = PyTuple_GetItem(result, 2);
        truncated = PyTuple_GetItem(result, 3);
        info = PyTuple_GetItem(result, 4);
    } else {
        int has = has_fields(self, result);
        if (has < 0)
            goto failed;
        if (!has)
            goto rest;
        terminated = PyTuple_GetItem(result, 2);
        truncated = Py_False;
        info = PyTuple_GetItem(result, 3);
    }
    obs = PyTuple_GetItem(result, 0);
    reward = PyTuple_GetItem(result, 1);
    int ends = terminated == Py_True || truncated == Py_True;
    if ((terminated != Py_False && terminated != Py_True) ||
        (truncated != Py_False && truncated != Py_True) || !PyDict_CheckExact(info))
        goto rest;
    int has_info = PyDict_Size(info) != 0;
    if (has_info && PyDict_GetItemWithError(info, name_abnormal) != NULL)
        goto rest; /* it may say that the step does not count */
    if (has_info && PyErr_Occurred()) /* of keys of its own kind */
        goto failed;
    double number = 0.0;
    const uint16_t *codes = reward_of(self, reward, &number);
    if (codes == NULL)
        goto rest;
    uint64_t answered = PyLong_AsUnsignedLongLong(token);
    if (answered == (uint64_t)-1 && PyErr_Occurred()) { /* which no env has given */
        Py_DECREF(result);
        return NULL;
    }
    uint8_t buffer = *self->buffer;
    if (buffer >= self->n_buffers)
        goto rest;
    int is_observed = write_observation(self, obs, buffer);
    if (is_observed < 0)
        goto failed;
    if (!is_observed)
        goto rest;
    uint16_t code = codes[buffer];
    if (has_info) {
        PyObject *is_written = write_by(self->write_info, info);
        if (is_written == NULL) {
            /* As in Python, where the observation and the end come first. */
            *self->buffer = self->after[buffer];
            has_ended = ends;
            goto failed;
        }
        Py_DECREF(is_written);
        if (is_written != Py_True)
            goto rest; /* which writes it all again, in the same buffer */
        code |= self->has_info;
    }
    Py_DECREF(result);
    *self->buffer = self->after[buffer];
    *self->reward = number;
    if (ends) {
        PyObject *flags = PyLong_FromLong(code), *follows = NULL;
        if (flags != NULL)
            follows = PyObject_CallFunctionObjArgs(self->end, token, flags, terminated, truncated, NULL);
        Py_XDECREF(flags);
        return follows;
    }
    *self->flag = code;
    __atomic_store_n(self->reply, answered, __ATOMIC_RELEASE); /* last: now the reply counts */
    return Py_NewRef(Py_None);
rest:;
    PyObject *follows = PyObject_CallFunctionObjArgs(self->rest, token, result, NULL);
    Py_DECREF(result);
    return follows;
failed: /* of what the env has given, which is no more than its own failure */
    Py_DECREF(result);
    return report_failed(self, token, has_ended);
}

static PyObject *step_call(OrdinaryStep *self, PyObject *args, PyObject *kwargs) {
    PyObject *token, *action;
    if (!PyArg_ParseTuple(args, "OO", &token, &action))
        return NULL;
    return take_step(self, token, action);
}

static PyType_Slot step_slots[] = {
    {Py_tp_new, step_new},
    {Py_tp_dealloc, step_dealloc},
    {Py_tp_traverse, step_traverse},
    {Py_tp_clear, step_clear},
    {Py_tp_call, step_call},
    {Py_tp_doc, "Takes the ordinary steps of one env: see `worker.env_runner.ordinary_steps`."},
    {0, NULL},
};

static PyType_Spec step_spec = {
    "envmgr._hot.OrdinaryStep", sizeof(OrdinaryStep), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, step_slots,
};

/* -- the worker: a batch of steps ------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *ordinary;
    Py_buffer running, since;
    int64_t *runs;
    double *began;      /* NULL: nobody wants to know */
    Py_ssize_t position; /* of the step that was begun last; whoever begins a batch makes it -1 */
} BatchOfSteps;

static void batch_dealloc(BatchOfSteps *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->ordinary);
    PyBuffer_Release(&self->running);
    PyBuffer_Release(&self->since);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *batch_call(BatchOfSteps *self, PyObject *args, PyObject *kwargs) {
    PyObject *steps, *requests, *tokens, *actions, *values;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!", &PyList_Type, &steps, &PyList_Type, &requests,
                          &PyList_Type, &tokens, &PyList_Type, &actions, &PyList_Type, &values))
        return NULL;
    Py_ssize_t count = PyList_Size(steps);
    if (PyList_Size(requests) != count || PyList_Size(tokens) != count ||
        PyList_Size(actions) != count || PyList_Size(values) != count) {
        PyErr_SetString(PyExc_ValueError, "one of everything for each step is needed");
        return NULL;
    }
    int follows = 0;
    for (Py_ssize_t k = 0; k < count; k++) {
        /* Code of an env may change the lists, even shorten them. */
        PyObject *step = PyList_GetItem(steps, k), *token = PyList_GetItem(requests, k);
        PyObject *before = PyList_GetItem(tokens, k), *action = PyList_GetItem(actions, k);
        PyObject *value = PyList_GetItem(values, k);
        if (step == NULL || token == NULL || before == NULL || action == NULL || value == NULL)
            return NULL;
        unsigned long long new = PyLong_AsUnsignedLongLong(token);
        if (new == PyLong_AsUnsignedLongLong(before)) {
            if (new == (unsigned long long)-1 && PyErr_Occurred())
                return NULL;
            continue;
        }
        if (PyErr_Occurred())
            return NULL;
        int64_t runs = PyLong_AsLongLong(value);
        if (runs == -1 && PyErr_Occurred())
            return NULL;
        self->position = k;
        if (self->began != NULL)
            *self->began = monotonic();
        *self->runs = runs;
        Py_INCREF(step);
        Py_INCREF(token);
        Py_INCREF(action);
        PyObject *one = (PyObject *)Py_TYPE(step) == self->ordinary
                            ? take_step((OrdinaryStep *)step, token, action)
                            : PyObject_CallFunctionObjArgs(step, token, action, NULL);
        Py_DECREF(step);
        Py_DECREF(token);
        Py_DECREF(action);
        if (one == NULL)
            return NULL;
        if (one != Py_None && one != Py_False) {
            int is_true = PyObject_IsTrue(one);
            if (is_true < 0) {
                Py_DECREF(one);
                return NULL;
            }
            follows |= is_true;
        }
        Py_DECREF(one);
    }
    *self->runs = 0; /* as `BlockStepper.note_idle` */
    if (self->began != NULL)
        *self->began = monotonic();
    return PyBool_FromLong(follows);
}

static PyObject *batch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"ordinary", "running", "since", "index", NULL};
    PyObject *ordinary, *running, *since;
    Py_ssize_t index;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOn", names, &PyType_Type, &ordinary,
                                     &running, &since, &index))
        return NULL;
    if (PyType_GetSlot((PyTypeObject *)ordinary, Py_tp_call) != (void *)step_call) {
        PyErr_SetString(PyExc_TypeError, "OrdinaryStep is needed");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    BatchOfSteps *self = (BatchOfSteps *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->ordinary = Py_NewRef(ordinary);
    self->position = -1;
    if (view_of(running, &self->running, PyBUF_WRITABLE, 1, sizeof(int64_t)) < 0 ||
        (self->runs = item_of(&self->running, index)) == NULL)
        goto failed;
    if (since != Py_None &&
        (view_of(since, &self->since, PyBUF_WRITABLE, 1, sizeof(double)) < 0 ||
         (self->began = item_of(&self->since, index)) == NULL))
        goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef batch_members[] = {
    {"position", T_PYSSIZET, offsetof(BatchOfSteps, position), 0,
     "of the step that was begun last; whoever begins a batch makes it -1"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot batch_slots[] = {
    {Py_tp_new, batch_new},
    {Py_tp_dealloc, batch_dealloc},
    {Py_tp_call, batch_call},
    {Py_tp_members, batch_members},
    {Py_tp_doc, "Takes the steps of a batch: see `worker.block_steps.BlockStepper`."},
    {0, NULL},
};

static PyType_Spec batch_spec = {
    "envmgr._hot.BatchOfSteps", sizeof(BatchOfSteps), 0, Py_TPFLAGS_DEFAULT, batch_slots,
};

/* -- the trainer: the rows of neighbouring envs ------------------------------------------------ */

#define CONTAINERS 4
#define MOST_VIEWS 14

typedef struct {
    PyObject_HEAD
    PyObject *containers[CONTAINERS]; /* while one of them holds anything, Python looks at all */
    PyObject *statistics, *submitter, *journal;
    PyObject *ids, *ndarray, *number;
    Py_buffer views[MOST_VIEWS];
    int n_views;
    uint8_t *phases, *states, *buffers, *in_arena;
    uint64_t *tokens, *requests, *replies;
    uint16_t *flags;
    char *actions;      /* of one leaf */
    Py_buffer *action;
    char is_number;     /* the leaf is a number of 64 bits, and actions are numbers */
    long long low, high;
    Py_ssize_t first, count;
    uint64_t generations;
    uint16_t buffer_bits, ending_given_bit, has_info, end_bits, plain_end;
    uint64_t *resets;   /* steps that end episodes are complete with these; NULL: they need not be */
    uint16_t *reset_flags;
    char takes_ends;
    int n_steps, n_buffers; /* those of steps are the first ones */
    uint8_t idle, posted, run;
    uint64_t **postings, **sleeping;
    Py_ssize_t n_hosts;
} OrdinaryRows;

static PyObject *name_actions, *name_timesteps, *name_latest, *name_posted_for_last, *name_n_posts;
static PyObject *name_returning, *name_unfinished, *name_caller, *name_result, *name_count, *name_n_before;
static PyObject *name_begun;

static int rows_traverse(OrdinaryRows *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    for (int k = 0; k < CONTAINERS; k++)
        Py_VISIT(self->containers[k]);
    Py_VISIT(self->statistics);
    Py_VISIT(self->submitter);
    Py_VISIT(self->journal);
    return 0;
}

static int rows_clear(OrdinaryRows *self) {
    for (int k = 0; k < CONTAINERS; k++)
        Py_CLEAR(self->containers[k]);
    Py_CLEAR(self->statistics);
    Py_CLEAR(self->submitter);
    Py_CLEAR(self->journal);
    return 0;
}

static void rows_dealloc(OrdinaryRows *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    rows_clear(self);
    Py_CLEAR(self->ids);
    Py_CLEAR(self->ndarray);
    Py_CLEAR(self->number);
    for (int k = 0; k < self->n_views; k++)
        PyBuffer_Release(&self->views[k]);
    PyMem_Free(self->postings);
    PyMem_Free(self->sleeping);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

/* The items of the rows in a column, which lie side by side; NULL with an error. */
static void *column_of(OrdinaryRows *self, PyObject *object, Py_ssize_t itemsize) {
    Py_buffer *view = &self->views[self->n_views];
    if (PyObject_GetBuffer(object, view, PyBUF_WRITABLE | PyBUF_STRIDES | PyBUF_FORMAT) < 0)
        return NULL;
    self->n_views++;
    if (view->ndim < 1 || !PyBuffer_IsContiguous(view, 'C') ||
        (itemsize && (view->ndim != 1 || view->itemsize != itemsize)) ||
        view->shape[0] - self->count < self->first) {
        PyErr_SetString(PyExc_ValueError, "a column of another form");
        return NULL;
    }
    return (char *)view->buf + self->first * view->strides[0];
}

/* The addresses of the items of hosts in a column whose items may lie apart. */
static uint64_t **items_of_hosts(OrdinaryRows *self, PyObject *object, PyObject *hosts) {
    Py_buffer *view = &self->views[self->n_views];
    if (PyObject_GetBuffer(object, view, PyBUF_WRITABLE | PyBUF_STRIDES | PyBUF_FORMAT) < 0)
        return NULL;
    self->n_views++;
    if (view->ndim != 1 || view->itemsize != sizeof(uint64_t)) {
        PyErr_SetString(PyExc_ValueError, "a column of another form");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(hosts);
    uint64_t **items = PyMem_Malloc(count * sizeof *items);
    if (items == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t k = 0; k < count; k++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyList_GetItem(hosts, k));
        if ((index == -1 && PyErr_Occurred()) || (items[k] = item_of(view, index)) == NULL) {
            PyMem_Free(items);
            return NULL;
        }
    }
    return items;
}

static PyObject *rows_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {
        "first", "count", "empty", "statistics", "submitter", "journal", "phases",
        "states", "buffers", "in_arena", "tokens", "requests", "replies",
        "flags", "ids", "ndarray", "number", "actions", "low", "high", "is_number", "postings", "sleeping", "hosts",
        "generations", "buffer_bits", "ending_given_bit", "has_info", "end_bits", "plain_end", "resets",
        "reset_flags", "takes_ends", "n_steps", "n_buffers", "idle", "posted", "run", NULL};
    PyObject *empty, *statistics, *submitter, *journal, *phases, *states, *buffers;
    PyObject *in_arena, *ids, *ndarray, *number, *tokens, *requests, *replies, *flags, *actions, *postings, *sleeping;
    PyObject *hosts, *resets, *reset_flags;
    Py_ssize_t first, count;
    long long low, high;
    unsigned long long generations;
    int is_number, buffer_bits, ending_given_bit, has_info, end_bits, plain_end, takes_ends, n_steps, n_buffers, idle, posted, run;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "nnO!OOOOOOOOOOOO!OOOLLpOOO!KiiiiiOOpiiiii", names, &first, &count,
            &PyTuple_Type, &empty, &statistics, &submitter, &journal, &phases, &states, &buffers,
            &in_arena, &tokens, &requests, &replies, &flags,
            &PyList_Type, &ids, &ndarray, &number, &actions, &low, &high,
            &is_number, &postings, &sleeping, &PyList_Type, &hosts, &generations, &buffer_bits,
            &ending_given_bit, &has_info, &end_bits, &plain_end, &resets, &reset_flags,
            &takes_ends, &n_steps, &n_buffers, &idle, &posted, &run))
        return NULL;
    if (first < 0 || count < 1 || PyTuple_Size(empty) != CONTAINERS) {
        PyErr_SetString(PyExc_ValueError, "no rows");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    OrdinaryRows *self = (OrdinaryRows *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->first = first;
    self->count = count;
    for (int k = 0; k < CONTAINERS; k++)
        self->containers[k] = Py_NewRef(PyTuple_GetItem(empty, k));
    self->statistics = Py_NewRef(statistics);
    self->submitter = Py_NewRef(submitter);
    self->journal = Py_NewRef(journal);
    self->ids = Py_NewRef(ids);
    self->ndarray = Py_NewRef(ndarray);
    self->number = Py_NewRef(number);
    self->low = low;
    self->high = high;
    self->is_number = (char)is_number;
    self->generations = generations;
    self->buffer_bits = (uint16_t)buffer_bits;
    self->ending_given_bit = (uint16_t)ending_given_bit;
    self->has_info = (uint16_t)has_info;
    self->end_bits = (uint16_t)end_bits;
    self->plain_end = (uint16_t)plain_end;
    self->takes_ends = (char)takes_ends;
    self->n_steps = n_steps;
    self->n_buffers = n_buffers;
    self->idle = (uint8_t)idle;
    self->posted = (uint8_t)posted;
    self->run = (uint8_t)run;
    if ((self->phases = column_of(self, phases, 1)) == NULL ||
        (self->states = column_of(self, states, 1)) == NULL ||
        (self->buffers = column_of(self, buffers, 1)) == NULL ||
        (self->in_arena = column_of(self, in_arena, 1)) == NULL ||
        (self->tokens = column_of(self, tokens, 8)) == NULL ||
        (self->requests = column_of(self, requests, 8)) == NULL ||
        (self->replies = column_of(self, replies, 8)) == NULL ||
        (self->flags = column_of(self, flags, 2)) == NULL ||
        (self->reset_flags = column_of(self, reset_flags, 2)) == NULL)
        goto failed;
    if (resets != Py_None && (self->resets = column_of(self, resets, 8)) == NULL)
        goto failed;
    if (actions != Py_None) {
        self->action = &self->views[self->n_views];
        if ((self->actions = column_of(self, actions, is_number ? 8 : 0)) == NULL)
            goto failed;
    }
    self->n_hosts = PyList_Size(hosts);
    if ((self->postings = items_of_hosts(self, postings, hosts)) == NULL ||
        (sleeping != Py_None && (self->sleeping = items_of_hosts(self, sleeping, hosts)) == NULL))
        goto failed;
    if (PyList_Size(ids) != count) {
        PyErr_SetString(PyExc_ValueError, "other rows");
        goto failed;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int are_all(const uint8_t *states, uint8_t state, Py_ssize_t count) {
    for (Py_ssize_t k = 0; k < count; k++)
        if (states[k] != state)
            return 0;
    return 1;
}

/* Whether a container is empty, which costs less than to ask for what is in it. */
static int is_empty(PyObject *container) {
    return PyObject_Size(container) == 0;
}

/* Write the action of a row: 1, or 0 if it is not exactly of the space and in this form. */
static int write_action(OrdinaryRows *self, Py_ssize_t k, PyObject *value, long form) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (self->is_number) {
        if (type != (form ? self->number : (PyObject *)&PyLong_Type))
            return 0;
        int overflow = 0;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow || (number == -1 && PyErr_Occurred())) {
            PyErr_Clear();
            return 0;
        }
        if (number < self->low || number > self->high)
            return 0;
        ((int64_t *)self->actions)[k] = number;
        return 1;
    }
    if (type != self->ndarray || !form)
        return 0;
    Py_buffer view, *column = self->action;
    if (PyObject_GetBuffer(value, &view, PyBUF_STRIDES | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return 0;
    }
    int fits = view.ndim == column->ndim - 1 && view.itemsize == column->itemsize &&
               strcmp(view.format, column->format) == 0 && PyBuffer_IsContiguous(&view, 'C') &&
               (view.ndim == 0 ||
                memcmp(view.shape, column->shape + 1, view.ndim * sizeof *view.shape) == 0);
    if (fits)
        memcpy(self->actions + k * column->strides[0], view.buf, view.len);
    PyBuffer_Release(&view);
    return fits;
}

/* Write a batch of actions, an array with a row for each env. */
static int write_batch(OrdinaryRows *self, PyObject *batch, long form) {
    if ((PyObject *)Py_TYPE(batch) != self->ndarray || !form)
        return 0;
    Py_buffer view, *column = self->action;
    if (PyObject_GetBuffer(batch, &view, PyBUF_STRIDES | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return 0;
    }
    int fits = view.ndim == column->ndim && view.itemsize == column->itemsize &&
               strcmp(view.format, column->format) == 0 && PyBuffer_IsContiguous(&view, 'C') &&
               view.shape[0] == self->count &&
               memcmp(view.shape + 1, column->shape + 1, (view.ndim - 1) * sizeof *view.shape) == 0;
    if (fits && self->is_number) {
        const int64_t *numbers = view.buf;
        for (Py_ssize_t k = 0; k < self->count; k++)
            if (numbers[k] < self->low || numbers[k] > self->high)
                fits = 0;
    }
    if (fits)
        memcpy(self->actions, view.buf, view.len);
    PyBuffer_Release(&view);
    return fits;
}

/* Write the actions of a dict whose keys are the env_ids of the rows, in their order. */
static int write_dict(OrdinaryRows *self, PyObject *actions, long form) {
    PyObject *key, *value;
    Py_ssize_t position = 0, k = 0;
    if (PyDict_Size(actions) != self->count)
        return 0;
    while (PyDict_Next(actions, &position, &key, &value)) {
        if (k >= self->count || (key != PyList_GetItem(self->ids, k) &&
                                 (!PyLong_CheckExact(key) || PyLong_AsSsize_t(key) != self->first + k))) {
            PyErr_Clear(); /* of a number that is too large */
            return 0;
        }
        if (!write_action(self, k, value, form))
            return 0;
        k++;
    }
    return k == self->count;
}

/* Whether all rows take an ordinary action now. */
static int may_post(OrdinaryRows *self) {
    if (self->actions == NULL || !are_all(self->phases, self->idle, self->count) ||
        !are_all(self->states, self->run, self->count))
        return 0;
    for (int k = 0; k < CONTAINERS; k++)
        if (!is_empty(self->containers[k]))
            return 0;
    return 1;
}

static PyObject *rows_may_post(OrdinaryRows *self, PyObject *ignored) {
    return PyBool_FromLong(may_post(self));
}

PyDoc_STRVAR(post_doc,
             "post(selection, actions, form, request_id, posting, for_last, note)\n--\n\n"
             "Post a step of all rows: 1, 2 if a host sleeps and has to be rung for, which `note` in "
             "the journal says then; 0 if something is out of the ordinary, and nothing was changed.");

static PyObject *rows_post(OrdinaryRows *self, PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 7) {
        PyErr_SetString(PyExc_TypeError, "post takes seven arguments");
        return NULL;
    }
    PyObject *selection = args[0], *actions = args[1], *for_last = args[5], *note = args[6];
    long form = PyLong_AsLong(args[2]);
    unsigned long long request_id = PyLong_AsUnsignedLongLong(args[3]);
    unsigned long long posting = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if ((form != 0 && form != 1) || !may_post(self))
        return PyLong_FromLong(0);
    if (!(PyDict_CheckExact(actions) ? write_dict(self, actions, form)
                                     : write_batch(self, actions, form)))
        return PyLong_FromLong(0);
    /* All objects are made before anything is changed; from then on nothing fails. */
    PyObject *n_actions = PyObject_GetAttr(self->statistics, name_actions), *sum = NULL;
    PyObject *n_posts = PyObject_GetAttr(selection, name_n_posts), *one_more = NULL;
    if (n_actions != NULL)
        sum = PyLong_FromSsize_t(PyLong_AsSsize_t(n_actions) + self->count);
    if (n_posts != NULL)
        one_more = PyLong_FromSsize_t(PyLong_AsSsize_t(n_posts) + 1);
    Py_XDECREF(n_actions);
    Py_XDECREF(n_posts);
    if (sum == NULL || one_more == NULL ||
        PyObject_SetAttr(self->submitter, name_latest, selection) < 0 ||
        PyObject_SetAttr(self->submitter, name_posted_for_last, for_last) < 0 ||
        PyObject_SetAttr(selection, name_n_posts, one_more) < 0 ||
        PyObject_SetAttr(self->statistics, name_actions, sum) < 0) {
        Py_XDECREF(sum);
        Py_XDECREF(one_more);
        return NULL;
    }
    Py_DECREF(sum);
    Py_DECREF(one_more);
    for (Py_ssize_t k = 0; k < self->count; k++) {
        uint64_t token = (self->tokens[k] & self->generations) | request_id;
        self->tokens[k] = token;
        __atomic_store_n(&self->requests[k], token, __ATOMIC_RELEASE);
        self->phases[k] = self->posted;
    }
    for (Py_ssize_t k = 0; k < self->n_hosts; k++)
        __atomic_store_n(self->postings[k], posting, __ATOMIC_RELEASE);
    if (self->sleeping == NULL)
        return PyLong_FromLong(1);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* as `wire.block.fence` */
    int sleeps = 0;
    for (Py_ssize_t k = 0; k < self->n_hosts; k++)
        sleeps |= __atomic_load_n(self->sleeping[k], __ATOMIC_RELAXED) != 0;
    if (sleeps && PyObject_SetAttr(self->journal, name_unfinished, note) < 0)
        return NULL;
    return PyLong_FromLong(1 + sleeps);
}

static int have_arrived(OrdinaryRows *self) {
    for (Py_ssize_t k = self->count - 1; k >= 0; k--) /* the last one comes last, mostly */
        if (__atomic_load_n(&self->replies[k], __ATOMIC_ACQUIRE) != self->tokens[k])
            return 0;
    return is_empty(self->containers[0]);
}

static PyObject *rows_arrived(OrdinaryRows *self, PyObject *ignored) {
    return PyBool_FromLong(have_arrived(self));
}

static PyObject *rows_is_posted(OrdinaryRows *self, PyObject *ignored) {
    return PyBool_FromLong(are_all(self->phases, self->posted, self->count));
}

/* What all replies say, if they have come and are ordinary: the buffer of their observations, the flags of
 * those that end no episode, and {position: flags} of the others, or NULL. 1, or 0 if Python has to look at
 * them, or -1 with an error. */
static int read_flags(OrdinaryRows *self, int takes_ends, uint16_t *buffer, uint16_t *usual,
                      PyObject **ends) {
    *ends = NULL;
    if (!have_arrived(self) || !are_all(self->phases, self->posted, self->count))
        return 0;
    /* Not before: hosts write replies last. Each is read once: who wrote it may write anew. */
    uint16_t first = __atomic_load_n(&self->flags[0], __ATOMIC_RELAXED);
    *buffer = first & self->buffer_bits;
    *usual = first & (self->ending_given_bit | self->has_info);
    if (*buffer >= self->n_steps)
        return 0;
    for (Py_ssize_t k = 0; k < self->count; k++) {
        uint16_t flags = __atomic_load_n(&self->flags[k], __ATOMIC_RELAXED);
        if (flags == (*buffer | *usual))
            continue;
        if (!takes_ends || (flags & self->buffer_bits) != *buffer ||
            (flags & self->has_info) != (*usual & self->has_info) ||
            (flags & self->end_bits & ~self->has_info) != self->plain_end ||
            (self->resets != NULL &&
             __atomic_load_n(&self->resets[k], __ATOMIC_ACQUIRE) != self->tokens[k])) {
            Py_CLEAR(*ends);
            return 0;
        }
        PyObject *position = PyLong_FromSsize_t(k), *end = PyLong_FromLong(flags);
        if (*ends == NULL)
            *ends = PyDict_New();
        int is_set = position != NULL && end != NULL && *ends != NULL
                         ? PyDict_SetItem(*ends, position, end)
                         : -1;
        Py_XDECREF(position);
        Py_XDECREF(end);
        if (is_set < 0) {
            Py_CLEAR(*ends);
            return -1;
        }
    }
    return 1;
}

PyDoc_STRVAR(said_doc,
             "said()\n--\n\n"
             "Return what all replies say, if they have come and are ordinary, and all have infos or none "
             "has: the flags, where none ends an episode; else (buffer, flags of the others, {position: "
             "flags} of ends). None if Python has to look at them.");

static PyObject *rows_said(OrdinaryRows *self, PyObject *ignored) {
    uint16_t buffer, usual;
    PyObject *ends;
    int is_ordinary = read_flags(self, self->takes_ends, &buffer, &usual, &ends);
    if (is_ordinary <= 0)
        return is_ordinary < 0 ? NULL : Py_NewRef(Py_None);
    if (ends == NULL)
        return PyLong_FromLong(buffer | usual);
    return Py_BuildValue("(iiN)", (int)buffer, (int)usual, ends);
}

/* {env_id: buffer} of the first observations of the next episodes, given the ends that `read_flags` has found;
 * None if one has more to it, or is still to come. */
static PyObject *beginnings_of(OrdinaryRows *self, PyObject *ends) {
    PyObject *position, *end, *found = PyDict_New();
    Py_ssize_t next = 0;
    while (found != NULL && PyDict_Next(ends, &next, &position, &end)) {
        Py_ssize_t k = PyLong_AsSsize_t(position);
        uint16_t flags = __atomic_load_n(&self->reset_flags[k], __ATOMIC_RELAXED);
        if (flags < self->n_steps || flags >= self->n_buffers) {
            Py_DECREF(found);
            return Py_NewRef(Py_None);
        }
        PyObject *buffer = PyLong_FromLong(flags), *env_id = PyList_GetItem(self->ids, k);
        if (buffer == NULL || env_id == NULL || PyDict_SetItem(found, env_id, buffer) < 0)
            Py_CLEAR(found);
        Py_XDECREF(buffer);
    }
    return found;
}

/* Have the journal know what is about to be returned, and what is to be done then (NULL: nothing), and all
 * rows be ready: 0, or -1 with an error. */
static int commit(OrdinaryRows *self, PyObject *returning, PyObject *timesteps, int buffer, int in_arena,
                  PyObject *unfinished) {
    if (PyObject_SetAttr(self->journal, name_returning, returning) < 0 ||
        PyObject_SetAttr(self->statistics, name_timesteps, timesteps) < 0 ||
        (unfinished != NULL && PyObject_SetAttr(self->journal, name_unfinished, unfinished) < 0))
        return -1;
    memset(self->phases, self->idle, self->count);
    memset(self->buffers, buffer, self->count);
    memset(self->in_arena, in_arena, self->count);
    return 0;
}

PyDoc_STRVAR(deliver_doc,
             "deliver(returning, buffer, in_arena, timesteps)\n--\n\n"
             "The timesteps of all rows, which `said` has found ordinary, are about to be returned. Return "
             "whether their envs were in RUN until now; if not, the manager was closed meanwhile.");

static PyObject *rows_deliver(OrdinaryRows *self, PyObject *args) {
    PyObject *returning, *timesteps;
    int buffer, in_arena;
    if (!PyArg_ParseTuple(args, "OipO", &returning, &buffer, &in_arena, &timesteps))
        return NULL;
    int were_in_run = are_all(self->states, self->run, self->count);
    if (commit(self, returning, timesteps, buffer, in_arena, NULL) < 0)
        return NULL;
    return PyBool_FromLong(were_in_run);
}

/* As `tuple_by`, of what may be no type of tuples. */
static PyObject *tuple_of(PyObject *type, PyObject **items, Py_ssize_t count) {
    if (PyType_Check(type) && PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type))
        return tuple_by(allocator_of(type), type, items, count);
    PyErr_SetString(PyExc_TypeError, "a type of tuples is needed");
    for (Py_ssize_t k = 0; k < count; k++)
        Py_DECREF(items[k]);
    return NULL;
}

#define PARTS 6
#define OF_ENDS 3 /* terminated, truncated and infos, which are the last ones */

/* A batch, given its type, the env_ids, what makes its other parts, and, where episodes have ended, what these
 * say of that; None if one of them cannot be made. */
static PyObject *made_batch(PyObject *type, PyObject *ids, PyObject *makers, PyObject *of_ends) {
    PyObject *items[PARTS];
    if (!PyTuple_Check(makers) || PyTuple_Size(makers) != PARTS - 1) {
        PyErr_SetString(PyExc_ValueError, "what makes each part of a batch is needed");
        return NULL;
    }
    items[0] = Py_NewRef(ids);
    for (int k = 1; k < PARTS; k++) {
        PyObject *item;
        if (of_ends != NULL && k >= PARTS - OF_ENDS)
            item = Py_NewRef(PyTuple_GetItem(of_ends, k - (PARTS - OF_ENDS)));
        else
            item = PyObject_CallNoArgs(PyTuple_GetItem(makers, k - 1));
        if (item == NULL || item == Py_None) {
            for (int j = 0; j < k; j++)
                Py_DECREF(items[j]);
            return item;
        }
        items[k] = item;
    }
    return tuple_of(type, items, PARTS);
}

PyDoc_STRVAR(hand_out_doc,
             "hand_out(recipes)\n--\n\n"
             "Hand the timesteps of all rows out as a batch, which is about to be returned, if they have come "
             "and there is a recipe for the flags of those that end no episode:\n\n"
             "- the type of the batch\n"
             "- the env_ids\n"
             "- what makes its other parts\n"
             "- what makes the last three of these, given {position: flags} of ends and {env_id: buffer} of the "
             "beginnings after them; None if nothing does\n"
             "- what notes beginnings; the journal is left to call it\n"
             "- the type of what is handed out\n"
             "- the type of what the journal has of it\n\n"
             "None if there is no recipe, or something cannot be made: Python has to look at them, and nothing "
             "was changed.");

static PyObject *rows_hand_out(OrdinaryRows *self, PyObject *recipes) {
    if (!PyDict_Check(recipes)) {
        PyErr_SetString(PyExc_TypeError, "a dict of recipes is needed");
        return NULL;
    }
    uint16_t buffer, usual;
    PyObject *ends, *begun = NULL, *of_ends = NULL, *recipe = NULL, *batch = NULL, *handed = NULL;
    PyObject *count = NULL, *before = NULL, *after = NULL, *returning = NULL, *unfinished = NULL, *result = NULL;
    PyObject *type, *ids, *makers, *ended, *begin, *handed_type, *returning_type;
    /* Where resets are no part of steps, ends have more to them. */
    int is_ordinary = read_flags(self, self->takes_ends && self->resets != NULL, &buffer, &usual, &ends);
    if (is_ordinary <= 0)
        return is_ordinary < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *key = PyLong_FromLong(buffer | usual);
    if (key == NULL)
        goto over;
    recipe = Py_XNewRef(PyDict_GetItemWithError(recipes, key));
    Py_DECREF(key);
    if (recipe == NULL)
        goto none;
    if (!PyArg_ParseTuple(recipe, "OOOOOOO", &type, &ids, &makers, &ended, &begin, &handed_type, &returning_type))
        goto over;
    /* All objects are made before anything is changed; from then on nothing fails. */
    if (ends != NULL) {
        if (ended == Py_None || (begun = beginnings_of(self, ends)) == Py_None)
            goto none;
        if (begun == NULL || (of_ends = PyObject_CallFunctionObjArgs(ended, ends, begun, NULL)) == NULL)
            goto over;
        if (!PyTuple_Check(of_ends) || PyTuple_Size(of_ends) != OF_ENDS)
            goto none;
    }
    batch = made_batch(type, ids, makers, of_ends);
    if (batch == Py_None)
        goto none;
    if (batch == NULL || (count = PyLong_FromSsize_t(self->count)) == NULL ||
        (handed = PyObject_CallNoArgs(handed_type)) == NULL ||
        (before = PyObject_GetAttr(self->statistics, name_timesteps)) == NULL ||
        (after = PyNumber_Add(before, count)) == NULL ||
        PyObject_SetAttr(handed, name_result, batch) < 0 ||
        PyObject_SetAttr(handed, name_count, count) < 0 ||
        PyObject_SetAttr(handed, name_n_before, before) < 0 ||
        (begun != NULL && (PyObject_SetAttr(handed, name_begun, begun) < 0 ||
                           (unfinished = PyTuple_Pack(2, begin, handed)) == NULL)))
        goto over;
    PyObject *items[] = {Py_NewRef(handed), PyObject_GetAttr(self->journal, name_caller)};
    if (items[1] == NULL) {
        Py_DECREF(items[0]);
        goto over;
    }
    if ((returning = tuple_of(returning_type, items, 2)) == NULL)
        goto over;
    /* A signal handler may have closed the manager while any of these was made. */
    if (!are_all(self->phases, self->posted, self->count))
        goto none;
    if (commit(self, returning, after, buffer, 1, unfinished) == 0)
        result = Py_NewRef(handed);
    goto over;
none:
    result = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
over:
    Py_XDECREF(ends);
    Py_XDECREF(begun);
    Py_XDECREF(of_ends);
    Py_XDECREF(recipe);
    Py_XDECREF(batch);
    Py_XDECREF(count);
    Py_XDECREF(handed);
    Py_XDECREF(before);
    Py_XDECREF(after);
    Py_XDECREF(returning);
    Py_XDECREF(unfinished);
    return result;
}

static PyMethodDef rows_methods[] = {
    {"may_post", (PyCFunction)rows_may_post, METH_NOARGS,
     "Return whether all rows take an ordinary action now."},
    {"post", (PyCFunction)(void (*)(void))rows_post, METH_FASTCALL, post_doc},
    {"arrived", (PyCFunction)rows_arrived, METH_NOARGS,
     "Return whether the replies to what was posted have come, and nothing else waits."},
    {"is_posted", (PyCFunction)rows_is_posted, METH_NOARGS,
     "Return whether steps of all rows are posted."},
    {"said", (PyCFunction)rows_said, METH_NOARGS, said_doc},
    {"deliver", (PyCFunction)rows_deliver, METH_VARARGS, deliver_doc},
    {"hand_out", (PyCFunction)rows_hand_out, METH_O, hand_out_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot rows_slots[] = {
    {Py_tp_new, rows_new},
    {Py_tp_dealloc, rows_dealloc},
    {Py_tp_traverse, rows_traverse},
    {Py_tp_clear, rows_clear},
    {Py_tp_methods, rows_methods},
    {Py_tp_doc, "The rows of neighbouring envs, all of which take an ordinary step."},
    {0, NULL},
};

static PyType_Spec rows_spec = {
    "envmgr._hot.OrdinaryRows", sizeof(OrdinaryRows), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, rows_slots,
};

/* -- the trainer: infos ------------------------------------------------------------------------ */

PyDoc_STRVAR(records_doc,
             "records(infos, numbers, first, count, forms)\n--\n\n"
             "Return (form, records, presence) of neighbouring rows: their form, which is found by its "
             "number, a copy of their records, and the word that all of them begin with, or None. None if "
             "they are of several forms, or of one that is not known.");

static PyObject *records(PyObject *module, PyObject *args) {
    PyObject *infos, *numbers, *known;
    Py_ssize_t first, count;
    if (!PyArg_ParseTuple(args, "OOnnO!", &infos, &numbers, &first, &count, &PyDict_Type, &known))
        return NULL;
    Py_buffer rows, forms;
    if (view_of(numbers, &forms, 0, 1, sizeof(uint8_t)) < 0)
        return NULL;
    if (view_of(infos, &rows, 0, 2, 1) < 0) {
        PyBuffer_Release(&forms);
        return NULL;
    }
    PyObject *found = NULL, *data = NULL, *kind = NULL;
    if (first < 0 || count < 1 || count > forms.shape[0] - first || count > rows.shape[0] - first ||
        rows.strides[1] != 1) {
        PyErr_SetString(PyExc_ValueError, "rows that the columns do not have");
        goto over;
    }
    const char *form = (char *)forms.buf + first * forms.strides[0];
    uint8_t number = *(const uint8_t *)form;
    for (Py_ssize_t k = 1; k < count; k++)
        if (*(const uint8_t *)(form + k * forms.strides[0]) != number)
            goto none;
    PyObject *key = PyLong_FromLong(number);
    if (key == NULL)
        goto over;
    kind = Py_XNewRef(PyDict_GetItemWithError(known, key));
    Py_DECREF(key);
    if (kind == NULL)
        goto none;
    PyObject *size = PyObject_GetAttr(kind, name_nbytes);
    if (size == NULL)
        goto over;
    Py_ssize_t nbytes = PyLong_AsSsize_t(size);
    Py_DECREF(size);
    if (PyErr_Occurred())
        goto over;
    if (nbytes < (Py_ssize_t)sizeof(uint32_t) || nbytes > rows.shape[1])
        goto none;
    if ((data = PyByteArray_FromStringAndSize(NULL, count * nbytes)) == NULL)
        goto over;
    char *at = PyByteArray_AsString(data);
    const char *row = (char *)rows.buf + first * rows.strides[0];
    uint32_t presence = 0, other;
    int is_one = 1;
    for (Py_ssize_t k = 0; k < count; k++, at += nbytes, row += rows.strides[0]) {
        memcpy(at, row, nbytes);
        memcpy(&other, at, sizeof other); /* of the copy: the rest may change at any time */
        if (k == 0)
            presence = other;
        is_one &= other == presence;
    }
    found = is_one ? Py_BuildValue("OOI", kind, data, presence)
                   : Py_BuildValue("OOO", kind, data, Py_None);
    goto over;
none:
    found = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
over:
    Py_XDECREF(kind);
    Py_XDECREF(data);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&forms);
    return found;
}

PyDoc_STRVAR(dicts_doc, "dicts(keys, columns, count)\n--\n\n"
                        "Return so many dicts, given for each key the list of what they have of it.");

static PyObject *dicts(PyObject *module, PyObject *args) {
    PyObject *keys, *columns;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "O!O!n", &PyTuple_Type, &keys, &PyList_Type, &columns, &count))
        return NULL;
    Py_ssize_t n_keys = PyTuple_Size(keys);
    int fits = count >= 0 && PyList_Size(columns) == n_keys;
    for (Py_ssize_t k = 0; fits && k < n_keys; k++) {
        PyObject *column = PyList_GetItem(columns, k);
        fits = PyUnicode_CheckExact(PyTuple_GetItem(keys, k)) && PyList_Check(column) &&
               PyList_Size(column) == count;
    }
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "a list for each key is needed");
        return NULL;
    }
    PyObject *found = PyList_New(count);
    if (found == NULL)
        return NULL;
    PyObject_GC_UnTrack(found); /* who looks at all objects in a collection would find it half empty */
    for (Py_ssize_t position = 0; found != NULL && position < count; position++) {
        PyObject *dict = PyDict_New();
        if (dict == NULL || PyList_SetItem(found, position, dict) < 0) {
            Py_CLEAR(found);
            break;
        }
        for (Py_ssize_t k = 0; k < n_keys; k++) {
            /* A collection may run any code, even some that finds these lists and shortens them. */
            PyObject *column = PyList_GetItem(columns, k);
            PyObject *value = column == NULL ? NULL : PyList_GetItem(column, position);
            if (value == NULL || PyDict_SetItem(dict, PyTuple_GetItem(keys, k), value) < 0) {
                Py_CLEAR(found);
                break;
            }
        }
    }
    if (found != NULL)
        PyObject_GC_Track(found);
    return found;
}

PyDoc_STRVAR(columns_doc, "columns(cls, keys, values, present, kinds)\n--\n\n"
                          "Return {key: cls((values[k], present[k]))}, each with its `kind`.");

static PyObject *columns(PyObject *module, PyObject *args) {
    PyObject *type, *keys, *values, *presents, *kinds;
    if (!PyArg_ParseTuple(args, "O!O!OOO!", &PyType_Type, &type, &PyTuple_Type, &keys, &values, &presents,
                          &PyTuple_Type, &kinds))
        return NULL;
    Py_ssize_t count = PyTuple_Size(keys);
    if (PyTuple_Size(kinds) != count) {
        PyErr_SetString(PyExc_ValueError, "a kind for each key is needed");
        return NULL;
    }
    if (!PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "a type of tuples is needed");
        return NULL;
    }
    allocfunc alloc = allocator_of(type);
    PyObject *found = PyDict_New();
    for (Py_ssize_t k = 0; found != NULL && k < count; k++) {
        PyObject *items[2] = {PySequence_GetItem(values, k)};
        if (items[0] == NULL || (items[1] = PySequence_GetItem(presents, k)) == NULL) {
            Py_XDECREF(items[0]);
            Py_CLEAR(found);
            break;
        }
        PyObject *column = tuple_by(alloc, type, items, 2);
        if (column == NULL || PyObject_SetAttr(column, name_kind, PyTuple_GetItem(kinds, k)) < 0 ||
            PyDict_SetItem(found, PyTuple_GetItem(keys, k), column) < 0)
            Py_CLEAR(found);
        Py_XDECREF(column);
    }
    return found;
}

/* -- the trainer: timesteps ------------------------------------------------------------------- */

PyDoc_STRVAR(timesteps_doc,
             "timesteps(cls, env_ids, observations, rewards, infos)\n--\n\n"
             "Return {env_id: cls((observation, reward, False, info))}; instead of a list, infos may be "
             "a dict, of which each timestep gets a copy.");

static PyObject *timesteps(PyObject *module, PyObject *args) {
    PyObject *type, *env_ids, *observations, *rewards, *infos;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O", &PyType_Type, &type, &PyList_Type, &env_ids,
                          &PyList_Type, &observations, &PyList_Type, &rewards, &infos))
        return NULL;
    Py_ssize_t count = PyList_Size(env_ids);
    int is_listed = PyList_Check(infos);
    if (PyList_Size(observations) != count || PyList_Size(rewards) != count ||
        (is_listed ? PyList_Size(infos) != count : !PyDict_Check(infos))) {
        PyErr_SetString(PyExc_ValueError, "one of everything for each env is needed");
        return NULL;
    }
    if (!PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "a type of tuples is needed");
        return NULL;
    }
    allocfunc alloc = allocator_of(type);
    PyObject *found = PyDict_New();
    if (found == NULL)
        return NULL;
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *info = is_listed ? Py_XNewRef(PyList_GetItem(infos, k)) : PyDict_Copy(infos);
        if (info == NULL)
            goto failed;
        PyObject *observation = PyList_GetItem(observations, k), *reward = PyList_GetItem(rewards, k);
        if (observation == NULL || reward == NULL) { /* a collection may have shortened the lists */
            Py_DECREF(info);
            goto failed;
        }
        PyObject *items[4] = {Py_NewRef(observation), Py_NewRef(reward), Py_NewRef(Py_False), info};
        PyObject *timestep = tuple_by(alloc, type, items, 4);
        PyObject *env_id = timestep == NULL ? NULL : PyList_GetItem(env_ids, k);
        int is_there = env_id != NULL && PyDict_SetItem(found, env_id, timestep) == 0;
        Py_XDECREF(timestep);
        if (!is_there)
            goto failed;
    }
    return found;
failed:
    Py_DECREF(found);
    return NULL;
}

/* -- the module ------------------------------------------------------------------------------- */

static int add_type(PyObject *module, PyType_Spec *spec, const char *name) {
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL)
        return -1;
    int added = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return added;
}

static const struct {
    PyObject **name;
    const char *text;
} names[] = {
    {&name_step, "step"},
    {&name_fields, "_fields"},
    {&name_abnormal, "abnormal"},
    {&name_nbytes, "nbytes"},
    {&name_kind, "kind"},
    {&name_actions, "actions"},
    {&name_timesteps, "timesteps"},
    {&name_latest, "_latest"},
    {&name_posted_for_last, "_posted_for_last"},
    {&name_n_posts, "n_posts"},
    {&name_returning, "returning"},
    {&name_unfinished, "_unfinished"},
    {&name_caller, "caller"},
    {&name_result, "result"},
    {&name_count, "count"},
    {&name_n_before, "n_before"},
    {&name_begun, "begun"},
};

static PyMethodDef module_methods[] = {
    {"timesteps", timesteps, METH_VARARGS, timesteps_doc},
    {"records", records, METH_VARARGS, records_doc},
    {"columns", columns, METH_VARARGS, columns_doc},
    {"dicts", dicts, METH_VARARGS, dicts_doc},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    for (size_t k = 0; k < sizeof names / sizeof *names; k++)
        if ((*names[k].name = PyUnicode_InternFromString(names[k].text)) == NULL)
            return -1;
    if (PyModule_AddIntConstant(module, "ABI", ABI) < 0 ||
        PyModule_AddIntConstant(module, "MOST_LEAVES", MOST_LEAVES) < 0 ||
        add_type(module, &step_spec, "OrdinaryStep") < 0 ||
        add_type(module, &infos_spec, "PlainInfos") < 0 ||
        add_type(module, &handed_spec, "HandedInfos") < 0 ||
        add_type(module, &batch_spec, "BatchOfSteps") < 0 ||
        add_type(module, &rows_spec, "OrdinaryRows") < 0)
        return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_hot", "The ordinary step, in C; see envmgr/hot.py.", 0, module_methods,
    module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__hot(void) { return PyModuleDef_Init(&definition); }
