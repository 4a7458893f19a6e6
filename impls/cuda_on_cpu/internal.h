// What scheduler.cpp and checker.cpp share. Everything here belongs to the one launch in progress: the caller holds
// Python's lock, and each compiled kernel file carries its own copy of the runtime.
#pragma once
#define FOURFOLD_RUNTIME
#include "runtime.h"

#define FOURFOLD_EXPORT extern "C" __attribute__((visibility("default")))

namespace fourfold {

constexpr unsigned MAX_THREADS = 1024, LANES = 32;

// A tensor that an argument points into: the span from its first to past its last element.
struct View {
    char* begin;
    size_t bytes;
    long long argument, element_bytes, writable, dimensions;
    const long long *sizes, *strides;
};

struct Fault {
    int kind;
    unsigned line;
    const char* file;
    // Offsets in this shared object, 0 for none: the code at fault and what called it; the other half of a race.
    size_t pcs[12], other_pc;
    unsigned block[3], thread[3];
    char text[512];
};
extern Fault fault;

struct State {
    unsigned threads, thread;  // in the block; the running one
    unsigned epoch;            // barriers passed in this block
    // Blocks are numbered through all launches, so that what the checker remembers of earlier ones is known to be old.
    unsigned block, first_block;
    bool checking;
    const void* last_access;  // which code made it
};
extern State now;

void abandon_block() __attribute__((noreturn));
void run_as(unsigned thread);

constexpr size_t STACK_BYTES = 128 << 10;
extern char* stacks;  // of MAX_THREADS fibers; null until the first is made
inline bool on_fiber_stack(const void* address) { return stacks && size_t(static_cast<const char*>(address) - stacks) < MAX_THREADS * STACK_BYTES; }

// views: how many, then for each its argument, address, element size, whether it may be written, its number of dimensions,
// its sizes and its strides.
void checker_begin_launch(const long long* views, size_t dynamic_shared_bytes);
void checker_end_launch();
void checker_begin_block();
// Block numbers start again: nothing that is remembered of earlier launches can be told from later ones.
void checker_forget();
// Uninitialised reads stay pending until here, in case they prove to be one half of a race.
void checker_settle();
void checker_sync_warp(unsigned mask);

}  // namespace fourfold
