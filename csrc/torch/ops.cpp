/* ops.cpp - the loan of nn.Linear and of convolutions without a frame of Python: a layer's call,
 * and the module that offers it.
 *
 * `oracle_offload.layers.loan` is the reference, and what runs wherever anything here is not as
 * usual: a call is handed over as a whole before anything of it has begun, and so is a backward.
 * What both read, they read of the same objects of Python: a layer keeps nothing here but what its
 * masters, and the arguments of its module, were. The engine is reached through the binding, so
 * that it sees the same uses. */
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include <structmember.h>

#include "convolution.h"
#include "dispatcher.h"
#include "forward.h"
#include "linear.h"

namespace {

using namespace oo;

/* ---- the types and functions of the module ---- */

template <typename Kind> Native<Kind> *native(PyObject *object) {
    return reinterpret_cast<Native<Kind> *>(object);
}

template <typename Kind>
PyObject *native_call(PyObject *object, PyObject *const *arguments, size_t count,
                      PyObject *keywords) {
    HANDLE_TH_ERRORS
    if (PyVectorcall_NARGS(count) != 2 || keywords) {
        PyErr_SetString(PyExc_TypeError, "a layer and its input are needed");
        return nullptr;
    }
    PyObject *layer = arguments[0], *x = arguments[1];
    if (THPVariable_CheckExact(x)) {
        at::Tensor y = forward(*native<Kind>(object), layer, THPVariable_Unpack(x));
        if (y.defined())
            return THPVariable_Wrap(std::move(y));
    }
    return PyObject_CallOneArg(layer, x);
    END_HANDLE_TH_ERRORS
}

template <typename Kind>
PyObject *native_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    HANDLE_TH_ERRORS
    PyObject *device;
    if (keywords || !PyArg_ParseTuple(arguments, "O", &device))
        return nullptr;
    TORCH_CHECK_TYPE(THPDevice_Check(device), "a torch.device is needed");
    Native<Kind> *self = native<Kind>(Owned(type->tp_alloc(type, 0)).release());
    self->call = native_call<Kind>;
    new (&self->device) c10::Device(reinterpret_cast<THPDevice *>(device)->device);
    new (&self->known) Known();
    new (&self->kind) Kind();
    return reinterpret_cast<PyObject *>(self);
    END_HANDLE_TH_ERRORS
}

template <typename Kind> void native_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    native<Kind>(object)->known.~Known();
    native<Kind>(object)->kind.~Kind();
    type->tp_free(object);
    Py_DECREF(type);
}

PyMemberDef native_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, sizeof(PyObject), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

char native_doc[] = "Called with a layer of this kind and its input, computes what the layer does.";

/* Nodes show themselves to Python by a type; nobody makes one there. */
struct Nobody {
    Node *operator()(PyObject *) const { throw torch::TypeError("a graph alone makes this"); }
};

/* Add what computes a kind of layers to the module, under the kind's name. */
template <typename Kind> void add_kind(PyObject *module) {
    static PyTypeObject node_type;
    torch::autograd::registerCppFunction(
        typeid(Backward<Kind>),
        torch::autograd::createForwardFunctionPyTypeObject<Nobody>(node_type, Kind::node_name));
    PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void *>(native_new<Kind>)},
        {Py_tp_call, reinterpret_cast<void *>(PyVectorcall_Call)},
        {Py_tp_dealloc, reinterpret_cast<void *>(native_dealloc<Kind>)},
        {Py_tp_members, native_members},
        {Py_tp_doc, native_doc},
        {0, nullptr},
    };
    static const std::string name = std::string("oracle_offload._ops.") + Kind::name;
    PyType_Spec spec = {name.c_str(), sizeof(Native<Kind>), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
    native_type<Kind> = Owned(PyType_FromSpec(&spec)).release();
    if (PyModule_AddObjectRef(module, Kind::name, native_type<Kind>) < 0)
        raise();
}

PyObject *counts(PyObject *, PyObject *) {
    return Py_BuildValue("(LL)", static_cast<long long>(n_forward),
                         static_cast<long long>(n_backward));
}

PyMethodDef functions[] = {
    {"counts", counts, METH_NOARGS, "counts()\n--\n\nForwards and backwards computed here."},
    {nullptr, nullptr, 0, nullptr},
};

PyObject *attribute(const char *module, const char *name) {
    return get(Owned(PyImport_ImportModule(module)), Owned(PyUnicode_FromString(name))).release();
}

/* Take what is asked of Python for as long as the process lives. */
void find_all() {
    core = static_cast<const oo_handover *>(PyCapsule_GetPointer(
        Owned(attribute("oracle_offload._core", "handover")), OO_HANDOVER_NAME));
    if (!core)
        raise();
    TORCH_CHECK(core->layout == OO_HANDOVER_LAYOUT, "made for another build of oracle_offload");
#define INTERN(name) names.name = Owned(PyUnicode_InternFromString(#name)).release();
    NAMES(INTERN)
#undef INTERN
    engine_type = attribute("oracle_offload._core", "Engine");
    offload_error = attribute("oracle_offload.errors", "OffloadError");
    reads_ones = Owned(attribute("oracle_offload.layers.linear", "READS_ONES")) == Py_True;
    no_room_error = attribute("oracle_offload.errors", "NoRoomError");
    differentiate = attribute("oracle_offload.layers.loan", "differentiate");
    note_trainable_there = attribute("oracle_offload.gradients", "note_trainable");
    layers_there = attribute("oracle_offload.layers.traced", "layers");
    kept_cast_there = attribute("oracle_offload.autocast", "kept_cast");
    keeps_casts_with_grad_there = attribute("oracle_offload.autocast", "keeps_casts_with_grad");
    gradients_globals = attribute("oracle_offload.gradients", "__dict__");
    profiler_globals = attribute("torch.autograd.profiler", "__dict__");
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "oracle_offload._ops",
    "Loans without a frame of Python; see csrc/torch/ops.cpp.",
    -1,
    functions,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

} // namespace

PyMODINIT_FUNC PyInit__ops(void) {
    HANDLE_TH_ERRORS
    find_all();
    Owned module(PyModule_Create(&definition));
    add_kind<Linear>(module);
    add_kind<Convolution<1>>(module);
    add_kind<Convolution<2>>(module);
    add_kind<Convolution<3>>(module);
    add_all_kernels();
    return module.release();
    END_HANDLE_TH_ERRORS
}
