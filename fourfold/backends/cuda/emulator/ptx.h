// What inline PTX is translated to (ptx.py): mbarriers, bulk tensor copies (TMA), cp.async, wgmma, named barriers and fences.
// Addresses of shared memory are numbers of 32 bits, as on a GPU.
#pragma once
#include "runtime.h"

#include <type_traits>

namespace fourfold::ptx {

size_t shared_address(const void* pointer);
void* shared_pointer(size_t address);

void mbarrier_init(unsigned barrier, unsigned arrivals);
void mbarrier_invalidate(unsigned barrier);
// Each of these returns the number of the phase to which the arrival belongs.
unsigned long long mbarrier_arrive(unsigned barrier, unsigned arrivals);
unsigned long long mbarrier_arrive_expecting(unsigned barrier, unsigned bytes);
void mbarrier_expect(unsigned barrier, unsigned bytes);
// try: suspend the thread until the phase has ended. Else say at once whether it has.
bool mbarrier_wait_parity(unsigned barrier, unsigned parity, bool try_);
bool mbarrier_wait_phase(unsigned barrier, unsigned long long phase, bool try_);
void fence_mbarrier_init();
void fence_proxy_async();

// Where a box of a tensor of 2 or 3 dimensions starts: its column, its row, and its plane if there are planes.
struct Start {
    int dimensions, at[3];
};
void load_box(unsigned to, const void* map, unsigned barrier, Start start);
void store_box(const void* map, unsigned from, Start start);
void commit_bulk();
void wait_bulk(unsigned pending, bool of_reads);

// cp.async: `read` bytes from global memory, and zeros after them.
void copy_async(unsigned to, const void* from, unsigned bytes, unsigned read);
void commit_copies();
void wait_copies(unsigned pending);
void wait_all_copies();

void named_barrier(unsigned number, unsigned threads, bool waits);

void wgmma_fence();
void wgmma_commit();
void wgmma_wait(unsigned pending);
// The elements of a and b. Sums are of int32, and wrap around, for INT8, and of float32 otherwise.
enum class Elements { FLOAT16, BFLOAT16, INT8 };
// Multiplies by 32 bytes of each line. d: the thread's `columns` / 2 registers. a_registers: its four of a, or null: a
// descriptor says where a is. a_places: the variables that are these registers, or null for a temporary.
void wgmma(unsigned columns, Elements elements, void* const* d, const unsigned* a_registers, const void* const* a_places, unsigned long long a, unsigned long long b, bool add, int a_sign, int b_sign, bool a_transposed, bool b_transposed);

// mma.sync of 16 x 16 by 16 x 8 elements of float16 or bfloat16: of each lane, its registers.
void mma(bool bfloat16, float* const* d, const unsigned* a, const unsigned* b, const float* c, Site site);
// ldmatrix of 1, 2 or 4 matrices of 8 x 8 elements of 2 bytes: each lane gives the address of a row.
void load_matrices(unsigned count, bool transposed, unsigned* const* d, unsigned from, Site site);

// ex2.approx.ftz: 2^x, and 0 in the place of subnormal numbers.
float exp2_approximate(float x);

void set_registers(unsigned count);
void store_shared(unsigned to, const void* value, unsigned bytes);
void load_shared(void* value, unsigned from, unsigned bytes);

}  // namespace fourfold::ptx

inline size_t __cvta_generic_to_shared(const void* pointer) { return fourfold::ptx::shared_address(pointer); }
inline void* __cvta_shared_to_generic(size_t address) { return fourfold::ptx::shared_pointer(address); }
