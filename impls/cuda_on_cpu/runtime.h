// What a kernel compiled for the CPU needs from the runtime: where the running thread is, and the points at which threads meet.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector_types.h>

namespace fourfold {

struct Site {
    const char* file;
    unsigned line;
};

struct Here {
    uint3 thread, block, block_dim, grid_dim;
    unsigned lane, warp;
};
#ifdef FOURFOLD_RUNTIME
extern Here here;
#else
// Constant as far as a kernel can see, since the runtime puts a thread's own values back before it resumes the thread.
// It also keeps the compiler from instrumenting every read of threadIdx.
extern const Here here;
#endif

// The values are the codes that faults.py turns into exceptions.
enum FaultKind {
    OUT_OF_BOUNDS = 1,
    RACE,
    DIVERGENT_BARRIER,
    DIVERGENT_WARP,
    UNINITIALISED_SHARED,
    DEADLOCK,
    MISALIGNED,
    UNDEFINED_ARITHMETIC,
    FAILED_ASSERTION,
};
[[noreturn]] void fail(FaultKind kind, Site site, const void* pc, const char* format, ...) __attribute__((format(printf, 4, 5)));

enum class Vote { count, all, any };
void barrier(Site site);
int barrier_vote(bool predicate, Vote vote, Site site);

// Runs in the last lane of `mask` to arrive; slots[lane] is what that lane brought.
using ExchangeOp = void (*)(void** slots, unsigned mask);
void exchange(unsigned mask, void* slot, ExchangeOp op, Site site);
void sync_warp(unsigned mask, Site site);
unsigned active_mask(Site site);

enum class Scope { block, device };
void memory_fence(Scope scope);
// Told before each atomic operation, since the compiler's instrumentation knows only plain accesses.
void before_atomic(const void* address, unsigned bytes, const void* pc);

using Invoke = void (*)(void** arguments);
struct Entry {
    Invoke invoke;
    const char* (*signature)();
};

}  // namespace fourfold

// The build generates it: the kernels of this shared object.
extern "C" {
extern __attribute__((visibility("hidden"))) const fourfold::Entry fourfold_kernels[];
}
