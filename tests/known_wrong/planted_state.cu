// softmax of float32 in kernels that pass statistics on, one thread a row: correct as NONE, else with one mistake.
// The input is rows x cols with one stride between rows and one between columns. Results are contiguous.

enum Fault { NONE, NO_MAXIMUM, COUNTER_OF_8_BITS, STATISTICS_OVERWRITTEN };

// Columns that are summed before their sum is added to that of others.
const int PIECE = 64;

__device__ long long owned() { return blockIdx.x * (long long)blockDim.x + threadIdx.x; }

__global__ void statistics_kernel(const float* x, float* statistics, int* calls, long long rows, long long cols,
                                  long long row_stride, long long col_stride, long long fault) {
    // One thread owns one row: its largest number, and the sum of its exponentials.
    long long row = owned();
    if (row >= rows) return;
    if (row == 0) *calls = (*calls + 1) & 255;
    float most = -INFINITY, total = 0;
    for (long long c = 0; c < cols; c++) most = fmaxf(most, x[row * row_stride + c * col_stride]);
    if (fault == NO_MAXIMUM) most = 0;
    for (long long start = 0; start < cols; start += PIECE) {
        float part = 0;
        for (long long c = start; c < start + PIECE && c < cols; c++)
            part += expf(x[row * row_stride + c * col_stride] - most);
        total += part;
    }
    statistics[row] = most;
    statistics[rows + row] = total;
}

__global__ void output_kernel(const float* x, const float* statistics, const int* calls, float* y, long long rows,
                              long long cols, long long row_stride, long long col_stride, long long fault) {
    // One thread owns one row of y.
    long long row = owned();
    if (row >= rows) return;
    bool ready = fault != COUNTER_OF_8_BITS || *calls > 0;
    for (long long c = 0; c < cols; c++) {
        float power = expf(x[row * row_stride + c * col_stride] - statistics[row]);
        y[row * cols + c] = ready ? power / statistics[rows + row] : 0;
    }
}

__global__ void gradient_kernel(const float* grad_output, const float* x, float* statistics, float* grad_x,
                                long long rows, long long cols, long long grad_row_stride, long long grad_col_stride,
                                long long row_stride, long long col_stride, long long fault) {
    // One thread owns one row of grad_x.
    long long row = owned();
    if (row >= rows) return;
    float most = statistics[row], of_row = statistics[rows + row], total = 0;
    for (long long start = 0; start < cols; start += PIECE) {
        float part = 0;
        for (long long c = start; c < start + PIECE && c < cols; c++) {
            float y = expf(x[row * row_stride + c * col_stride] - most) / of_row;
            part += grad_output[row * grad_row_stride + c * grad_col_stride] * y;
        }
        total += part;
    }
    if (fault == STATISTICS_OVERWRITTEN) statistics[rows + row] = total;
    for (long long c = 0; c < cols; c++) {
        float y = expf(x[row * row_stride + c * col_stride] - most) / of_row;
        grad_x[row * cols + c] = y * (grad_output[row * grad_row_stride + c * grad_col_stride] - total);
    }
}
