// The test module _core_emulated: formats and kernels over a core whose AVX-512 is software. One file, since pybind11's
// headers take longest.
#include "bindings/kernels.cc"

PYBIND11_MODULE(_core_emulated, m) { bind_kernels(m); }
