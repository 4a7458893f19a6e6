// attention's gradient for compute capability 9.0 only: as in the forward kernel, wgmma multiplies tiles that the copy
// engine (TMA) loads. No two blocks add to the same result, so that its bits are the same in every run.
#include <math_constants.h>

#include "attention/boxes.cuh"

constexpr int MULTIPLYING = 2, ROWS = 64 * MULTIPLYING;

// A block's own two tiles stay; of the other side two rings have a tile in each stage. OF_KEYS, a stage also has lse and
// delta of its queries.
template <int COLUMNS, int STEP, int STAGES, bool OF_KEYS> struct Shared {
    // The sums of two gradients of 64 rows and more than 128 columns are too many for a warpgroup: each takes one of them.
    static constexpr bool SPLIT = OF_KEYS && COLUMNS > 128;
    static constexpr int BLOCK_ROWS = SPLIT ? 64 : ROWS, D_STAGES = !OF_KEYS && COLUMNS > 128 ? 1 : STAGES;
    static constexpr int TILE_BYTES = STEP * COLUMNS * 2, OWN_BYTES = 2 * BLOCK_ROWS * COLUMNS * 2;
    // Of B, C and D. If SPLIT, A and B are the two halves of one tile of ROWS.
    static constexpr int B = SPLIT ? 64 * LINE_BYTES : OWN_BYTES / 2, C = OWN_BYTES, D = C + STAGES * TILE_BYTES;
    static constexpr int PASSED = D + D_STAGES * TILE_BYTES, NUMBERS = PASSED + (SPLIT ? 64 * STEP * 4 : 0);
    static constexpr int BARRIERS = NUMBERS + (OF_KEYS ? STAGES * 2 * STEP * 4 : 0);
    // With room to align the start to the swizzle's period.
    static constexpr int BYTES = BARRIERS + (1 + 2 * STAGES + 2 * D_STAGES) * 8 + SWIZZLED;
};

// A ring of tiles in shared memory, and for each stage the mbarriers that it is full and that it is empty.
template <int TILE_BYTES, int STAGES> struct Ring {
    unsigned tiles, barriers;
    __device__ unsigned tile(int stage) const { return tiles + stage * TILE_BYTES; }
    __device__ unsigned full(int stage) const { return barriers + stage * 8; }
    __device__ unsigned empty(int stage) const { return barriers + (STAGES + stage) * 8; }
    __device__ void init(int fillers) const {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full(stage), fillers);
            barrier_init(empty(stage), MULTIPLYING * WARPGROUP / 32);
        }
    }
    template <int ROWS, int COLUMNS>
    __device__ void load(Turn<STAGES>& turn, const Heads& heads, int head, int token) const {
        // A stage that was never used counts as empty, because the phase before the first has ended.
        barrier_wait(empty(turn.stage), turn.parity ^ 1);
        barrier_arrive_expecting(full(turn.stage), TILE_BYTES);
        heads.load_tile<ROWS, COLUMNS>(tile(turn.stage), full(turn.stage), head, token);
        turn.next();
    }
    __device__ void wait(const Turn<STAGES>& turn) const { barrier_wait(full(turn.stage), turn.parity); }
    // Each warp releases a stage once.
    __device__ void release(int stage) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty(stage));
    }
};

// A block owns BLOCK_ROWS queries of one head of a sequence. OF_KEYS, it owns as many keys, and takes their gradients for
// one head of queries. Each multiplying warpgroup owns 64 of these rows; if SPLIT, both own the same. With the own tiles
// A and B (q and the gradient of the output; or k and v) and C and D of the other side (k and v; or q and that gradient),
// it takes the scores A C^T and the products B D^T, from these the weights P and the gradients of scores dS, and sums up
// dS C and, OF_KEYS, P D. Results are float where heads share their keys: then another kernel adds them up.
template <class T, class Result, int COLUMNS, int STEP, int STAGES, bool OF_KEYS>
__global__ void __launch_bounds__(WARPGROUP * (1 + MULTIPLYING), 1) attention_backward_hopper_kernel(
    const __grid_constant__ TensorMap a_map,  // of [tokens, heads, columns], or of [heads, tokens, columns]
    const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap c_map,
    const __grid_constant__ TensorMap d_map,
    const void* q_offsets,               // [batch + 1], or null
    const void* k_offsets,               // [batch + 1], or null
    const T* __restrict__ output,        // [total_q, heads, columns], unless OF_KEYS
    const float* __restrict__ grad_lse,  // [heads, total_q], or null; unless OF_KEYS
    const float* __restrict__ lse,       // [heads, total_q]
    float* __restrict__ delta,           // [heads, total_q]: written unless OF_KEYS
    Result* __restrict__ grad_first,     // [tokens, heads, columns], of q, or OF_KEYS of k; may be null
    Result* __restrict__ grad_second,    // OF_KEYS: of v; may be null
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
    const Place place(OF_KEYS ? tile : gridDim.x / heads - 1 - tile, Memory::BLOCK_ROWS, OF_KEYS ? keys : queries,
                      OF_KEYS ? queries : keys);
    if (place.first >= place.length) return;

    extern __shared__ unsigned char raw[];
    const unsigned base = (shared_address(raw) + SWIZZLED - 1) / SWIZZLED * SWIZZLED;
    unsigned char* const memory = raw + (base - shared_address(raw));
    float* const numbers = reinterpret_cast<float*>(memory + Memory::NUMBERS);
    constexpr int D_STAGES = Memory::D_STAGES;
    const unsigned own_full = base + Memory::BARRIERS;
    const Ring<Memory::TILE_BYTES, STAGES> c_ring{base + Memory::C, own_full + 8};
    const Ring<Memory::TILE_BYTES, D_STAGES> d_ring{base + Memory::D, own_full + 8 + 2 * STAGES * 8};
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0), lane = threadIdx.x % 32;
    // The own row r is at the others' place r + diagonal. A query there sees the keys up to it; a key, the queries from it.
    const int rows = place.length - place.first, length = place.other_length, diagonal = length - rows;
    const int token = int(place.begin) + place.first, other_token = int(place.other_begin);
    const int begin = OF_KEYS && causal ? max(diagonal, 0) / STEP : 0;
    const int seen = !OF_KEYS && causal ? max(min(length, diagonal + Memory::BLOCK_ROWS), 0) : length;
    // Blocks come from the last to the first: only the last one has to be cleared.
    const int last = (seen + STEP - 1) / STEP - 1;

    if (threadIdx.x == 0) {
        barrier_init(own_full, 1);
        // The copies, and OF_KEYS the threads that load numbers.
        c_ring.init(OF_KEYS ? 1 + STEP : 1);
        d_ring.init(1);
        fence_mbarrier_init();
    }
    __syncthreads();

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OF_KEYS ? 24 : 40));
        if (last < begin) return;
        Turn<STAGES> turn;
        const int own_head = OF_KEYS ? kv_head : head, other_head = OF_KEYS ? head : kv_head;
        if (threadIdx.x == 0) {
            Turn<D_STAGES> d_turn;
            barrier_arrive_expecting(own_full, Memory::OWN_BYTES);
            Heads{a_map, a_heads_outer}.load_tile<ROWS, COLUMNS>(base, own_full, own_head, token);
            Heads{b_map, b_heads_outer}.load_tile<ROWS, COLUMNS>(base + Memory::B, own_full, own_head, token);
#pragma unroll 1
            for (int block = last; block >= begin; block--) {
                const int at = other_token + block * STEP;
                c_ring.template load<STEP, COLUMNS>(turn, Heads{c_map, c_heads_outer}, other_head, at);
                d_ring.template load<STEP, COLUMNS>(d_turn, Heads{d_map, d_heads_outer}, other_head, at);
            }
        } else if (OF_KEYS && threadIdx.x >= 32 && threadIdx.x < 32 + STEP) {
            const int query = threadIdx.x - 32;
#pragma unroll 1
            for (int block = last; block >= begin; block--, turn.next()) {
                const long long at = head * total_q + other_token + block * STEP + query;
                const bool there = block * STEP + query < length;
                float* const to = numbers + turn.stage * 2 * STEP + query;
                barrier_wait(c_ring.empty(turn.stage), turn.parity ^ 1);
                to[0] = there ? lse[at] * LOG2_E : 0.0f, to[STEP] = there ? delta[at] : 0.0f;
                barrier_arrive(c_ring.full(turn.stage));
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(OF_KEYS ? 240 : 232));
    constexpr bool SPLIT = Memory::SPLIT, BOTH = OF_KEYS && !SPLIT;
    const int share = warpgroup - 1, thread = threadIdx.x % WARPGROUP, row_here = thread / 32 * 16 + lane / 4;
    const int first_row = SPLIT ? 0 : share * 64, own_rows = rows - first_row;
    const float factor = float(scale * double(LOG2_E));
    float of_row[2][2] = {};
    // Of the output's rows, a thread has every fourth vector.
    Vector<T, 8> outputs[2][OF_KEYS ? 1 : COLUMNS / 32] = {};
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (!OF_KEYS && row_here + r * 8 < own_rows) {
            const long long row = token + first_row + row_here + r * 8;
            of_row[r][0] = lse[head * total_q + row] * LOG2_E;
#pragma unroll
            for (int i = 0; i < COLUMNS / 32; i++)
                if (const int column = i * 32 + lane % 4 * 8; column < columns)
                    outputs[r][i] = Vector<T, 8>::load(output + (row * heads + head) * columns + column);
        }
    const unsigned a = base + share * 64 * LINE_BYTES, b = a + Memory::B;

    float scores[STEP / 2], products[SPLIT ? 1 : STEP / 2], sums[COLUMNS / 2], sums_second[BOTH ? COLUMNS / 2 : 1];
    unsigned weights[BOTH ? STEP / 16 : 1][4], grad_scores[STEP / 16][4];

    // The elements whose query does not see the key, or that are of another sequence, become 0.
    const auto clear_hidden = [&](float (&x)[STEP / 2], int block) {
        const int column = block * STEP + lane % 4 * 2, own = diagonal + first_row + row_here - column;
#pragma unroll
        for (int i = 0; i < STEP / 2; i++) {
            const int at = i / 4 * 8 + i % 2, r = i / 2 % 2;
            if (at >= length - column || (causal && (OF_KEYS ? at < own + r * 8 : at > own + r * 8))) x[i] = 0;
        }
    };
    const auto is_hidden = [&](int block) {
        const int own = diagonal + first_row;
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
        if constexpr (BOTH) pack<T, STEP>(weights, scores);
#pragma unroll
        for (int i = 0; i < STEP / 2; i++) scores[i] *= products[i] - number(stage, 1, i);
        if (is_hidden(block)) clear_hidden(scores, block);
        pack<T, STEP>(grad_scores, scores);
    };
    // Delta is the sum of a row's dO * O, less the cotangent of lse.
    const auto take_delta = [&] {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = row_here + r * 8, line = first_row + row;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < COLUMNS / 32; i++) {
                const int chunk = i % 2 * 4 + lane % 4, at = i / 2 * ROWS * LINE_BYTES + line * LINE_BYTES;
                float x[8], y[8];
                outputs[r][i].unpack(x);
                Vector<T, 8>::load(reinterpret_cast<T*>(memory + Memory::B + at + (chunk ^ line % 8) * 16)).unpack(y);
#pragma unroll
                for (int j = 0; j < 8; j++) sum += x[j] * y[j];
            }
            sum = sum_of_row(sum);
            if (row >= own_rows) continue;
            const long long at = head * total_q + token + line;
            of_row[r][1] = grad_lse ? sum - grad_lse[at] : sum;
            if (lane % 4 == 0) delta[at] = of_row[r][1];
        }
    };
    const auto add_up = [&](int c_stage, int d_stage, bool add) {
        if constexpr (BOTH) multiply<T, COLUMNS, STEP>(sums_second, weights, d_ring.tile(d_stage), add);
        multiply<T, COLUMNS, STEP>(sums, grad_scores, c_ring.tile(c_stage), add);
    };

    if (last >= begin) {
        Turn<STAGES> turn;
        Turn<D_STAGES> d_turn;
        barrier_wait(own_full, 0);
        if constexpr (!OF_KEYS) take_delta();
        c_ring.wait(turn);
        d_ring.wait(d_turn);
        if (length < (last + 1) * STEP) {
            constexpr int THREADS = MULTIPLYING * WARPGROUP;
            const int there = length - last * STEP, thread_here = share * WARPGROUP + thread;
            clear_rows<COLUMNS, STEP, THREADS>(memory + Memory::C, there, thread_here);
            if (OF_KEYS) clear_rows<COLUMNS, STEP, THREADS>(memory + Memory::D, there, thread_here);
            sync_threads<THREADS>(CLEANED);
        }
        wgmma_fence();
        if constexpr (SPLIT) {
            // The first warpgroup takes the weights, passes them on, and sums up P D; the second one sums up dS C. The same
            // thread of each has the same elements.
            float4* const passed = reinterpret_cast<float4*>(memory + Memory::PASSED) + thread;
            const int other_tiles = share ? Memory::C : Memory::D, other_barriers = share ? 0 : 2 * STAGES * 8;
            const Ring<Memory::TILE_BYTES, STAGES> other{base + other_tiles, own_full + 8 + other_barriers};
            const Ring<Memory::TILE_BYTES, STAGES> mine{
                base + Memory::C + Memory::D - other_tiles, own_full + 8 + 2 * STAGES * 8 - other_barriers};
            multiply_transposed<T, COLUMNS, ROWS, STEP>(scores, a, mine.tile(0));
#pragma unroll 1
            for (int block = last;; block--) {
                const int stage = turn.stage;
                wgmma_wait<0>();
                wgmma_written(scores);
                if (share == 0) {
                    take_weights(stage, block);
                    mine.release(stage);
                    if (block < last) sync_threads<MULTIPLYING * WARPGROUP>(TURN);
#pragma unroll
                    for (int i = 0; i < STEP / 2; i += 4)
                        passed[i / 4 * WARPGROUP] = float4{scores[i], scores[i + 1], scores[i + 2], scores[i + 3]};
                    arrive_threads<MULTIPLYING * WARPGROUP>(TURN + 1);
                } else {
                    mine.release(stage);
                    other.wait(turn);
                    sync_threads<MULTIPLYING * WARPGROUP>(TURN + 1);
#pragma unroll
                    for (int i = 0; i < STEP / 2; i += 4) {
                        const float4 weight = passed[i / 4 * WARPGROUP];
                        scores[i] = weight.x * (scores[i] - number(stage, 1, i));
                        scores[i + 1] = weight.y * (scores[i + 1] - number(stage, 1, i + 1));
                        scores[i + 2] = weight.z * (scores[i + 2] - number(stage, 1, i + 2));
                        scores[i + 3] = weight.w * (scores[i + 3] - number(stage, 1, i + 3));
                    }
                    if (block > begin) arrive_threads<MULTIPLYING * WARPGROUP>(TURN);
                    if (is_hidden(block)) clear_hidden(scores, block);
                }
                pack<T, STEP>(grad_scores, scores);
                if (share == 0) other.wait(turn);
                wgmma_fence();
                multiply<T, COLUMNS, STEP>(sums, grad_scores, other.tile(stage), block < last);
                if (block == begin) break;
                turn.next();
                mine.wait(turn);
                wgmma_fence();
                multiply_transposed<T, COLUMNS, ROWS, STEP>(scores, a, mine.tile(turn.stage));
                wgmma_wait<1>();
                wgmma_written(sums);
                other.release(stage);
            }
        } else {
            multiply_transposed<T, COLUMNS, ROWS, STEP>(scores, a, c_ring.tile(0));
            multiply_transposed<T, COLUMNS, ROWS, STEP>(products, b, d_ring.tile(0));
            wgmma_wait<0>();
            wgmma_written(scores);
            wgmma_written(products);
            if constexpr (!OF_KEYS) d_ring.release(0);
            take_weights(0, last);
            take_grad_scores(0, last);
            for (int block = last - 1; block >= begin; block--) {
                const int before = turn.stage, d_before = d_turn.stage;
                turn.next();
                d_turn.next();
                c_ring.wait(turn);
                wgmma_fence();
                add_up(before, d_before, block < last - 1);
                multiply_transposed<T, COLUMNS, ROWS, STEP>(scores, a, c_ring.tile(turn.stage));
                // The products take the registers of the terms of the sums.
                wgmma_wait<1>();
                wgmma_written(sums);
                if constexpr (OF_KEYS) wgmma_written(sums_second);
                c_ring.release(before);
                if constexpr (OF_KEYS) d_ring.release(d_before);
                d_ring.wait(d_turn);
                wgmma_fence();
                multiply_transposed<T, COLUMNS, ROWS, STEP>(products, b, d_ring.tile(d_turn.stage));
                // The tensor cores multiply meanwhile.
                wgmma_wait<1>();
                wgmma_written(scores);
                take_weights(turn.stage, block);
                wgmma_wait<0>();
                wgmma_written(products);
                if constexpr (!OF_KEYS) d_ring.release(d_turn.stage);
                take_grad_scores(turn.stage, block);
            }
            wgmma_fence();
            add_up(turn.stage, d_turn.stage, last > begin);
        }
        wgmma_wait<0>();
        wgmma_written(sums);
        wgmma_written(sums_second);
    } else {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) {
            sums[i] = 0;
            if constexpr (BOTH) sums_second[i] = 0;
        }
        // No key has weight for these queries.
        if (!OF_KEYS && thread < 64 && thread < own_rows) delta[head * total_q + token + first_row + thread] = 0;
    }

    const float one = place.fits ? 1 : CUDART_NAN_F;
    const long long stride = heads * columns, at = (token + (long long)first_row) * stride + head * columns;
    const auto put = [&](const float (&sums)[COLUMNS / 2], bool second, int tile) {
        Result* const to = second ? grad_second : grad_first;
        const float factor = second ? one : one * float(scale), factors[2] = {factor, factor};
        if (to) put_rows<T, COLUMNS, ROWS>(sums, factors, memory + tile, share, to + at, stride, own_rows, columns);
    };
    put(sums, SPLIT && share == 0, 0);
    if constexpr (BOTH) put(sums_second, true, Memory::B);
#endif
}
