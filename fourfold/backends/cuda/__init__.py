"""CUDA C++ kernels: on a GPU, compiled by NVRTC and launched by cuda-core; on the CPU, compiled by g++ and emulated."""
