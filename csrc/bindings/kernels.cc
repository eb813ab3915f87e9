#include "bindings/bindings.h"

void bind_kernels(pybind11::module_&) {}
