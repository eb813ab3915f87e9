#include "bindings/bindings.h"

void bind_bench(pybind11::module_&) {}
