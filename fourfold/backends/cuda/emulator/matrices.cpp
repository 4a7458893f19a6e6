// What the lanes of a warp do together by inline PTX: ldmatrix and mma.sync. Neither orders accesses to memory.
#include "internal.h"
#include "ptx.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace fourfold {

static float of_half(unsigned short bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float v = exponent == 31 ? (mantissa ? NAN : INFINITY) : exponent ? std::ldexp(float(mantissa + 1024), exponent - 25) : std::ldexp(float(mantissa), -24);
    return bits >> 15 ? -v : v;
}
const float* half_values() {
    static std::vector<float> table;
    if (table.empty())
        for (unsigned bits = 0; bits < 65536; bits++) table.push_back(of_half(static_cast<unsigned short>(bits)));
    return table.data();
}

namespace {

float number(unsigned bits, bool bfloat16) {
    if (!bfloat16) return half_values()[bits & 0xffff];
    float value;
    bits <<= 16;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Lanes that have left the kernel take no part, and nothing can be made of what they would have given.
void need_all_lanes(unsigned mask, Site site, const char* what) {
    if (mask != ~0u) fail(DIVERGENT_WARP, site, nullptr, "%s needs all lanes of the warp; those of the mask %08x are left", what, mask);
}

struct Product {
    float* const* d;
    const unsigned *a, *b;
    const float* c;
    Site site;
};

// The registers of a lane: a[i] has two neighbours of row lane / 4 + i % 2 * 8, from term lane % 4 * 2 + i / 2 * 8 on; b[i]
// two terms from there on, of column lane / 4; c[i] is of row lane / 4 + i / 2 * 8 and column lane % 4 * 2 + i % 2.
template <bool BFLOAT16> void multiply(void** slots, unsigned mask) {
    float a[16][16], b[16][8];
    auto of = [slots](unsigned lane) { return static_cast<Product*>(slots[lane]); };
    need_all_lanes(mask, of(unsigned(__builtin_ctz(mask)))->site, "mma.sync");
    for (unsigned lane = 0; lane < LANES; lane++)
        for (unsigned half = 0; half < 2; half++) {
            const unsigned shift = 16 * half, term = lane % 4 * 2 + half;
            for (unsigned i = 0; i < 4; i++) a[lane / 4 + i % 2 * 8][term + i / 2 * 8] = number(of(lane)->a[i] >> shift, BFLOAT16);
            for (unsigned i = 0; i < 2; i++) b[term + i * 8][lane / 4] = number(of(lane)->b[i] >> shift, BFLOAT16);
        }
    float sums[LANES][4];
    for (unsigned lane = 0; lane < LANES; lane++)
        for (unsigned i = 0; i < 4; i++) {
            const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            sums[lane][i] = of(lane)->c[i];
            for (unsigned term = 0; term < 16; term++) sums[lane][i] += a[row][term] * b[term][column];
        }
    for (unsigned lane = 0; lane < LANES; lane++)
        for (unsigned i = 0; i < 4; i++) *of(lane)->d[i] = sums[lane][i];
}

struct Row {
    unsigned short elements[8];
    unsigned count;
    bool transposed;
    unsigned* const* d;
    Site site;
};

// Lane 8 i + j has given row j of matrix i. Each lane gets two neighbours of row lane / 4, or of a column of it.
void distribute(void** slots, unsigned mask) {
    auto row = [slots](unsigned lane) { return static_cast<Row*>(slots[lane]); };
    need_all_lanes(mask, row(unsigned(__builtin_ctz(mask)))->site, "ldmatrix");
    for (unsigned lane = 0; lane < LANES; lane++)
        for (unsigned i = 0; i < row(lane)->count; i++) {
            unsigned word = 0;
            for (unsigned half = 0; half < 2; half++) {
                const unsigned place = lane % 4 * 2 + half;
                const unsigned element = row(lane)->transposed ? row(8 * i + place)->elements[lane / 4] : row(8 * i + lane / 4)->elements[place];
                word |= element << 16 * half;
            }
            *row(lane)->d[i] = word;
        }
}

}  // namespace
}  // namespace fourfold

namespace fourfold::ptx {

void mma(bool bfloat16, float* const* d, const unsigned* a, const unsigned* b, const float* c, Site site) {
    Product mine{d, a, b, c, site};
    exchange(~0u, &mine, bfloat16 ? multiply<true> : multiply<false>, site);
}

void load_matrices(unsigned count, bool transposed, unsigned* const* d, unsigned from, Site site) {
    Row mine{{}, count, transposed, d, site};
    // The addresses of lanes past the last matrix are not used.
    if (here.lane < 8 * count) {
        if (from % 16) fail(MISALIGNED, site, nullptr, "ldmatrix reads a row at shared address %u, which is not a multiple of 16", from);
        const char* row = static_cast<const char*>(shared_pointer(from));
        if (now.checking && !inside_shared(row, sizeof mine.elements))
            fail(OUT_OF_BOUNDS, site, nullptr, "ldmatrix reads a row at shared address %u, outside of every shared array", from);
        if (now.checking) access_shared(row, sizeof mine.elements, false, __builtin_return_address(0));
        std::memcpy(mine.elements, row, sizeof mine.elements);
    }
    exchange(~0u, &mine, distribute, site);
}

}  // namespace fourfold::ptx
