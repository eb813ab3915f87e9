// Binds packed files, and GuardedFile: a read-only buffer for numpy, which keeps the mapping alive as long as an array
// looks into it.
#include <errno.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "base/xxh64.h"
#include "bindings/bindings.h"
#include "ipc/guarded_file.h"
#include "memory/packed_file.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace {

uint64_t xxh64(const py::buffer& data, uint64_t seed) {
  const py::buffer_info view = data.request();
  if (!PyBuffer_IsContiguous(view.view(), 'C')) throw syshax::CoreError("invalid_argument", "bytes with gaps");
  const py::gil_scoped_release no_gil;
  return syshax::xxh64(view.ptr, static_cast<size_t>(view.size * view.itemsize), seed);
}

std::vector<uint64_t> copy_packed(int from, int to, uint64_t offset, uint64_t bytes) {
  int error_number = 0;
  std::vector<uint64_t> checksums;
  {
    const py::gil_scoped_release no_gil;
    checksums = syshax::copy_packed(from, to, offset, bytes, &error_number);
  }
  if (error_number != 0) {
    errno = error_number;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
  return checksums;
}

}  // namespace

void bind_files(py::module_& m) {
  m.def("copy_packed", copy_packed, "source"_a, "target"_a, "offset"_a, "bytes"_a);
  m.def("xxh64", xxh64, "data"_a, "seed"_a = 0);
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
