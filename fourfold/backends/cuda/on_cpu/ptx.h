// What inline PTX is translated to (ptx.py): mbarriers, bulk tensor copies (TMA), wgmma, named barriers and fences.
// Addresses of shared memory are numbers of 32 bits, as on a GPU.
#pragma once
#include "runtime.h"

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

void load_box(unsigned to, const void* map, unsigned barrier, int column, int row);
void store_box(const void* map, unsigned from, int column, int row);
void commit_bulk();
void wait_bulk(unsigned pending, bool of_reads);

void named_barrier(unsigned number, unsigned threads, bool waits);

void wgmma_fence();
void wgmma_commit();
void wgmma_wait(unsigned pending);
// d: the thread's `columns` / 2 registers.
void wgmma(unsigned columns, bool bfloat16, float* const* d, unsigned long long a, unsigned long long b, bool add, int a_sign, int b_sign, bool a_transposed, bool b_transposed);

void set_registers(unsigned count);
void store_shared(unsigned to, const void* value, unsigned bytes);
void load_shared(void* value, unsigned from, unsigned bytes);

}  // namespace fourfold::ptx

inline size_t __cvta_generic_to_shared(const void* pointer) { return fourfold::ptx::shared_address(pointer); }
inline void* __cvta_shared_to_generic(size_t address) { return fourfold::ptx::shared_pointer(address); }
