// The Python module syshaxd._core: gathers what the files beside it bind. The contract is daemon/_core.pyi.
#include "bindings/bindings.h"

#include <pybind11/pybind11.h>

#include "base/error.h"

namespace py = pybind11;

namespace {

// CoreError as a Python exception with attributes code and hint.
void bind_error(py::module_& m) {
  static PyObject* type = PyErr_NewException("syshaxd._core.CoreError", PyExc_Exception, nullptr);
  m.attr("CoreError") = py::handle(type);
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const syshax::CoreError& e) {
      py::object error = py::reinterpret_borrow<py::object>(type)(e.what());
      error.attr("code") = e.code();
      error.attr("hint") = e.hint();
      PyErr_SetObject(type, error.ptr());
    }
  });
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  bind_error(m);
  bind_hardware(m);
  bind_memory(m);
  bind_kernels(m);
  bind_runtime(m);
  bind_bench(m);
  bind_files(m);
  bind_harness(m);
}
