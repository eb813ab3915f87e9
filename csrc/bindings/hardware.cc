#include "bindings/bindings.h"

void bind_hardware(pybind11::module_&) {}
