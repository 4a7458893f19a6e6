// Rows that may begin between two multiples of 16 bytes. They are moved in aligned 16-byte words, which are shifted
// into place: a thread owns the same columns wherever the row begins, so that sums keep their order.
#pragma once
#include "vectors.cuh"

template <class T, int WIDTH> __device__ inline Vector<T, WIDTH> filled(float value) {
    Vector<T, WIDTH> vector;
    const T each(value);
    if constexpr (sizeof(T) == 2 && WIDTH == 8) {
        // Fill whole words, like loaded vectors. Else the compiler would split the loaded ones into elements too.
        unsigned short half;
        memcpy(&half, &each, sizeof half);
        const unsigned word = half * 0x10001u;
        const uint4 words = make_uint4(word, word, word, word);
        memcpy(&vector, &words, sizeof words);
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; j++) vector.at[j] = each;
    }
    return vector;
}

// The number of elements between the last multiple of 16 bytes and the beginning of a row.
template <class T> __device__ inline int elements_before(const T* row) {
    return int(reinterpret_cast<unsigned long long>(row) % 16 / sizeof(T));
}

// The 16 bytes that begin at an element of `low`, and go on in `high`.
template <class T> __device__ inline uint4 shifted(const uint4& low, const uint4& high, int element) {
    unsigned words[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const int bytes = element * int(sizeof(T));
#pragma unroll
    for (int i = 0; i < 6; i++) words[i] = bytes & 8 ? words[i + 2] : words[i];
    if constexpr (sizeof(T) <= 4) {
#pragma unroll
        for (int i = 0; i < 5; i++) words[i] = bytes & 4 ? words[i + 1] : words[i];
    }
    if constexpr (sizeof(T) <= 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = __funnelshift_r(words[i], words[i + 1], bytes % 4 * 8);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The words of shared memory by which the lanes of a warp exchange theirs.
constexpr int EXCHANGED = 33;

// The part of the block's dynamic shared memory that belongs to a warp: the block needs EXCHANGED words for each warp.
__device__ inline uint4* exchange_of_warp() {
    extern __shared__ __align__(16) unsigned char raw[];
    return reinterpret_cast<uint4*>(raw) + (threadIdx.y * blockDim.x + threadIdx.x) / 32 * EXCHANGED;
}

// Loads the word of this number, of which the row has not all columns, one column in each lane. Those that it does not
// have become `absent`. All lanes of a warp must call it.
template <class T> __device__ inline uint4 end_of_row(const T* row, long long cols, int number, T absent) {
    constexpr int WIDTH = 16 / sizeof(T);
    const int lane = threadIdx.x % 32;
    const long long column = (long long)number * WIDTH - elements_before(row) + lane;
    uint4* exchange = exchange_of_warp();
    T element = absent;
    if (lane < WIDTH && column >= 0 && column < cols) element = row[column];
    if (lane < WIDTH) reinterpret_cast<T*>(exchange)[lane] = element;
    __syncwarp();
    const uint4 word = exchange[0];
    __syncwarp();
    return word;
}

// Loads vectors of a row. `number(k)` is the number of the k-th, which has columns from number * WIDTH on. Only the
// first may be 0. Columns that the row does not have become `absent`, and nothing outside the row is read. All lanes of
// a warp must call it, with consecutive numbers: a lane loads the word in which its vector begins, and gets the word
// after it from the next lane.
template <class T, int WIDTH, int COUNT, class Number>
__device__ inline void load_shifted(
    Vector<T, WIDTH> (&to)[COUNT], const T* row, long long cols, Number number, float absent) {
    const int lane = threadIdx.x % 32, before = elements_before(row);
    const uint4* aligned = reinterpret_cast<const uint4*>(row - before);
    // Words from `first` to before `last` are whole. The row may have part of the words before and behind.
    const int first = before > 0, last = int((cols + before) / WIDTH);
    const uint4 empty = filled<T, WIDTH>(absent).bits();
    // Lane k also loads the word that follows those of the whole warp for the k-th vector.
    const int following = number(min(lane, COUNT - 1)) + 32 - lane;
    uint4 words[COUNT], beyond = empty;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        words[k] = empty;
        if (number(k) < last && (k > 0 || number(k) >= first)) words[k] = aligned[number(k)];
    }
    if (before && following < last) beyond = aligned[following];
    // The ends come last: only the warps that have them wait for them.
    if (number(0) - lane < first) {
        const uint4 end = end_of_row(row, cols, 0, T(absent));
        if (number(0) < first) words[0] = end;
    }
    bool at_end = false;
#pragma unroll
    for (int k = 0; k < COUNT; k++) at_end = at_end || unsigned(last - (number(k) - lane)) <= 32;
    if (at_end) {
        const uint4 end = end_of_row(row, cols, last, T(absent));
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (number(k) == last && (k > 0 || number(k) >= first)) words[k] = end;
        if (following == last) beyond = end;
    }
    if (before) {
        uint4* exchange = exchange_of_warp();
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            exchange[lane] = words[k];
            if (lane == k) exchange[32] = beyond;
            __syncwarp();
            words[k] = shifted<T>(words[k], exchange[lane + 1], before);
            __syncwarp();
        }
    }
#pragma unroll
    for (int k = 0; k < COUNT; k++) memcpy(&to[k], &words[k], sizeof words[k]);
}

// Stores vector `number` of a row. All lanes of a warp must call it, with consecutive numbers. What lies beyond the row
// is not stored. A lane gets the beginning of its aligned word from the lane before it.
template <class T, int WIDTH>
__device__ inline void store_shifted(T* row, long long cols, int number, const Vector<T, WIDTH>& vector) {
    const int lane = threadIdx.x % 32, before = elements_before(row), last = int((cols + before) / WIDTH);
    uint4* exchange = exchange_of_warp();
    const T* elements = reinterpret_cast<const T*>(exchange);
    uint4 word = vector.bits();
    exchange[lane] = word;
    __syncwarp();
    if (before && lane > 0) word = shifted<T>(exchange[lane - 1], word, WIDTH - before);
    if (number < last && (lane > 0 || !before)) __stcs(reinterpret_cast<uint4*>(row - before) + number, word);
    const int from_first = last - (number - lane);
    if (from_first >= (before > 0) && from_first < 32 && lane < WIDTH) {
        // The last word of the row is not whole. Each lane stores one element of it.
        const long long column = (long long)last * WIDTH - before + lane;
        if (column < cols) row[column] = elements[from_first * WIDTH - before + lane];
    }
    if (before && lane < WIDTH) {
        // The warp's first and last elements lie in words that it shares with other warps. A lane stores one of them.
        const int from = lane < WIDTH - before ? 0 : 31;
        const long long column = (long long)(number - lane + from) * WIDTH + lane;
        if (column < cols) row[column] = elements[from * WIDTH + lane];
    }
    __syncwarp();
}
