// A small kernel of attention for float32: correct as NONE, with one mistake for each other value of Fault.
enum Fault { NONE, CAUSAL_AT_THE_TOP_LEFT, HEADS_BY_MODULO, PADDED_KEYS_COUNTED, LAST_BLOCK_UNMASKED };

__global__ void attention_kernel(const float* q, const float* k, const float* v, const long long* begins,
                                 const long long* ends, const long long* seen, float* output, long long heads,
                                 long long kv_heads, long long columns, bool causal, double scale, long long fault) {
    // One block owns a head of a token, one thread a column of its output. It sees `seen` keys of its sequence.
    const int token = blockIdx.x / heads, head = blockIdx.x % heads, column = threadIdx.x;
    const int kv_head = fault == HEADS_BY_MODULO ? head % kv_heads : head / (heads / kv_heads);
    const long long begin = begins[token], length = ends[token] - begin;
    long long count = causal ? seen[token] : length;
    if (fault == LAST_BLOCK_UNMASKED) count = (count + 15) / 16 * 16;
    float largest = -INFINITY, total = 0, sum = 0;
    for (int pass = 0; pass < 2; pass++)
        for (long long key = 0; key < count; key++) {
            const float* row = k + ((begin + key) * kv_heads + kv_head) * columns;
            float score = 0;
            for (int i = 0; i < columns; i++) score += q[(token * heads + head) * columns + i] * row[i];
            score *= float(scale);
            if (pass == 0) {
                largest = fmaxf(largest, score);
            } else {
                const float weight = expf(score - largest);
                total += weight;
                sum += weight * v[((begin + key) * kv_heads + kv_head) * columns + column];
            }
        }
    // The keys up to a multiple of 16 are zeros, whose scores are 0.
    if (fault == PADDED_KEYS_COUNTED && length % 16) total += (16 - length % 16) * expf(-largest);
    output[(token * heads + head) * columns + column] = count > 0 ? sum / total : 0.0f;
}
