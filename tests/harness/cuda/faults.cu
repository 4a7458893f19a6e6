// Kernels with one planted fault each. A line that the report may name ends in "FAULT:", the exception's name and, if
// it matters, a part of the message; two lines can race. Unless "launch:" says otherwise, a block has 256 threads, and
// `a` and `c` hold 250 elements.

// ---- out of bounds

__global__ void reads_past_the_end(const float* a, float* c, long long n) {
    long long i = threadIdx.x;
    if (i <= n) {
        float v = a[i];  // FAULT: OutOfBounds
        c[i < n ? i : 0] = v;
    }
}

__global__ void writes_past_the_end(const float* a, float* c, long long n) {
    long long i = threadIdx.x;
    if (i <= n) c[i] = 1.0f;  // FAULT: OutOfBounds
}

__global__ void reads_before_the_start(const float* a, float* c, long long n) {
    long long i = threadIdx.x;
    if (i < n) c[i] = a[i - 1];  // FAULT: OutOfBounds
}

__global__ void reads_far_away(const float* a, float* c, long long n) {
    long long i = threadIdx.x;
    if (i < n) c[i] = a[i + 1000000000000];  // FAULT: OutOfBounds
}

// launch: null
__global__ void reads_null(const float* a, float* c, long long n) {
    if (threadIdx.x < n) c[threadIdx.x] = a[threadIdx.x];  // FAULT: OutOfBounds
}

// n is even, and a pair that starts at the last element is aligned if the tensor starts at an odd one.
// launch: odd
__global__ void reads_half_past_the_end(const float* a, float* c, long long n) {
    if (threadIdx.x == 0) {
        float2 pair = *reinterpret_cast<const float2*>(a + n - 1);  // FAULT: OutOfBounds
        c[0] = pair.x + pair.y;
    }
}

__global__ void copies_past_the_end(const float* a, float* c, long long n) {
    float local[8];
    if (threadIdx.x == 0) {
        for (int i = 0; i < 8; i++) local[i] = i;
        memcpy(c + n - 4, local, 4 * (n - 244));  // FAULT: OutOfBounds
    }
}

__global__ void writes_through_const(const float* a, float* c, long long n) {
    if (threadIdx.x < n) const_cast<float*>(a)[threadIdx.x] = 1.0f;  // FAULT: OutOfBounds
}

// launch: strided
__global__ void reads_a_gap_between_rows(const float* a, float* c, long long n) {
    if (threadIdx.x < 10) c[threadIdx.x] = a[threadIdx.x];  // FAULT: OutOfBounds
}

// launch: strided
__global__ void writes_a_gap_between_rows(const float* a, float* c, long long n) {
    if (threadIdx.x < 10) c[threadIdx.x * 25 + 24] = 1.0f;  // FAULT: OutOfBounds
}

__global__ void indexes_past_a_shared_array(const float* a, float* c, long long n) {
    __shared__ float s[255];
    s[threadIdx.x] = a[threadIdx.x % n];  // FAULT: OutOfBounds
    __syncthreads();
    if (threadIdx.x < n) c[threadIdx.x] = s[threadIdx.x];
}

__global__ void points_past_a_shared_array(const float* a, float* c, long long n) {
    __shared__ float s[255];
    float* p = s;
    p += threadIdx.x;
    *p = a[threadIdx.x % n];  // FAULT: OutOfBounds
    __syncthreads();
    if (threadIdx.x < n) c[threadIdx.x] = *p;
}

// launch: block 16 16
__global__ void indexes_past_a_shared_row(const float* a, float* c, long long n) {
    __shared__ float s[16][16];
    float (*p)[16] = s;
    int x = threadIdx.x, y = threadIdx.y;
    p[y][x] = a[16 * y];
    __syncthreads();
    if (y < 15) c[16 * y + x] = p[y][x + 1];  // FAULT: OutOfBounds
}

// launch: block 16 17
__global__ void confuses_rows_and_cols(const float* a, float* c, long long n) {
    if (threadIdx.x * 17 + threadIdx.y < n) c[threadIdx.y * 16 + threadIdx.x] = a[threadIdx.y];  // FAULT: OutOfBounds
}

// launch: shared 1020
__global__ void is_given_too_little_dynamic_shared(const float* a, float* c, long long n) {
    extern __shared__ float dynamic[];
    dynamic[threadIdx.x] = a[threadIdx.x % n];  // FAULT: OutOfBounds
    __syncthreads();
    if (threadIdx.x < n) c[threadIdx.x] = dynamic[threadIdx.x];
}

__global__ void adds_atomically_past_the_end(const float* a, float* c, long long n) {
    if (threadIdx.x <= n) atomicAdd(&c[threadIdx.x], 1.0f);  // FAULT: OutOfBounds
}

__global__ void loads_a_cached_value_past_the_end(const float* a, float* c, long long n) {
    if (threadIdx.x < n) c[threadIdx.x] = __ldg(a + threadIdx.x + 1);  // FAULT: OutOfBounds
}

__device__ float area(float4 box) { return (box.z - box.x) * (box.w - box.y); }

__global__ void passes_a_vector_past_the_end_by_value(const float* a, float* c, long long n) {
    long long i = threadIdx.x;
    if (4 * i < n) c[i] = area(reinterpret_cast<const float4*>(a)[i]);  // FAULT: OutOfBounds
}

// ---- races

__global__ void reads_a_neighbour_without_a_barrier(const float* a, float* c, long long n) {
    __shared__ float s[256];
    s[threadIdx.x] = threadIdx.x < n ? a[threadIdx.x] : 0.0f;  // FAULT: Race
    if (threadIdx.x < n) c[threadIdx.x] = s[255 - threadIdx.x];  // FAULT: Race
}

__global__ void overwrites_without_a_second_barrier(const float* a, float* c, long long n) {
    __shared__ float s[256];
    float sum = 0.0f;
    for (int k = 0; k < 3; k++) {
        s[threadIdx.x] = threadIdx.x < n ? a[threadIdx.x] * (k + 1) : 0.0f;  // FAULT: Race
        __syncthreads();
        sum += s[(threadIdx.x + 37) % 256];  // FAULT: Race
    }
    if (threadIdx.x < n) c[threadIdx.x] = sum;
}

// Threads of a warp are in lockstep no more.
__global__ void reads_a_lane_without_syncwarp(const float* a, float* c, long long n) {
    __shared__ float s[256];
    int i = threadIdx.x;
    s[i] = i < n ? a[i] : 0.0f;  // FAULT: Race
    if (i < n) c[i] = s[i ^ 1];  // FAULT: Race
}

__global__ void syncs_too_few_lanes(const float* a, float* c, long long n) {
    __shared__ float s[256];
    int i = threadIdx.x, lane = i % 32;
    s[i] = i < n ? a[i] : 0.0f;  // FAULT: Race
    __syncwarp(lane < 16 ? 0x0000ffff : 0xffff0000);
    if (i < n) c[i] = s[i ^ 16];  // FAULT: Race
}

__global__ void sums_without_an_atomic(const float* a, float* c, long long n) {
    if (threadIdx.x < n) c[0] += a[threadIdx.x];  // FAULT: Race
}

// launch: grid 2
__global__ void writes_where_another_block_does(const float* a, float* c, long long n) {
    long long i = threadIdx.x + blockIdx.x * 200;
    if (i < n) c[i] = a[i] + blockIdx.x;  // FAULT: Race
}

__global__ void reads_what_others_add_to(const float* a, float* c, long long n) {
    if (threadIdx.x < n) atomicAdd(&c[0], a[threadIdx.x]);  // FAULT: Race
    if (threadIdx.x == 0) c[1] = c[0];  // FAULT: Race
}

__global__ void every_thread_overwrites_what_it_read(const float* a, float* c, long long n) {
    __shared__ float s[1];
    if (threadIdx.x == 0) s[0] = a[0];
    __syncthreads();
    float v = s[0];  // FAULT: Race
    if (threadIdx.x == 0) s[0] = v + 1;  // FAULT: Race
    if (threadIdx.x < n) c[threadIdx.x] = v;
}

// launch: block 16 16
__global__ void reads_a_tile_without_a_barrier(const float* a, float* c, long long n) {
    __shared__ float tile[16][17];
    long long i = threadIdx.y * 16 + threadIdx.x;
    tile[threadIdx.y][threadIdx.x] = i < n ? a[i] : 0.0f;  // FAULT: Race
    if (i < n) c[i] = tile[threadIdx.x][threadIdx.y];  // FAULT: Race
}

__global__ void shares_halves_without_a_barrier(const float* a, float* c, long long n) {
    __shared__ unsigned short s[256];
    s[threadIdx.x] = threadIdx.x;  // FAULT: Race
    if (threadIdx.x < n) c[threadIdx.x] = s[255 - threadIdx.x];  // FAULT: Race
}

__device__ bool is_last_block(float* counter) {
    return atomicAdd(reinterpret_cast<unsigned*>(counter), 1u) == gridDim.x - 1;
}

// launch: grid 4
__global__ void last_block_without_a_fence(const float* a, float* c, long long n) {
    if (threadIdx.x != 0) return;
    c[1 + blockIdx.x] = a[blockIdx.x];  // FAULT: Race
    if (!is_last_block(c)) return;
    float sum = 0.0f;
    for (unsigned b = 0; b < gridDim.x; b++) sum += c[1 + b];  // FAULT: Race
    c[100] = sum;
}

// launch: grid 4
__global__ void last_block_without_an_atomic(const float* a, float* c, long long n) {
    if (threadIdx.x != 0) return;
    c[1 + blockIdx.x] = a[blockIdx.x];
    __threadfence();
    unsigned* counter = reinterpret_cast<unsigned*>(c);
    unsigned ticket = *counter;  // FAULT: Race
    *counter = ticket + 1;  // FAULT: Race
    if (ticket != gridDim.x - 1) return;
    float sum = 0.0f;
    for (unsigned b = 0; b < gridDim.x; b++) sum += c[1 + b];
    c[100] = sum;
}

// launch: grid 4
__global__ void last_block_with_the_fence_too_early(const float* a, float* c, long long n) {
    if (threadIdx.x != 0) return;
    __threadfence();
    c[1 + blockIdx.x] = a[blockIdx.x];  // FAULT: Race
    if (!is_last_block(c)) return;
    float sum = 0.0f;
    for (unsigned b = 0; b < gridDim.x; b++) sum += c[1 + b];  // FAULT: Race
    c[100] = sum;
}

// launch: grid 4
__global__ void last_block_with_a_fence_for_one_block(const float* a, float* c, long long n) {
    if (threadIdx.x != 0) return;
    c[1 + blockIdx.x] = a[blockIdx.x];  // FAULT: Race
    __threadfence_block();
    if (!is_last_block(c)) return;
    float sum = 0.0f;
    for (unsigned b = 0; b < gridDim.x; b++) sum += c[1 + b];  // FAULT: Race
    c[100] = sum;
}

// Only thread 0 has taken a ticket: the others may look at the partial sums before it has.
// launch: grid 2 block 64
__global__ void last_block_without_a_barrier(const float* a, float* c, long long n) {
    if (threadIdx.x == 0) {
        c[1 + blockIdx.x] = a[blockIdx.x];  // FAULT: Race
        __threadfence();
        atomicAdd(reinterpret_cast<unsigned*>(c), 1u);
    }
    c[100 + blockIdx.x * 64 + threadIdx.x] = c[1 + threadIdx.x % 2];  // FAULT: Race
}

// ---- barriers and warp exchanges that not all threads reach

__global__ void barrier_in_a_branch(const float* a, float* c, long long n) {
    __shared__ float s[256];
    s[threadIdx.x] = 1.0f;
    if (threadIdx.x < 128) __syncthreads();  // FAULT: DivergentBarrier
    if (threadIdx.x < n) c[threadIdx.x] = s[threadIdx.x];
}

__global__ void barriers_in_both_branches(const float* a, float* c, long long n) {
    __shared__ float s[256];
    s[threadIdx.x] = 1.0f;
    if (threadIdx.x < 128)
        __syncthreads();  // FAULT: DivergentBarrier
    else
        __syncthreads();  // FAULT: DivergentBarrier
    if (threadIdx.x < n) c[threadIdx.x] = s[255 - threadIdx.x];
}

__global__ void barrier_after_an_early_return(const float* a, float* c, long long n) {
    __shared__ float s[256];
    if (threadIdx.x >= n) return;
    s[threadIdx.x] = a[threadIdx.x];
    __syncthreads();  // FAULT: DivergentBarrier
    c[threadIdx.x] = s[n - 1 - threadIdx.x];
}

__global__ void barrier_in_a_loop_of_uneven_length(const float* a, float* c, long long n) {
    for (unsigned i = threadIdx.x; i < n; i += 100) __syncthreads();  // FAULT: DivergentBarrier
}

__global__ void votes_in_a_branch(const float* a, float* c, long long n) {
    if (threadIdx.x < 32) c[threadIdx.x] = __syncthreads_count(threadIdx.x % 2);  // FAULT: DivergentBarrier
}

__global__ void shuffles_outside_the_mask(const float* a, float* c, long long n) {
    float v = threadIdx.x < n ? a[threadIdx.x] : 0.0f;
    v += __shfl_xor_sync(0x0000ffffu, v, 1);  // FAULT: DivergentWarp
    if (threadIdx.x < n) c[threadIdx.x] = v;
}

__global__ void shuffles_two_ways_at_once(const float* a, float* c, long long n) {
    float v = a[threadIdx.x % n];
    if (threadIdx.x % 2)
        v += __shfl_xor_sync(~0u, v, 1);  // FAULT: DivergentWarp
    else
        v += __shfl_down_sync(~0u, v, 1);  // FAULT: DivergentWarp
    if (threadIdx.x < n) c[threadIdx.x] = v;
}

// launch: block 40
__global__ void shuffles_lanes_that_do_not_exist(const float* a, float* c, long long n) {
    float v = a[threadIdx.x];
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);  // FAULT: DivergentWarp
    c[threadIdx.x] = v;
}

__global__ void shuffles_in_half_a_warp_before_a_barrier(const float* a, float* c, long long n) {
    float v = a[threadIdx.x % n];
    if (threadIdx.x % 32 < 16) v += __shfl_xor_sync(0xffffffffu, v, 1);  // FAULT: Deadlock
    __syncthreads();  // FAULT: Deadlock
    if (threadIdx.x < n) c[threadIdx.x] = v;
}

// launch: grid 2 seconds 0.3
__global__ void waits_for_another_block(const float* a, float* c, long long n) {
    unsigned* flags = reinterpret_cast<unsigned*>(c);
    if (threadIdx.x == 0) {
        atomicExch(&flags[blockIdx.x], 1u);
        while (atomicAdd(&flags[1 - blockIdx.x], 0u) != 1u) {}  // FAULT: Deadlock
    }
}

// launch: seconds 0.3
__global__ void never_ends(const float* a, float* c, long long n) {
    float v = a[0];
    while (v >= 0.0f) v = v * 0.5f + a[1];  // FAULT: Deadlock
    c[0] = v;
}

// ---- uninitialised shared memory

__global__ void reads_what_was_not_written(const float* a, float* c, long long n) {
    __shared__ float s[256];
    if (threadIdx.x < 200) s[threadIdx.x] = a[threadIdx.x % n];
    __syncthreads();
    if (threadIdx.x < n) c[threadIdx.x] = s[threadIdx.x];  // FAULT: UninitialisedShared
}

__global__ void sums_into_what_was_not_zeroed(const float* a, float* c, long long n) {
    __shared__ float sum;
    atomicAdd(&sum, a[threadIdx.x % n]);  // FAULT: UninitialisedShared
    __syncthreads();
    if (threadIdx.x == 0) c[0] = sum;
}

// launch: shared 1024
__global__ void reads_dynamic_shared_of_the_block_before(const float* a, float* c, long long n) {
    extern __shared__ float dynamic[];
    if (threadIdx.x < n) c[threadIdx.x] = dynamic[threadIdx.x];  // FAULT: UninitialisedShared
    dynamic[threadIdx.x] = 1.0f;
}

__global__ void uses_a_shared_index_that_was_not_written(const float* a, float* c, long long n) {
    __shared__ int chosen[32];
    if (threadIdx.x == 1) chosen[3] = 3;
    if (threadIdx.x == 0) c[0] = a[chosen[5]];  // FAULT: UninitialisedShared
}

// ---- alignment and arithmetic

__global__ void loads_a_misaligned_vector(const float* a, float* c, long long n) {
    int i = threadIdx.x;
    if (4 * i + 5 < n) {
        float4 v = *reinterpret_cast<const float4*>(a + 4 * i + 1);  // FAULT: Misaligned
        c[i] = v.x + v.w;
    }
}

__global__ void adds_atomically_at_a_misaligned_place(const float* a, float* c, long long n) {
    char* bytes = reinterpret_cast<char*>(c);
    if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned*>(bytes + 2), 1u);  // FAULT: Misaligned
}

__global__ void overflows_an_index(const float* a, float* c, long long n) {
    int i = threadIdx.x;
    int at = (i + 1) * 100000000;  // FAULT: UndefinedArithmetic: signed integer overflow in a multiplication
    if (i < n) c[i] = a[(at >> 24) & 127];
}

__global__ void shifts_too_far(const float* a, float* c, long long n) {
    int i = threadIdx.x;
    if (i < n) c[i] = 1u << (i + 1);  // FAULT: UndefinedArithmetic
}

__global__ void divides_by_zero(const float* a, float* c, long long n) {
    int i = threadIdx.x;
    if (i < n) c[i] = 100 / (i - 7);  // FAULT: UndefinedArithmetic
}

__global__ void converts_a_nan_to_an_index(const float* a, float* c, long long n) {
    float v = sqrtf(a[threadIdx.x % n] - 1000.0f);
    if (threadIdx.x < n) c[threadIdx.x] = int(v);  // FAULT: UndefinedArithmetic
}

__global__ void asserts_what_does_not_hold(const float* a, float* c, long long n) {
    assert(a[threadIdx.x % n] < 100.0f);  // FAULT: FailedAssertion
}

// ---- halves and wmma

#include <cuda_fp16.h>
#include <mma.h>

__global__ void reads_halves_past_the_end(const float* a, float* c, long long n) {
    const __half2* pairs = reinterpret_cast<const __half2*>(a);
    if (threadIdx.x <= n) c[threadIdx.x % n] = __low2float(pairs[threadIdx.x]);  // FAULT: OutOfBounds
}

// launch: block 32
__global__ void reads_a_stored_tile_of_another_warp_lane(const float* a, float* c, long long n) {
    using namespace nvcuda;
    __shared__ __half tile[256];
    for (int i = threadIdx.x; i < 256; i += 32) tile[i] = __float2half(1.0f);  // FAULT: Race
    float first = __half2float(tile[threadIdx.x * 8]);  // FAULT: Race
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> left;
    wmma::load_matrix_sync(left, tile, 16);
    c[threadIdx.x] = first + __half2float(left.x[0]);
}

// launch: block 32
__global__ void stores_a_tile_past_the_end(const float* a, float* c, long long n) {
    using namespace nvcuda;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums;
    wmma::fill_fragment(sums, 1.0f);
    wmma::store_matrix_sync(c, sums, 16, wmma::mem_row_major);  // FAULT: OutOfBounds
}

// ---- structs that a function takes or returns by value

__device__ float2 both(float v) { return make_float2(v, -v); }

__global__ void stores_a_struct_of_a_function_past_the_end(const float* a, float* c, long long n) {
    float2* pairs = reinterpret_cast<float2*>(c);
    if (threadIdx.x < n) pairs[threadIdx.x] = both(a[threadIdx.x]);  // FAULT: OutOfBounds
}

__global__ void stores_a_struct_of_a_lambda_past_the_end(const float* a, float* c, long long n) {
    float2* pairs = reinterpret_cast<float2*>(c);
    auto both_of = [&](float2 v) { return make_float2(v.y * n, v.x + n); };
    float2 v = make_float2(a[0], a[1]);
    if (threadIdx.x < n) pairs[threadIdx.x] = both_of(v);  // FAULT: OutOfBounds
}

__global__ void shuffles_a_half_past_the_end(const float* a, float* c, long long n) {
    const __half* halves = reinterpret_cast<const __half*>(a);
    __half v = __shfl_xor_sync(~0u, halves[threadIdx.x + 256], 1);  // FAULT: OutOfBounds
    c[threadIdx.x % n] = __half2float(v);
}

__global__ void stores_a_shuffled_half_past_the_end(const float* a, float* c, long long n) {
    __half* halves = reinterpret_cast<__half*>(c);
    halves[threadIdx.x + 256] = __shfl_xor_sync(~0u, __float2half(a[0]), 1);  // FAULT: OutOfBounds
}

__global__ void stores_what_an_atomic_gave_past_the_end(const float* a, float* c, long long n) {
    __half* halves = reinterpret_cast<__half*>(c);
    halves[threadIdx.x + 256] = atomicAdd(halves, __float2half(a[0]));  // FAULT: OutOfBounds
}

__global__ void adds_half_pairs_past_the_end(const float* a, float* c, long long n) {
    const __half2* x = reinterpret_cast<const __half2*>(a);
    __half2* y = reinterpret_cast<__half2*>(c);
    y[threadIdx.x] = __hadd2(x[threadIdx.x], x[0]);  // FAULT: OutOfBounds
}

__global__ void stores_half_pairs_past_the_end(const float* a, float* c, long long n) {
    const __half2* x = reinterpret_cast<const __half2*>(a);
    __half2* y = reinterpret_cast<__half2*>(c);
    y[threadIdx.x] = __hadd2(x[threadIdx.x % n], x[0]);  // FAULT: OutOfBounds
}

__global__ void stores_a_float_half_past_the_end(const float* a, float* c, long long n) {
    __half* halves = reinterpret_cast<__half*>(c);
    halves[threadIdx.x + 256] = __float2half(a[0]);  // FAULT: OutOfBounds
}

__global__ void stores_an_exponential_past_the_end(const float* a, float* c, long long n) {
    __half* halves = reinterpret_cast<__half*>(c);
    halves[threadIdx.x + 256] = hexp(__float2half(a[0]));  // FAULT: OutOfBounds
}

__global__ void takes_an_exponential_past_the_end(const float* a, float* c, long long n) {
    const __half* halves = reinterpret_cast<const __half*>(a);
    __half v = hexp(halves[threadIdx.x + 256]);  // FAULT: OutOfBounds
    c[threadIdx.x % n] = __half2float(v);
}

__global__ void fuses_halves_past_the_end(const float* a, float* c, long long n) {
    const __half* halves = reinterpret_cast<const __half*>(a);
    __half v = __hfma(halves[threadIdx.x + 256], halves[0], halves[1]);  // FAULT: OutOfBounds
    c[threadIdx.x % n] = __half2float(v);
}

// ---- arrays overrun and integers that overflow, whose results are right

// A third element of an array of two is read, and left out of the sum.
__global__ void local_array_overrun(const float* a, float* c, long long n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    float pair[2] = {a[at], a[at]}, sum = 0;
    for (int i = 0; i <= 2; i++) {
        float term = pair[i];  // FAULT: OutOfBounds: index 2 is outside the array, of type 'float \[2\]'
        if (i < 2) sum += term;
    }
    c[at] = sum;
}

// The same by a pointer, whose array only -fsanitize=object-size knows.
__global__ void local_pointer_overrun(const float* a, float* c, long long n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, count = n > 0 ? 3 : 2;
    if (at >= n) return;
    float pair[2] = {a[at], a[at]}, sum = 0;
    const float* from = pair;
    for (int i = 0; i < count; i++) {
        float term = from[i];  // FAULT: OutOfBounds: access to .* outside the array
        if (i < 2) sum += term;
    }
    c[at] = sum;
}

// The first element of the second row is read as the third of the first.
__global__ void local_row_overrun(const float* a, float* c, long long n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, next = n > 0 ? 2 : 0;
    if (at >= n) return;
    float rows[2][2] = {{a[at], 0}, {a[at], 0}};
    c[at] = rows[0][0] + rows[0][next];  // FAULT: OutOfBounds: index 2 is outside the array, of type 'float \[2\]'
}

struct Terms {
    float first[1], second[2];
};

// The last member of a struct, reached by a pointer, is an array of its own length as any other.
__global__ void last_member_overrun(const float* a, float* c, long long n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, next = n > 0 ? 3 : 0;
    if (at >= n) return;
    Terms both[2] = {{{a[at]}, {0, 0}}, {{a[at]}, {0, 0}}};
    Terms* terms = both;
    c[at] = terms->first[0] + terms->second[next - 1];  // FAULT: OutOfBounds: index 2 is outside the array
}

// The sum of both ends wraps, and as an unsigned number it is right again.
__global__ void midpoint_overflow(const float* a, float* c, long long n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    int low = 2147483600, high = low + (at & 31);
    int both = low + high;  // FAULT: UndefinedArithmetic: signed integer overflow in an addition
    int middle = int(unsigned(both) >> 1);
    c[at] = a[at] + a[at] + 0.0f * middle;
}

// The distance of two offsets in bytes, before it is widened.
__global__ void distance_overflow(const float* a, float* c, long long n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    int from = -2000000000 - (at & 7), to = 2000000000;
    long long distance = to - from;  // FAULT: UndefinedArithmetic: signed integer overflow in a subtraction
    c[at] = a[at] + a[at] + 0.0f * distance;
}
