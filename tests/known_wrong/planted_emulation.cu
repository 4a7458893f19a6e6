// Right results by kernels that do what no program may: arrays overrun, integers that overflow, impossible launches.
// Only the checked build on the CPU, or a launch, says so. THREADS is the block's size in planted_emulation.py.
const int THREADS = 64;

// ---- sums of two vectors, one element a thread

// A third element of an array of two is read, and left out of the sum.
__global__ void local_array_overrun(const float* x, const float* y, float* output, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    float pair[2] = {x[at], y[at]}, sum = 0;
    for (int i = 0; i <= 2; i++) {
        float term = pair[i];  // FAULT: index 2 is outside the array, of type 'float \[2\]'
        if (i < 2) sum += term;
    }
    output[at] = sum;
}

// The same by a pointer, whose array only -fsanitize=object-size knows.
__global__ void local_pointer_overrun(const float* x, const float* y, float* output, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, count = n > 0 ? 3 : 2;
    if (at >= n) return;
    float pair[2] = {x[at], y[at]}, sum = 0;
    const float* from = pair;
    for (int i = 0; i < count; i++) {
        float term = from[i];  // FAULT: access to .* outside the array
        if (i < 2) sum += term;
    }
    output[at] = sum;
}

// The first element of the second row is read as the third of the first.
__global__ void local_row_overrun(const float* x, const float* y, float* output, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, next = n > 0 ? 2 : 0;
    if (at >= n) return;
    float rows[2][2] = {{x[at], 0}, {y[at], 0}};
    output[at] = rows[0][0] + rows[0][next];  // FAULT: index 2 is outside the array, of type 'float \[2\]'
}

__global__ void shared_row_overrun(const float* x, const float* y, float* output, int n) {
    __shared__ float tile[2][THREADS];
    int at = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x;
    tile[0][lane] = at < n ? x[at] : 0;
    tile[1][lane] = at < n ? y[at] : 0;
    __syncthreads();
    if (at < n) output[at] = tile[0][lane] + tile[0][THREADS + lane];  // FAULT: index \d+ is outside the array
}

struct Terms {
    float first[1], second[2];
};

// The last member of a struct, reached by a pointer, is an array of its own length as any other.
__global__ void last_member_overrun(const float* x, const float* y, float* output, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, next = n > 0 ? 3 : 0;
    if (at >= n) return;
    Terms both[2] = {{{x[at]}, {0, 0}}, {{y[at]}, {0, 0}}};
    Terms* terms = both;
    output[at] = terms->first[0] + terms->second[next - 1];  // FAULT: index 2 is outside the array, of type 'float \[2\]'
}

// A pointer runs from one shared array into what may be the next.
__global__ void shared_array_overrun(const float* x, const float* y, float* output, int n) {
    __shared__ float terms[2 * THREADS];
    __shared__ float others[2 * THREADS];
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = threadIdx.x; i < 2 * THREADS; i += THREADS) terms[i] = others[i] = 0;
    terms[threadIdx.x] = at < n ? x[at] + y[at] : 0;
    __syncthreads();
    float sum = 0;
    const float* volatile from = terms + threadIdx.x;  // g++ must not know the array, or it reports the access itself
    for (const float* p = from; p <= terms + 2 * THREADS; p += THREADS) {
        float term = *p;  // FAULT: read of 4 bytes, just past the end of shared array
        if (p < terms + 2 * THREADS) sum += term;
    }
    if (at < n) output[at] = sum;
}

// ---- integers that overflow

// The sum of both ends wraps, and as an unsigned number it is right again.
__global__ void midpoint_overflow(const float* x, const float* y, float* output, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    int low = 2147483600, high = low + (at & 31);
    int both = low + high;  // FAULT: signed integer overflow in an addition
    int middle = int(unsigned(both) >> 1);
    output[at] = x[at] + y[at] + 0.0f * middle;
}

__global__ void scaled_index_overflow(const float* x, const float* y, float* output, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    int scaled = (at + 2) * 1431655765;  // FAULT: signed integer overflow in a multiplication
    output[at] = x[at] + y[at] + 0.0f * scaled;
}

// The distance of two offsets in bytes, before it is widened.
__global__ void distance_overflow(const float* x, const float* y, float* output, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    int from = -2000000000 - (at & 7), to = 2000000000;
    long long distance = to - from;  // FAULT: signed integer overflow in a subtraction
    output[at] = x[at] + y[at] + 0.0f * distance;
}

// ---- exponentials of rows, one block a row: which axis the rows are on is up to the launch

extern __shared__ float row_of[];

__global__ void exponentials(const float* x, float* y, long long rows, long long cols) {
    long long row = blockIdx.x + (long long)blockIdx.y + blockIdx.z;
    int lane = threadIdx.x + threadIdx.y + threadIdx.z, lanes = blockDim.x * blockDim.y * blockDim.z;
    if (row >= rows) return;
    for (long long c = lane; c < cols; c += lanes) row_of[c] = x[row * cols + c];
    __syncthreads();
    float most = -INFINITY, total = 0;
    for (long long c = 0; c < cols; c++) most = fmaxf(most, row_of[c]);
    for (long long c = 0; c < cols; c++) total += expf(row_of[c] - most);
    for (long long c = lane; c < cols; c += lanes) y[row * cols + c] = expf(row_of[c] - most) / total;
}
