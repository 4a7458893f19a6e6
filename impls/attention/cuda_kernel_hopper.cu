// attention's forward for compute capability 9.0 only, after FlashAttention-3: wgmma on tiles that the copy engine
// (TMA) loads, products of one warpgroup while another takes exponentials.
#include <math_constants.h>

#include "attention/boxes.cuh"

constexpr float LN_2 = 0.69314718055994530942f;

template <int COLUMNS, int KEYS, int MULTIPLYING, int STAGES> struct Shared {
    static constexpr int ROWS = 64 * MULTIPLYING;
    static constexpr int Q_BYTES = ROWS * COLUMNS * 2, TILE_BYTES = KEYS * COLUMNS * 2;
    static constexpr int K = Q_BYTES, V = K + STAGES * TILE_BYTES, BARRIERS = V + STAGES * TILE_BYTES;
    // With room to align the start to the swizzle's period.
    static constexpr int BYTES = BARRIERS + (1 + 4 * STAGES) * 8 + SWIZZLED;
};

// A thread's two rows of the softmax, of a warp's 16: the largest score so far, and the sum of its own exponentials.
struct Rows {
    float largest[2] = {-CUDART_INF_F, -CUDART_INF_F}, total[2] = {};

    // Turns scores to exp2(factor * (score - largest)). `shrunk` is what scales all that was summed before.
    template <int COUNT> __device__ void exponentials(float (&scores)[COUNT], float factor, float (&shrunk)[2]) {
        float base[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float larger = largest[r];
#pragma unroll
            for (int i = 0; i < COUNT; i += 4) larger = max(larger, max(scores[i + 2 * r], scores[i + 2 * r + 1]));
            larger = largest_of_row(larger);
            base[r] = base_of(larger, factor);
            shrunk[r] = exp2_fast(largest[r] * factor - base[r]);
            largest[r] = larger;
            total[r] *= shrunk[r];
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            scores[i] = exp2_fast(scores[i] * factor - base[i / 2 % 2]);
            total[i / 2 % 2] += scores[i];
        }
    }
    // Of scores that are all -inf it is 0, so that no difference of infinities is taken.
    __device__ static float base_of(float largest, float factor) {
        return largest == -CUDART_INF_F ? 0.0f : largest * factor;
    }
};

// Takes products to scores in base 2, with a bias: see `distance`.
template <int COUNT> __device__ inline void add_bias(float (&scores)[COUNT], float factor, float slope, float past) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) scores[i] = scores[i] * factor - slope * distance(past, i / 4, i % 4);
}

// Hides the scores of keys from `limits` on, of a thread's two rows.
template <int COUNT> __device__ inline void hide(float (&scores)[COUNT], int key, const int (&limits)[2]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        if (key + i / 4 * 8 + i % 2 >= limits[i / 2 % 2]) scores[i] = -CUDART_INF_F;
}

// Loads KEYS rows of one head to a stage of the tiles, as soon as that is empty.
template <class Memory, int COLUMNS, int KEYS, int STAGES>
__device__ inline void load_stage(const Heads& of, unsigned tiles, unsigned full, unsigned empty,
                                 const Turn<STAGES>& turn, int head, int token) {
    // A stage that was never used counts as empty, because the phase before the first has ended.
    barrier_wait(empty + turn.stage * 8, turn.parity ^ 1);
    barrier_arrive_expecting(full + turn.stage * 8, Memory::TILE_BYTES);
    of.load_tile<KEYS, COLUMNS>(tiles + turn.stage * Memory::TILE_BYTES, full + turn.stage * 8, head, token);
}

template <class T, int COLUMNS, int KEYS, int MULTIPLYING, int STAGES, bool BIAS>
__global__ void __launch_bounds__(WARPGROUP * (1 + MULTIPLYING), 1) attention_forward_hopper_kernel(
    const __grid_constant__ TensorMap q_map,  // of [total_q, heads, columns], or of [heads, total_q, columns]
    const __grid_constant__ TensorMap k_map,  // of [total_k, kv_heads, columns], or with the heads outside
    const __grid_constant__ TensorMap v_map,  // as k_map
    const void* q_offsets,                    // [batch + 1], or null
    const void* k_offsets,                    // [batch + 1], or null
    const float* slopes,                      // [heads], of BIAS
    T* __restrict__ output,                   // [total_q, heads, columns]
    float* __restrict__ lse,                  // [heads, total_q]
    long long total_q, long long total_k, long long batch, long long heads, long long kv_heads, long long columns,
    bool wide_q, bool wide_k, bool q_heads_outer, bool k_heads_outer, bool v_heads_outer, long long together, bool causal,
    double scale) {
    // One block owns 64 * MULTIPLYING queries of a sequence and head; one multiplying warpgroup 64 of them.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Memory = Shared<COLUMNS, KEYS, MULTIPLYING, STAGES>;
    constexpr int ROWS = Memory::ROWS;
    // `together` heads take turns, and of each the queries that see most keys come first.
    const long long tiles = gridDim.x / heads, first_head = blockIdx.x / (together * tiles) * together;
    const long long among = min(together, heads - first_head), in_group = blockIdx.x % (together * tiles);
    const int head = int(first_head + in_group % among);
    const Tokens queries{q_offsets, wide_q, batch, total_q};
    const Tokens keys{k_offsets, wide_k, batch, total_k};
    const Place place(tiles - 1 - in_group / among, ROWS, queries, keys);
    if (place.first >= place.length) return;

    extern __shared__ unsigned char raw[];
    const unsigned base = (shared_address(raw) + SWIZZLED - 1) / SWIZZLED * SWIZZLED;
    unsigned char* const memory = raw + (base - shared_address(raw));
    // The mbarriers: of q, and for each stage of k and of v one that it is full and one that it is empty.
    const unsigned q_full = base + Memory::BARRIERS, k_full = q_full + 8, k_empty = k_full + STAGES * 8;
    const unsigned v_full = k_empty + STAGES * 8, v_empty = v_full + STAGES * 8;
    // The shuffle tells the compiler that the value is the same in all of a warp.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    // A query at row r of the tile sees the keys below r + limit, and below all of them.
    const int limit = place.first + 1 + place.other_length - place.length;
    const int end = causal ? max(min(place.other_length, limit + ROWS - 1), 0) : place.other_length;
    const int blocks = (end + KEYS - 1) / KEYS;

    if (threadIdx.x == 0) {
        barrier_init(q_full, 1);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(k_full + stage * 8, 1);
            barrier_init(v_full + stage * 8, 1);
            // Each multiplying warp reports by itself that it is done with a stage.
            barrier_init(k_empty + stage * 8, MULTIPLYING * WARPGROUP / 32);
            barrier_init(v_empty + stage * 8, MULTIPLYING * WARPGROUP / 32);
        }
        fence_mbarrier_init();
        prefetch(q_map);
        prefetch(k_map);
        prefetch(v_map);
    }
    __syncthreads();

    if (warpgroup == 0) {
        if constexpr (MULTIPLYING > 1)
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MULTIPLYING == 2 ? 40 : 32));
        if (threadIdx.x != 0 || !blocks) return;
        const Heads of_k{k_map, k_heads_outer}, of_v{v_map, v_heads_outer};
        const int kv_head = head / int(heads / kv_heads), first_key = int(place.other_begin);
        barrier_arrive_expecting(q_full, Memory::Q_BYTES);
        Heads{q_map, q_heads_outer}.load_tile<ROWS, COLUMNS>(base, q_full, head, int(place.begin) + place.first);
        Turn<STAGES> k_turn, v_turn;
        // Blocks of keys come from the last to the first, since only the last ones hide keys. The keys of the next
        // block are needed together with the values of this one.
        for (int block = blocks; block >= 0; block--) {
            if (block > 0) {
                const int token = first_key + (block - 1) * KEYS;
                load_stage<Memory, COLUMNS, KEYS>(of_k, base + Memory::K, k_full, k_empty, k_turn, kv_head, token);
                k_turn.next();
            }
            if (block < blocks) {
                load_stage<Memory, COLUMNS, KEYS>(of_v, base + Memory::V, v_full, v_empty, v_turn, kv_head,
                                                  first_key + block * KEYS);
                v_turn.next();
            }
        }
        return;
    }

    if constexpr (MULTIPLYING > 1)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING == 2 ? 232 : 160));
    const int share = warpgroup - 1, thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    // Of a warpgroup's 64 rows, a thread has one in each half of its warp's 16 rows, and two of every 8 columns.
    const int row_here = warp * 16 + lane / 4, pair = lane % 4;
    const int own_limit = limit + share * 64 + row_here, length = place.other_length;
    const int limits[2] = {causal ? min(length, own_limit) : length, causal ? min(length, own_limit + 8) : length};
    // Below it, all rows of the warpgroup see all keys.
    const int seen_by_all = causal ? min(length, limit + share * 64) : length;
    // What products, and the scores that the softmax takes, are multiplied by for base 2.
    const float of_products = float(scale * double(LOG2_E)), factor = BIAS ? 1.0f : of_products;
    const float slope = BIAS ? slopes[head] * LOG2_E : 0.0f;
    const unsigned q_here = base + share * 64 * LINE_BYTES;

    float scores[KEYS / 2], sums[COLUMNS / 2], shrunk[2];
    unsigned weights[KEYS / 16][4];
    Rows rows;

    const auto multiply_keys = [&](int stage) {
        multiply_transposed<T, COLUMNS, ROWS, KEYS>(scores, q_here, base + Memory::K + stage * Memory::TILE_BYTES);
    };
    const auto multiply_values = [&](int stage, bool add) {
        multiply<T, COLUMNS, KEYS>(sums, weights, base + Memory::V + stage * Memory::TILE_BYTES, add);
    };
    const auto take_exponentials = [&](int block) {
        if constexpr (BIAS)
            add_bias(scores, of_products, slope, float((long long)(own_limit - 1) - (block * KEYS + pair * 2)));
        if ((block + 1) * KEYS > seen_by_all) hide(scores, block * KEYS + pair * 2, limits);
        rows.exponentials(scores, factor, shrunk);
    };

    if (blocks) {
        Turn<STAGES> k_turn, v_turn;
        int block = blocks - 1;
        // The first warpgroup has the first turn: the last one gives it.
        if (share == MULTIPLYING - 1) arrive_threads<2 * WARPGROUP>(TURN);
        barrier_wait(q_full, 0);
        barrier_wait(k_full, 0);
        wgmma_fence();
        multiply_keys(0);
        wgmma_wait<0>();
        wgmma_written(scores);
        if (lane == 0) barrier_arrive(k_empty);
        k_turn.next();
        if (length < blocks * KEYS) {
            barrier_wait(v_full, 0);
            clear_rows<COLUMNS, KEYS, MULTIPLYING * WARPGROUP>(memory + Memory::V, length - (blocks - 1) * KEYS,
                                                               share * WARPGROUP + thread);
            sync_threads<MULTIPLYING * WARPGROUP>(CLEANED);
        }
        take_exponentials(block);
        pack<T, KEYS>(weights, scores);
        for (block--; block >= 0; block--, k_turn.next(), v_turn.next()) {
            barrier_wait(k_full + k_turn.stage * 8, k_turn.parity);
            sync_threads<2 * WARPGROUP>(TURN + share);
            wgmma_fence();
            multiply_keys(k_turn.stage);
            barrier_wait(v_full + v_turn.stage * 8, v_turn.parity);
            multiply_values(v_turn.stage, block < blocks - 2);
            arrive_threads<2 * WARPGROUP>(TURN + (share + 1) % MULTIPLYING);
            // The tensor cores multiply the values of the block before meanwhile.
            wgmma_wait<1>();
            wgmma_written(scores);
            if (lane == 0) barrier_arrive(k_empty + k_turn.stage * 8);
            take_exponentials(block);
            wgmma_wait<0>();
            wgmma_written(sums);
            if (lane == 0) barrier_arrive(v_empty + v_turn.stage * 8);
            pack<T, KEYS>(weights, scores);
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) sums[i] *= shrunk[i / 2 % 2];
        }
        barrier_wait(v_full + v_turn.stage * 8, v_turn.parity);
        wgmma_fence();
        multiply_values(v_turn.stage, blocks > 1);
        // The last turn that was given is taken, so that no barrier is left half full.
        if (share == 0) sync_threads<2 * WARPGROUP>(TURN);
        wgmma_wait<0>();
        wgmma_written(sums);
    } else {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0;
    }

    const long long token = place.begin + place.first + share * 64;
    const int own_rows = place.length - place.first - share * 64;
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = row_here + r * 8;
        const float total = sum_of_row(rows.total[r]);
        factors[r] = limits[r] > 0 ? 1 / total : 0.0f;
        if (!place.fits) factors[r] = CUDART_NAN_F;
        if (pair == 0 && row < own_rows)
            lse[head * total_q + token + row] = Rows::base_of(rows.largest[r], factor) * LN_2 + logf(total);
    }
    put_rows<T, COLUMNS, ROWS>(sums, factors, memory, share, output + (token * heads + head) * columns, heads * columns,
                               own_rows, columns);
#endif
}
