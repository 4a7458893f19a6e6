// attention's gradient for compute capability 9.0 only: as in the forward kernel, wgmma multiplies tiles that the copy
// engine (TMA) loads. No two blocks add to the same result, so that its bits are the same in every run.
#include <math_constants.h>

#include "attention/boxes.cuh"

constexpr int MULTIPLYING = 2, ROWS = 64 * MULTIPLYING;

// A block's own two tiles stay; a ring's stages hold two tiles of the other side each. OF_KEYS, a stage also has lse and
// delta of its queries.
template <int COLUMNS, int STEP, int STAGES, bool OF_KEYS> struct Shared {
    static constexpr int OWN_BYTES = ROWS * COLUMNS * 2, TILE_BYTES = STEP * COLUMNS * 2;
    static constexpr int STAGE = 2 * OWN_BYTES, NUMBERS = STAGE + STAGES * 2 * TILE_BYTES;
    static constexpr int BARRIERS = NUMBERS + (OF_KEYS ? STAGES * 2 * STEP * 4 : 0);
    // With room to align the start to the swizzle's period.
    static constexpr int BYTES = BARRIERS + (1 + 2 * STAGES) * 8 + SWIZZLED;
};

// A block owns ROWS queries of one head of a sequence. OF_KEYS, it owns ROWS keys, and takes their gradients for one head
// of queries. Each multiplying warpgroup owns 64 of these rows. With the own tiles A and B (q and the gradient of the
// output; or k and v) and C and D of the other side (k and v; or q and that gradient), it takes the scores A C^T and the
// products B D^T, from these the weights P and the gradients of scores dS, and sums up dS C and, OF_KEYS, P D. Results are
// float where heads share their keys: then another kernel adds them up.
template <class T, class Result, int COLUMNS, int STEP, int STAGES, bool OF_KEYS>
__global__ void __launch_bounds__(WARPGROUP * (1 + MULTIPLYING), 1) attention_backward_hopper_kernel(
    const __grid_constant__ TensorMap a_map,  // of [tokens, heads, columns], or of [heads, tokens, columns]
    const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap c_map,
    const __grid_constant__ TensorMap d_map,
    const void* q_offsets,            // [batch + 1], or null
    const void* k_offsets,            // [batch + 1], or null
    const float* __restrict__ lse,    // [heads, total_q]
    const float* __restrict__ delta,  // [heads, total_q]
    Result* __restrict__ grad_first,   // [tokens, heads, columns], of q, or OF_KEYS of k; may be null
    Result* __restrict__ grad_second,  // OF_KEYS: of v; may be null
    long long total_q, long long total_k, long long batch, long long heads, long long kv_heads, long long columns,
    bool wide_q, bool wide_k, bool a_heads_outer, bool b_heads_outer, bool c_heads_outer, bool d_heads_outer, bool causal,
    double scale) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Memory = Shared<COLUMNS, STEP, STAGES, OF_KEYS>;
    // Blocks with most work come first: those of late queries, and of early keys.
    const int head = blockIdx.x % heads, kv_head = head / int(heads / kv_heads);
    const long long tile = blockIdx.x / heads;
    const Tokens queries{q_offsets, wide_q, batch, total_q};
    const Tokens keys{k_offsets, wide_k, batch, total_k};
    const Place place(OF_KEYS ? tile : gridDim.x / heads - 1 - tile, ROWS, OF_KEYS ? keys : queries,
                      OF_KEYS ? queries : keys);
    if (place.first >= place.length) return;

    extern __shared__ unsigned char raw[];
    const unsigned base = (shared_address(raw) + SWIZZLED - 1) / SWIZZLED * SWIZZLED;
    unsigned char* const memory = raw + (base - shared_address(raw));
    float* const numbers = reinterpret_cast<float*>(memory + Memory::NUMBERS);
    // The mbarriers: of the own tiles, and for each stage one that it is full and one that it is empty.
    const unsigned own_full = base + Memory::BARRIERS, full = own_full + 8, empty = full + STAGES * 8;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0), lane = threadIdx.x % 32;
    // The own row r is at the others' place r + diagonal. A query there sees the keys up to it; a key, the queries from it.
    const int rows = place.length - place.first, length = place.other_length, diagonal = length - rows;
    const int token = int(place.begin) + place.first, other_token = int(place.other_begin);
    const int begin = OF_KEYS && causal ? max(diagonal, 0) / STEP : 0;
    const int seen = !OF_KEYS && causal ? max(min(length, diagonal + ROWS), 0) : length;
    // Blocks come from the last to the first: only the last one has to be cleared.
    const int last = (seen + STEP - 1) / STEP - 1;

    if (threadIdx.x == 0) {
        barrier_init(own_full, 1);
        for (int stage = 0; stage < STAGES; stage++) {
            // The copies, and OF_KEYS the threads that load numbers.
            barrier_init(full + stage * 8, OF_KEYS ? 1 + STEP : 1);
            barrier_init(empty + stage * 8, MULTIPLYING * WARPGROUP / 32);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OF_KEYS ? 24 : 40));
        if (last < begin) return;
        Turn<STAGES> turn;
        const int own_head = OF_KEYS ? kv_head : head, other_head = OF_KEYS ? head : kv_head;
        // A stage that was never used counts as empty, because the phase before the first has ended.
        if (threadIdx.x == 0) {
            barrier_arrive_expecting(own_full, 2 * Memory::OWN_BYTES);
            Heads{a_map, a_heads_outer}.load_tile<ROWS, COLUMNS>(base, own_full, own_head, token);
            Heads{b_map, b_heads_outer}.load_tile<ROWS, COLUMNS>(base + Memory::OWN_BYTES, own_full, own_head, token);
#pragma unroll 1
            for (int block = last; block >= begin; block--, turn.next()) {
                const unsigned barrier = full + turn.stage * 8;
                const unsigned to = base + Memory::STAGE + turn.stage * 2 * Memory::TILE_BYTES;
                barrier_wait(empty + turn.stage * 8, turn.parity ^ 1);
                barrier_arrive_expecting(barrier, 2 * Memory::TILE_BYTES);
                Heads{c_map, c_heads_outer}.load_tile<STEP, COLUMNS>(
                    to, barrier, other_head, other_token + block * STEP);
                Heads{d_map, d_heads_outer}.load_tile<STEP, COLUMNS>(
                    to + Memory::TILE_BYTES, barrier, other_head, other_token + block * STEP);
            }
        } else if (OF_KEYS && threadIdx.x >= 32 && threadIdx.x < 32 + STEP) {
            const int query = threadIdx.x - 32;
#pragma unroll 1
            for (int block = last; block >= begin; block--, turn.next()) {
                const long long at = head * total_q + other_token + block * STEP + query;
                const bool there = block * STEP + query < length;
                float* const to = numbers + turn.stage * 2 * STEP + query;
                barrier_wait(empty + turn.stage * 8, turn.parity ^ 1);
                to[0] = there ? lse[at] * LOG2_E : 0.0f, to[STEP] = there ? delta[at] : 0.0f;
                barrier_arrive(full + turn.stage * 8);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(OF_KEYS ? 240 : 232));
    const int share = warpgroup - 1, thread = threadIdx.x % WARPGROUP, row_here = thread / 32 * 16 + lane / 4;
    const int own_rows = rows - share * 64;
    const float factor = float(scale * double(LOG2_E));
    float of_row[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (!OF_KEYS && row_here + r * 8 < own_rows) {
            const long long at = head * total_q + token + share * 64 + row_here + r * 8;
            of_row[r][0] = lse[at] * LOG2_E, of_row[r][1] = delta[at];
        }
    const unsigned a = base + share * 64 * LINE_BYTES, b = a + Memory::OWN_BYTES;

    float scores[STEP / 2], products[STEP / 2], sums[COLUMNS / 2], sums_second[OF_KEYS ? COLUMNS / 2 : 1];
    unsigned weights[OF_KEYS ? STEP / 16 : 1][4], grad_scores[STEP / 16][4];

    const auto tile_of = [&](int stage) { return base + Memory::STAGE + stage * 2 * Memory::TILE_BYTES; };
    // The elements whose query does not see the key, or that are of another sequence, become 0.
    const auto clear_hidden = [&](float (&x)[STEP / 2], int block) {
        const int column = block * STEP + lane % 4 * 2, own = diagonal + share * 64 + row_here - column;
#pragma unroll
        for (int i = 0; i < STEP / 2; i++) {
            const int at = i / 4 * 8 + i % 2, r = i / 2 % 2;
            if (at >= length - column || (causal && (OF_KEYS ? at < own + r * 8 : at > own + r * 8))) x[i] = 0;
        }
    };
    const auto is_hidden = [&](int block) {
        const int own = diagonal + share * 64;
        return (block + 1) * STEP > length || (causal && (OF_KEYS ? block * STEP < own + 63 : (block + 1) * STEP > own + 1));
    };
    const auto number = [&](int stage, int which, int i) {
        if constexpr (OF_KEYS) return numbers[(stage * 2 + which) * STEP + i / 4 * 8 + lane % 4 * 2 + i % 2];
        else return of_row[i / 2 % 2][which];
    };
    const auto take_weights = [&](int stage, int block) {
#pragma unroll
        for (int i = 0; i < STEP / 2; i++) scores[i] = exp2_fast(scores[i] * factor - number(stage, 0, i));
        if (is_hidden(block)) clear_hidden(scores, block);
    };
    const auto take_grad_scores = [&](int stage, int block) {
        if constexpr (OF_KEYS) pack<T, STEP>(weights, scores);
#pragma unroll
        for (int i = 0; i < STEP / 2; i++) scores[i] *= products[i] - number(stage, 1, i);
        if (is_hidden(block)) clear_hidden(scores, block);
        pack<T, STEP>(grad_scores, scores);
    };
    const auto add_up = [&](int stage, bool add) {
        if constexpr (OF_KEYS)
            multiply<T, COLUMNS, STEP>(sums_second, weights, tile_of(stage) + Memory::TILE_BYTES, add);
        multiply<T, COLUMNS, STEP>(sums, grad_scores, tile_of(stage), add);
    };

    if (last >= begin) {
        Turn<STAGES> turn;
        barrier_wait(own_full, 0);
        barrier_wait(full, 0);
        if (length < (last + 1) * STEP) {
            constexpr int THREADS = MULTIPLYING * WARPGROUP;
            const int there = length - last * STEP, thread_here = share * WARPGROUP + thread;
            clear_rows<COLUMNS, STEP, THREADS>(memory + Memory::STAGE, there, thread_here);
            if (OF_KEYS)
                clear_rows<COLUMNS, STEP, THREADS>(memory + Memory::STAGE + Memory::TILE_BYTES, there, thread_here);
            sync_threads<THREADS>(CLEANED);
        }
        wgmma_fence();
        multiply_transposed<T, COLUMNS, ROWS, STEP>(scores, a, tile_of(0));
        multiply_transposed<T, COLUMNS, ROWS, STEP>(products, b, tile_of(0) + Memory::TILE_BYTES);
        wgmma_wait<0>();
        wgmma_written(scores);
        wgmma_written(products);
        take_weights(0, last);
        take_grad_scores(0, last);
        for (int block = last - 1; block >= begin; block--) {
            const int before = turn.stage;
            turn.next();
            barrier_wait(full + turn.stage * 8, turn.parity);
            wgmma_fence();
            add_up(before, block < last - 1);
            multiply_transposed<T, COLUMNS, ROWS, STEP>(scores, a, tile_of(turn.stage));
            // The products take the registers of the terms of the sums.
            wgmma_wait<1>();
            wgmma_written(sums);
            if constexpr (OF_KEYS) wgmma_written(sums_second);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + before * 8);
            wgmma_fence();
            multiply_transposed<T, COLUMNS, ROWS, STEP>(products, b, tile_of(turn.stage) + Memory::TILE_BYTES);
            // The tensor cores multiply meanwhile.
            wgmma_wait<1>();
            wgmma_written(scores);
            take_weights(turn.stage, block);
            wgmma_wait<0>();
            wgmma_written(products);
            take_grad_scores(turn.stage, block);
        }
        wgmma_fence();
        add_up(turn.stage, last > begin);
        wgmma_wait<0>();
        wgmma_written(sums);
        if constexpr (OF_KEYS) wgmma_written(sums_second);
    } else {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) {
            sums[i] = 0;
            if constexpr (OF_KEYS) sums_second[i] = 0;
        }
    }

    const float one = place.fits ? 1 : CUDART_NAN_F, scaled = one * float(scale);
    const float factors[2] = {scaled, scaled}, ones[2] = {one, one};
    const long long stride = heads * columns, at = (token + share * 64LL) * stride + head * columns;
    if (grad_first)
        put_rows<T, COLUMNS, ROWS>(sums, factors, memory, share, grad_first + at, stride, own_rows, columns);
    if constexpr (OF_KEYS)
        if (grad_second)
            put_rows<T, COLUMNS, ROWS>(
                sums_second, ones, memory + Memory::OWN_BYTES, share, grad_second + at, stride, own_rows, columns);
#endif
}

// Adds up the gradients of the heads that share keys, in the order of heads: of k, and with blockIdx.y of v.
template <class T>
__global__ void __launch_bounds__(256) attention_sum_of_heads_kernel(
    const float* __restrict__ of_heads,  // [2, tokens, heads, columns]
    T* __restrict__ grad_k,              // [tokens, kv_heads, columns], or null
    T* __restrict__ grad_v,              // as grad_k
    long long elements, long long columns, long long group) {
    // One thread owns 8 columns of a head of keys.
    const long long at = (blockIdx.x * 256LL + threadIdx.x) * 8;
    T* const result = blockIdx.y ? grad_v : grad_k;
    if (at >= elements || !result) return;
    const float* from = of_heads + blockIdx.y * elements * group + at / columns * group * columns + at % columns;
    float sums[8] = {};
    for (long long head = 0; head < group; head++, from += columns)
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 x = *reinterpret_cast<const float4*>(from + i);
            sums[i] += x.x, sums[i + 1] += x.y, sums[i + 2] += x.z, sums[i + 3] += x.w;
        }
    *reinterpret_cast<uint4*>(result + at) = uint4{
        packed<T>(sums[0], sums[1]), packed<T>(sums[2], sums[3]), packed<T>(sums[4], sums[5]), packed<T>(sums[6], sums[7])};
}
