#include "norm_rows.cuh"
