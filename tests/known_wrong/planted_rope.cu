// A small kernel of rope for float32: correct as NONE, with one mistake for each other value of Fault.
enum Fault { NONE, STORE_UNMASKED, OFFSETS_IN_32_BITS, ODD_COLUMN_DROPPED, SIGN_OF_SINE, UPDATED_IN_TURN, COUNTED_FROM_1 };

__global__ void rope_kernel(const float* x, const float* cos, const float* sin, const long long* positions,
                            float* output, long long rows, long long row_stride, long long heads, long long dim,
                            long long half, long long num_positions, bool interleaved, long long fault) {
    // One block owns a head of a token, one thread a pair, or an element that has no partner.
    long long row = blockIdx.x, slot = threadIdx.x, slots = dim - half;
    if (fault == ODD_COLUMN_DROPPED) slots = half + (dim / 2 - half) * 2;
    if (slot >= slots && fault != STORE_UNMASKED) return;
    long long at = fault == OFFSETS_IN_32_BITS ? (int)row * (int)row_stride : row * row_stride;
    long long position = positions[row / heads];
    if (fault == COUNTED_FROM_1) position = (position + 1) % num_positions;
    if (slot >= half) {
        output[row * dim + half + slot] = x[at + (slot < slots ? half + slot : 0)];
        return;
    }
    long long one = interleaved ? 2 * slot : slot, other = interleaved ? one + 1 : half + slot;
    float c = cos[position * half + slot], s = sin[position * half + slot], a = x[at + one], b = x[at + other];
    if (fault == SIGN_OF_SINE) s = -s;
    float turned = a * c - b * s;
    if (fault == UPDATED_IN_TURN) a = turned;
    output[row * dim + one] = turned;
    output[row * dim + other] = b * c + a * s;
}
