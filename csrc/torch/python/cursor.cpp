#include "torch/python/cursor.h"

#include "torch/python/types.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

using CursorObject = Object<Cursor>;

PyObject* new_cursor(PyTypeObject* type, PyObject*, PyObject*) {
  return translated([&] { return CursorObject::make(type, 0LL, 0LL); });
}

PyGetSetDef kCursorProperties[] = {
    {"seq", &get_field<Cursor, &Cursor::seq>, &set_field<Cursor, &Cursor::seq>, nullptr, nullptr},
    {"slot", &get_field<Cursor, &Cursor::slot>, &set_field<Cursor, &Cursor::slot>, nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot kCursorSlots[] = {
    {Py_tp_new, as_slot(&new_cursor)},
    {Py_tp_dealloc, as_slot(&CursorObject::destroy)},
    {Py_tp_getset, kCursorProperties},
    {0, nullptr},
};

PyType_Spec kCursorSpec = {"fastcheck._C.Cursor", sizeof(CursorObject), 0, Py_TPFLAGS_DEFAULT,
                           kCursorSlots};

PyTypeObject* cursor_type() {
  static PyTypeObject* const made = new_type(kCursorSpec);
  return made;
}

}  // namespace

Cursor& cursor_of(py::handle object) { return fields_of<Cursor>(cursor_type(), object); }

void define_cursor(py::module_& m) {
  m.attr("Cursor") = py::handle(reinterpret_cast<PyObject*>(cursor_type()));
}

}  // namespace fastcheck
