// One function for each file in this folder; module.cc calls them.
#pragma once
#include <pybind11/pybind11.h>

void bind_hardware(pybind11::module_& m);  // hardware.cc: CPU features, topology
void bind_kernels(pybind11::module_& m);   // kernels.cc: formats, kernels, vector ops
void bind_runtime(pybind11::module_& m);   // runtime.cc: Runtime, Model
void bind_bench(pybind11::module_& m);     // bench.cc
