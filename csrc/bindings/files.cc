// Binds GuardedFile: a read-only buffer for numpy, which keeps the mapping alive as long as an array looks into it.
#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "ipc/guarded_file.h"

namespace py = pybind11;
using namespace pybind11::literals;

void bind_files(py::module_& m) {
  using syshax::GuardedFile;
  py::class_<GuardedFile>(m, "GuardedFile", py::buffer_protocol())
      .def(py::init<int>(), "fd"_a)
      .def_buffer([](const GuardedFile& file) {
        return py::buffer_info(static_cast<const uint8_t*>(file.data()), static_cast<py::ssize_t>(file.bytes()), true);
      })
      .def("cut_short", &GuardedFile::cut_short)
      .def("prefetch", &GuardedFile::prefetch, "offset"_a, "bytes"_a, py::call_guard<py::gil_scoped_release>())
      .def("release", &GuardedFile::release, "offset"_a, "bytes"_a, py::call_guard<py::gil_scoped_release>());
}
