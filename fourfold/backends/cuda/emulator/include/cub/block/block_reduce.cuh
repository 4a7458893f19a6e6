// See cub/cub.cuh.
#pragma once
#include "../cub.cuh"
