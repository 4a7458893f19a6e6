// Scaled dot product attention over packed sequences, after FlashAttention-2, without atomic operations.
#include <math_constants.h>

#include "attention/places.cuh"
#include "attention/products.cuh"

// The rows of the other side that a block takes in a step.
template <class T> constexpr int FORWARD_STEP = sizeof(T) == 2 ? 64 : sizeof(T) == 4 ? 32 : 16;
template <class T> constexpr int BACKWARD_STEP = sizeof(T) == 8 ? 16 : 32;
// Of a block. Wide heads have fewer, for their tiles to fit into shared memory.
template <class T> constexpr int MOST_THREADS = sizeof(T) == 8 ? 32 : 128;
// The warps that own the same 16 rows: each has a share of the scores of a step, and of the sums' columns. The tiles of parts
// leave room for one or two blocks on a multiprocessor.
template <class T> constexpr int SHARES = PARTS<T> > 1 ? 2 : 1;

template <class T> __device__ T not_a_number() { return T(CUDART_NAN_F); }

// The fast exponential of half types, whose error is far below their digits; the exact one of others.
template <class T> __device__ Compute<T> exponential(Compute<T> x) {
    if constexpr (sizeof(T) == 2) return __expf(x);
    else return exp(x);
}

// Waits until all threads have loaded their parts of tiles.
__device__ inline void wait_for_tiles() {
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
}

// What a query sees, by template: all keys or, at runtime, those up to its own place (PLAIN); those within a window; or
// those within a window, with a bias. Without one the window is wider than the sequence.
enum Mask { PLAIN, WINDOW, BIAS };

// Whether a query sees a key that is before its limit, which is 1 past its own place. Within a window: also `left` keys
// before that place, and `right` ones after it, alone. Of a causal window, right is 0.
template <Mask MASK> __device__ bool sees_key(int key, int limit, bool causal, long long left, long long right) {
    if constexpr (MASK != PLAIN) return key >= limit - 1 - left && key < limit + right;
    else return !causal || key < limit;
}

// The score of a product of a query and a key: see `distance`.
template <Mask MASK, class C> __device__ C score_of(C product, C scale, C slope, C past, int n, int e) {
    if constexpr (MASK == BIAS) return product * scale - slope * distance(past, n, e);
    else return product * scale;
}

// Writes a warp's sums [16, COLUMNS], each row times a factor, to rows `from + row * stride` of so many columns.
template <class T, int COLUMNS>
__device__ void put_rows(const Sums<T, COLUMNS>& sums, T* to, long long stride, int rows, int columns,
                         const Compute<T> (&factors)[2], bool fits) {
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = row_of(e), column = column_of(n, e);
            if (row >= rows || column >= columns) continue;
            to[row * stride + column] = fits ? T(sums.at[n][e] * factors[e / 2]) : not_a_number<T>();
        }
}

// Waits until the warps that own the same rows have stored, or read, their scores.
template <class T> __device__ void wait_for_shares() {
    if constexpr (SHARES<T> > 1) __syncthreads();
    else __syncwarp();
}

// Combines the numbers of a thread's two rows, of the 16 from a row of the block on, over the warps that own them. All
// threads of the block wait for it, and must wait again before the next call.
template <class T, class Combine>
__device__ void over_shares(Compute<T> (&numbers)[2], int share, int first_row, Combine combine) {
    __shared__ Compute<T> of_shares[SHARES<T>][MOST_THREADS<T> / 2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (SHARES<T> > 1 && threadIdx.x % 4 == 0) of_shares[share][first_row + row_of(2 * i)] = numbers[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (SHARES<T> > 1)
            numbers[i] = combine(of_shares[0][first_row + row_of(2 * i)], of_shares[1][first_row + row_of(2 * i)]);
}

// A tensor to be split.
struct Whole {
    const float* x;        // [tokens, heads, columns], strided
    __nv_bfloat16* parts;  // [3, tokens, heads, width], zeros past the columns
    long long rows, heads, token_stride, head_stride;
};

__global__ void __launch_bounds__(128) attention_split_kernel(
    const float* a, __nv_bfloat16* a_parts, long long a_rows, long long a_heads, long long a_token_stride,
    long long a_head_stride, const float* b, __nv_bfloat16* b_parts, long long b_rows, long long b_heads,
    long long b_token_stride, long long b_head_stride, const float* c, __nv_bfloat16* c_parts, long long c_rows,
    long long c_heads, long long c_token_stride, long long c_head_stride, const float* d, __nv_bfloat16* d_parts,
    long long d_rows, long long d_heads, long long d_token_stride, long long d_head_stride, long long columns,
    long long width) {
    // One warp owns a head of a token, of the tensor whose number is blockIdx.y.
    const Whole first{a, a_parts, a_rows, a_heads, a_token_stride, a_head_stride};
    const Whole second{b, b_parts, b_rows, b_heads, b_token_stride, b_head_stride};
    const Whole third{c, c_parts, c_rows, c_heads, c_token_stride, c_head_stride};
    const Whole fourth{d, d_parts, d_rows, d_heads, d_token_stride, d_head_stride};
    const Whole of = blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : blockIdx.y == 2 ? third : fourth;
    const long long row = blockIdx.x * 4LL + threadIdx.x / 32, token = row / of.heads, head = row - token * of.heads;
    if (row >= of.rows) return;
    const float* const x = of.x + token * of.token_stride + head * of.head_stride;
    for (int column = threadIdx.x % 32; column < width; column += 32)
        store<float>(of.parts + row * width + column, of.rows * width, column < columns ? x[column] : 0.0f);
}

template <class T, int COLUMNS, Mask MASK>
__global__ void __launch_bounds__(MOST_THREADS<T> * SHARES<T>, SHARES<T>) attention_forward_kernel(
    const Part<T>* __restrict__ q,  // [total_q, heads, columns], strided
    const Part<T>* __restrict__ k,  // [total_k, kv_heads, columns], strided
    const Part<T>* __restrict__ v,  // [total_k, kv_heads, columns], strided
    const void* q_offsets,          // [batch + 1], or null
    const void* k_offsets,          // [batch + 1], or null
    const float* slopes,            // [heads], of BIAS
    T* __restrict__ output,         // [total_q, heads, columns]
    Compute<T>* __restrict__ lse,   // [heads, total_q]
    long long total_q, long long total_k, long long batch, long long heads, long long kv_heads, long long columns,
    long long q_token_stride, long long q_head_stride, long long k_token_stride, long long k_head_stride,
    long long v_token_stride, long long v_head_stride, bool wide_q, bool wide_k, bool vectors, bool causal, long long left,
    long long right, double scale_) {
    // One block owns up to 64 queries of a sequence and head, and COLUMNS columns of their output; SHARES warps 16 queries.
    using C = Compute<T>;
    constexpr int KEYS = FORWARD_STEP<T>, LINE = line_of<T>(KEYS), LINE_OF_V = line_of<T>(COLUMNS);
    constexpr int SCORES = KEYS / SHARES<T>, SUMS = COLUMNS / SHARES<T>;
    const int block = blockDim.x / (2 * SHARES<T>), warp = threadIdx.x / (32 * SHARES<T>), share = threadIdx.x / 32 % SHARES<T>;
    const int width = int(columns + 15) / 16 * 16, line = line_of<T>(width);
    const long long held = PARTS<T> > 1 ? width : columns;  // columns of a row
    const long long q_apart = total_q * heads * width, k_apart = total_k * kv_heads * width;  // parts
    const long long chunks = (columns + COLUMNS - 1) / COLUMNS;
    const long long chunk = blockIdx.x % chunks * COLUMNS, head = blockIdx.x / chunks % heads;
    // Queries that see most keys come first.
    const long long tile = gridDim.x / (chunks * heads) - 1 - blockIdx.x / (chunks * heads);
    const Tokens queries{q_offsets, wide_q, batch, total_q};
    const Tokens keys{k_offsets, wide_k, batch, total_k};
    const Place place(tile, block, queries, keys);
    if (place.first >= place.length) return;
    const int first_column = share * SUMS, used_columns = int(min(columns - chunk, (long long)COLUMNS));
    const int own_columns = min(used_columns - first_column, SUMS), own_width = round_up_16(own_columns);

    extern __shared__ __align__(16) unsigned char shared[];
    Part<T>* const q_tile = reinterpret_cast<Part<T>*>(shared);
    Part<T>* const k_tile = q_tile + block * line;
    Part<T>* const v_tile = k_tile + KEYS * line;
    Part<T>* const weights = v_tile + KEYS * LINE_OF_V + warp * 16 * LINE;
    q += (place.begin + place.first) * q_token_stride + head * q_head_stride;
    k += place.other_begin * k_token_stride + head / (heads / kv_heads) * k_head_stride;
    v += place.other_begin * v_token_stride + head / (heads / kv_heads) * v_head_stride + chunk;
    const int rows = place.length - place.first, own_rows = rows - warp * 16, filled = min(block, round_up_16(rows));
    load_tile<PARTS<T>>(q_tile, line, filled, width, q, q_token_stride, rows, held, vectors, q_apart);
    const auto rounded = [](int count) { return count < KEYS ? round_up_16(count) : KEYS; };

    // A query at `row` of the warp sees the keys below row + limit, and below all of them.
    const int shift = place.other_length - place.length, limit = place.first + warp * 16 + 1 + shift;
    int begin = 0, end = causal ? min(place.other_length, place.first + block + shift) : place.other_length;
    if constexpr (MASK != PLAIN) {
        begin = int(max(place.first + shift - left, 0LL) / KEYS * KEYS);
        end = int(min(place.first + block + shift + right, (long long)place.other_length));
    }
    const C scale = C(scale_), slope = MASK == BIAS ? C(slopes[head]) : C(0);
    Sums<T, SUMS> sums;
    C largest[2] = {-C(CUDART_INF_F), -C(CUDART_INF_F)}, total[2] = {};
    // Keys are loaded while the values before them are multiplied, and values while their keys are.
    const auto load_keys = [&](int start) {
        const int there = end - start;
        if (there > 0)
            load_tile<PARTS<T>>(k_tile, line, rounded(there), width, k + start * k_token_stride, k_token_stride, there, held,
                                vectors, k_apart);
        commit_copies();
    };
    load_keys(begin);
    for (int start = begin; start < end; start += KEYS) {
        const int there = end - start, used = rounded(there);
        wait_for_copies<0>();
        __syncthreads();
        load_tile<PARTS<T>>(v_tile, LINE_OF_V, used, COLUMNS, v + start * v_token_stride, v_token_stride, there,
                            PARTS<T> > 1 ? round_up_16(used_columns) : used_columns, vectors, k_apart);
        commit_copies();
        const int first = share * SCORES;
        const C past = C((long long)(limit - 1 + row_of(0)) - (start + first + column_of(0, 0)));
        Sums<T, SCORES> scores;
        if (own_rows > 0)
            scores.template add<true>(q_tile + warp * 16 * line, line, k_tile + first * line, line, width, used - first);
        C larger[2] = {largest[0], largest[1]};
#pragma unroll
        for (int n = 0; n < SCORES / 8; n++) {
            if (first + n * 8 >= used) break;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int key = start + first + column_of(n, e);
                const bool visible = key < place.other_length && sees_key<MASK>(key, limit + row_of(e), causal, left, right);
                C& score = scores.at[n][e];
                score = visible ? score_of<MASK>(score, scale, slope, past, n, e) : -C(CUDART_INF_F);
                larger[e / 2] = max(larger[e / 2], score);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) larger[i] = largest_of_row(larger[i]);
        over_shares<T>(larger, share, warp * 16, [](C a, C b) { return max(a, b); });
        load_keys(start + KEYS);
        C base[2], shrunk[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Of scores that are all -inf, so that no difference of infinities is taken.
            base[i] = larger[i] == -C(CUDART_INF_F) ? C(0) : larger[i];
            shrunk[i] = exponential<T>(largest[i] - base[i]);
            largest[i] = larger[i];
            total[i] *= shrunk[i];
        }
#pragma unroll
        for (int n = 0; n < SCORES / 8; n++) {
            if (first + n * 8 >= used) break;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const C term = exponential<T>(scores.at[n][e] - base[e / 2]);
                total[e / 2] += term;
                store<T>(weights + row_of(e) * LINE + first + column_of(n, e), KEYS, term);
            }
        }
        wait_for_copies<1>();
        __syncthreads();
        if (own_rows <= 0) continue;
        sums.scale(shrunk);
        sums.template add<false>(weights, LINE, v_tile + first_column, LINE_OF_V, used, own_width);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) total[i] = sum_of_row(total[i]);
    over_shares<T>(total, share, warp * 16, [](C a, C b) { return a + b; });
    if (own_rows <= 0) return;
    C factors[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = row_of(2 * i);
        bool sees = place.other_length > 0 && (!causal || row + limit > 0);
        if constexpr (MASK != PLAIN)
            sees = place.other_length > 0 && row + limit + right > 0 && row + limit - 1 - left < place.other_length;
        factors[i] = sees ? 1 / total[i] : C(0);
        const C base = largest[i] == -C(CUDART_INF_F) ? C(0) : largest[i];
        if (chunk + share == 0 && threadIdx.x % 4 == 0 && row < own_rows)
            lse[head * total_q + place.begin + place.first + warp * 16 + row] = base + log(total[i]);
    }
    const long long token = place.begin + place.first + warp * 16;
    put_rows<T, SUMS>(sums, output + (token * heads + head) * columns + chunk + first_column, heads * columns, own_rows,
                      own_columns, factors, place.fits);
}

template <class T>
__global__ void __launch_bounds__(128) attention_delta_kernel(
    const T* __restrict__ grad_output,        // [total_q, heads, columns], strided
    const Compute<T>* __restrict__ grad_lse,  // [heads, total_q], or null
    const T* __restrict__ output,             // [total_q, heads, columns]
    Compute<T>* __restrict__ delta,           // [heads, total_q]
    long long total_q, long long heads, long long columns, long long token_stride, long long head_stride) {
    // One warp owns a head of a token: delta is the sum of its dO * O, less the cotangent of lse.
    using C = Compute<T>;
    const long long row = blockIdx.x * 4LL + threadIdx.x / 32, token = row / heads, head = row - token * heads;
    if (token >= total_q) return;
    C sum = 0;
    for (int column = threadIdx.x % 32; column < columns; column += 32)
        sum += C(grad_output[token * token_stride + head * head_stride + column]) * C(output[row * columns + column]);
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (threadIdx.x % 32) return;
    const long long at = head * total_q + token;
    delta[at] = grad_lse ? sum - grad_lse[at] : sum;
}

// Rows of a tensor that a kernel multiplies, and the distance of its parts.
template <class T> struct Operand {
    const Part<T>* at;
    long long token_stride, head_stride, apart;
};

// One block owns up to 64 queries of a sequence and head, and COLUMNS columns of their gradient; SHARES warps 16 queries.
// OF_KEYS, it owns as many keys, and takes their gradients for `group` heads. With the own tiles A and B (q and the gradient
// of the output; or k and v) and C and D of the other side (k and v; or q and that gradient), it takes the scores A C^T and
// the products B D^T, from these the weights P and the gradients of scores dS, and sums up dS C and, OF_KEYS, P D.
template <class T, int COLUMNS, Mask MASK, bool OF_KEYS>
__global__ void __launch_bounds__(MOST_THREADS<T> * SHARES<T>) attention_backward_kernel(
    const Part<T>* __restrict__ grad_output,  // [total_q, heads, columns], strided
    const Part<T>* __restrict__ q,            // [total_q, heads, columns], strided
    const Part<T>* __restrict__ k,            // [total_k, kv_heads, columns], strided
    const Part<T>* __restrict__ v,            // [total_k, kv_heads, columns], strided
    const void* q_offsets,                    // [batch + 1], or null
    const void* k_offsets,                    // [batch + 1], or null
    const float* slopes,                      // [heads], of BIAS
    const Compute<T>* __restrict__ lse,       // [heads, total_q]
    const Compute<T>* __restrict__ delta,     // [heads, total_q]
    T* __restrict__ grad_first,               // [tokens, heads / group, columns], of q, or OF_KEYS of k; may be null
    T* __restrict__ grad_second,              // OF_KEYS: of v; may be null
    long long total_q, long long total_k, long long batch, long long heads, long long kv_heads, long long columns,
    long long grad_token_stride, long long grad_head_stride, long long q_token_stride, long long q_head_stride,
    long long k_token_stride, long long k_head_stride, long long v_token_stride, long long v_head_stride,
    bool wide_q, bool wide_k, bool vectors, bool causal, long long left, long long right, double scale_,
    long long group) {
    using C = Compute<T>;
    constexpr int STEP = BACKWARD_STEP<T>, LINE = line_of<T>(STEP);
    constexpr int SCORES = STEP / SHARES<T>, SUMS = COLUMNS / SHARES<T>;
    const int block = blockDim.x / (2 * SHARES<T>), warp = threadIdx.x / (32 * SHARES<T>), share = threadIdx.x / 32 % SHARES<T>;
    const int width = int(columns + 15) / 16 * 16, line = line_of<T>(width);
    const long long held = PARTS<T> > 1 ? width : columns;  // columns of a row
    const long long q_apart = total_q * heads * width, k_apart = total_k * kv_heads * width;  // parts
    const long long chunks = (columns + COLUMNS - 1) / COLUMNS, groups = heads / group;
    const long long chunk = blockIdx.x % chunks * COLUMNS, first_head = blockIdx.x / chunks % groups * group;
    const long long number = blockIdx.x / (chunks * groups), kv_head = first_head / (heads / kv_heads);
    const Tokens queries{q_offsets, wide_q, batch, total_q};
    const Tokens keys{k_offsets, wide_k, batch, total_k};
    const Place place(OF_KEYS ? number : gridDim.x / (chunks * groups) - 1 - number, block, OF_KEYS ? keys : queries,
                      OF_KEYS ? queries : keys);
    if (place.first >= place.length) return;
    const int own = share * SUMS, own_columns = int(min(columns - chunk - own, (long long)SUMS));
    const int own_width = round_up_16(own_columns);

    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ C of_query[2][OF_KEYS ? STEP : 1];
    Part<T>* const a_tile = reinterpret_cast<Part<T>*>(shared);
    Part<T>* const b_tile = a_tile + block * line;
    Part<T>* const c_tile = b_tile + block * line;
    Part<T>* const d_tile = c_tile + STEP * line;
    Part<T>* const grad_scores = d_tile + STEP * line + warp * (OF_KEYS ? 32 : 16) * LINE;
    Part<T>* const weights = grad_scores + 16 * LINE;
    const Operand<T> of_q{q, q_token_stride, q_head_stride, q_apart}, of_k{k, k_token_stride, k_head_stride, k_apart};
    const Operand<T> of_grad{grad_output, grad_token_stride, grad_head_stride, q_apart};
    const Operand<T> of_v{v, v_token_stride, v_head_stride, k_apart};
    const auto load = [&](Part<T>* to, const Operand<T>& x, long long token, long long head, int count, int there) {
        load_tile<PARTS<T>>(to, line, count, width, x.at + token * x.token_stride + head * x.head_stride, x.token_stride,
                            there, held, vectors, x.apart);
    };
    const long long token = place.begin + place.first;
    const int rows = place.length - place.first, own_rows = rows - warp * 16, filled = min(block, round_up_16(rows));
    load(a_tile, OF_KEYS ? of_k : of_q, token, OF_KEYS ? kv_head : first_head, filled, rows);
    load(b_tile, OF_KEYS ? of_v : of_grad, token, OF_KEYS ? kv_head : first_head, filled, rows);
    C of_row[2][2] = {};
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (!OF_KEYS && row_of(2 * i) < own_rows) {
            const long long at = first_head * total_q + token + warp * 16 + row_of(2 * i);
            of_row[i][0] = lse[at], of_row[i][1] = delta[at];
        }

    // The warp's row r is at the others' place r + diagonal. A query there sees the keys up to it; a key, the queries from it.
    const int shift = place.other_length - place.length, diagonal = place.first + warp * 16 + shift;
    int begin = OF_KEYS && causal ? max(place.first + shift, 0) / STEP * STEP : 0;
    int end = !OF_KEYS && causal ? min(place.other_length, place.first + block + shift) : place.other_length;
    if constexpr (MASK != PLAIN) {
        begin = int(max(place.first + shift - (OF_KEYS ? right : left), 0LL) / STEP * STEP);
        end = int(min(place.first + block + shift + (OF_KEYS ? left : right), (long long)place.other_length));
    }
    const C scale = C(scale_);
    Sums<T, SUMS> sums, sums_second;
    for (long long head = first_head; head < first_head + group; head++) {
        const C slope = MASK == BIAS ? C(slopes[head]) : C(0);
        for (int start = begin; start < end; start += STEP) {
            const long long other = place.other_begin + start;
            const int there = end - start, used = there < STEP ? round_up_16(there) : STEP;
            __syncthreads();
            load(c_tile, OF_KEYS ? of_q : of_k, other, OF_KEYS ? head : kv_head, used, there);
            load(d_tile, OF_KEYS ? of_grad : of_v, other, OF_KEYS ? head : kv_head, used, there);
            for (int i = threadIdx.x; OF_KEYS && i < STEP; i += blockDim.x) {
                of_query[0][i] = i < there ? lse[head * total_q + other + i] : C(0);
                of_query[1][i] = i < there ? delta[head * total_q + other + i] : C(0);
            }
            wait_for_tiles();
            const int first = share * SCORES;
            if (own_rows > 0) {
                const C past = C((long long)(diagonal + row_of(0)) - (start + first + column_of(0, 0)));
                Sums<T, SCORES> scores, products;
                scores.template add<true>(a_tile + warp * 16 * line, line, c_tile + first * line, line, width, used - first);
                products.template add<true>(b_tile + warp * 16 * line, line, d_tile + first * line, line, width, used - first);
#pragma unroll
                for (int n = 0; n < SCORES / 8; n++) {
                    if (first + n * 8 >= used) break;
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int column = first + column_of(n, e), at = row_of(e) * LINE + column;
                        const int key = OF_KEYS ? row_of(e) + diagonal : start + column;
                        const int query = OF_KEYS ? start + column : row_of(e) + diagonal;
                        const bool visible = column < there && sees_key<MASK>(key, query + 1, causal, left, right);
                        const C of_lse = OF_KEYS ? of_query[0][OF_KEYS ? column : 0] : of_row[e / 2][0];
                        const C of_delta = OF_KEYS ? of_query[1][OF_KEYS ? column : 0] : of_row[e / 2][1];
                        const C score = score_of<MASK>(scores.at[n][e], scale, slope, past, n, e);
                        const C weight = visible ? exponential<T>(score - of_lse) : C(0);
                        store<T>(grad_scores + at, STEP, visible ? weight * (products.at[n][e] - of_delta) : C(0));
                        if constexpr (OF_KEYS) store<T>(weights + at, STEP, weight);
                    }
                }
            }
            wait_for_shares<T>();
            if (own_rows <= 0) continue;
            if (OF_KEYS && grad_second)
                sums_second.template add<false>(weights, LINE, d_tile + chunk + own, line, used, own_width);
            if (grad_first) sums.template add<false>(grad_scores, LINE, c_tile + chunk + own, line, used, own_width);
        }
    }
    if (own_rows <= 0) return;
    const long long at = ((token + warp * 16) * groups + first_head / group) * columns + chunk + own, stride = groups * columns;
    const C scales[2] = {scale, scale}, ones[2] = {1, 1};
    if (grad_first) put_rows<T, SUMS>(sums, grad_first + at, stride, own_rows, own_columns, scales, place.fits);
    if (OF_KEYS && grad_second)
        put_rows<T, SUMS>(sums_second, grad_second + at, stride, own_rows, own_columns, ones, place.fits);
}

// Adds up the gradients of the heads that share keys, in the order of heads: of k, and with blockIdx.y of v.
template <class T>
__global__ void __launch_bounds__(128) attention_sum_of_heads_kernel(
    const Compute<T>* __restrict__ of_heads,  // [2, tokens, heads, columns]
    T* __restrict__ grad_k,                   // [tokens, kv_heads, columns], or null
    T* __restrict__ grad_v,                   // as grad_k
    long long rows, long long columns, long long group) {
    // One warp owns a head of keys of a token.
    const long long row = blockIdx.x * 4LL + threadIdx.x / 32;
    T* const result = blockIdx.y ? grad_v : grad_k;
    if (row >= rows || !result) return;
    for (int column = threadIdx.x % 32; column < columns; column += 32) {
        const Compute<T>* from = of_heads + (blockIdx.y * rows + row) * group * columns + column;
        Compute<T> sum = 0;
#pragma unroll 4
        for (long long head = 0; head < group; head++, from += columns) sum += *from;
        result[row * columns + column] = T(sum);
    }
}
