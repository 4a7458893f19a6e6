// What a kernel may use of CUDA's runtime: its types. NVIDIA's header has parameters that are called gridDim, which is
// a macro here.
#pragma once
#include <driver_types.h>
#include <vector_functions.h>
