#include "bindings/bindings.h"

void bind_runtime(pybind11::module_&) {}
