// Declarations that scheduler.cpp and checker.cpp share. All state belongs to the single launch in progress: the caller
// holds the GIL, and each compiled kernel file has its own copy of the runtime, apart from the fibers' stacks.
#pragma once
#define FOURFOLD_RUNTIME
#include "runtime.h"

#include <string>

#define FOURFOLD_SHARED __attribute__((visibility("default")))
#define FOURFOLD_EXPORT extern "C" FOURFOLD_SHARED

namespace fourfold {

constexpr unsigned MAX_THREADS = 1024, LANES = 32;

// A tensor argument: the memory from its first element to the end of its last.
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
    // Offsets in this shared object, 0 for none: pcs are the faulty code and its callers, other_pc is the other access
    // of a race.
    size_t pcs[12], other_pc;
    unsigned block[3], thread[3];
    char text[512];
};
extern Fault fault;

struct State {
    unsigned threads, thread;  // threads of the block, and the running one
    unsigned epoch;            // barriers passed in this block
    // Block numbers continue from launch to launch, so the checker recognises records of earlier launches.
    unsigned block, first_block;
    bool checking;
    const void* last_access;  // the code that made the last access
};
extern State now;

void abandon_block() __attribute__((noreturn));
void run_as(unsigned thread);

constexpr size_t STACK_BYTES = 128 << 10;
// The stacks of MAX_THREADS fibers, or null before the first fiber, and how many have a guard. Visible inline variables
// are one of the process: the guards split the stacks into 2048 mappings, and Linux allows a process 65,530.
inline FOURFOLD_SHARED char* stacks;
inline FOURFOLD_SHARED unsigned fibers_guarded;
inline bool on_fiber_stack(const void* address) { return stacks && size_t(static_cast<const char*>(address) - stacks) < MAX_THREADS * STACK_BYTES; }

// views: the number of tensors. Then, for each: its argument's position, address, element size, whether it is writable,
// its number of dimensions, its sizes, its strides.
void checker_begin_launch(const long long* views, size_t dynamic_shared_bytes);
void checker_end_launch();
void checker_begin_block();
// Called when block numbers start again. It drops all records, because old and new numbers would be confused.
void checker_forget();
// Report a pending uninitialised read. It is delayed until here, since it may prove to be half of a race.
void checker_settle();
void checker_sync_warp(unsigned mask);
// The number of the accesses that a warp makes now; it grows where others may learn of those before.
unsigned& warp_event(unsigned warp);
char* shared_memory_begin();
bool inside_shared(const char* p, size_t bytes);
void access_shared(const char* p, unsigned bytes, bool write, const void* pc);
// Something other than a thread has written shared memory.
void mark_written(const char* p, unsigned bytes);
// The next fault names this code as the other half.
void fault_beside(const void* pc);

// Suspend the running thread until wake_on is called with the same pointer; pc is the code that waits.
void park_on(const void* what, const void* pc);
void wake_on(const void* what);
// Let the others go on, as far as they can.
void yield_thread(const void* pc);

// matrices.cpp: the float16 numbers by their bits.
const float* half_values();

// asynchronous.cpp: mbarriers, copies and wgmma, of a unit with inline PTX. A unit may only be `copying`: it has no clocks.
extern bool asynchronous, copying;
void asynchronous_begin_block();
void asynchronous_end_block();
// Let one copy land; false if none is under way.
bool asynchronous_progress();
void asynchronous_leave();
void asynchronous_sync_block();
void asynchronous_sync_warp(unsigned mask);
void asynchronous_access(const char* p, unsigned bytes, bool write, const void* pc);
void asynchronous_forget();
// Whether the running thread knows of another's accesses of this event.
bool asynchronous_knows(unsigned thread, unsigned event);
std::string asynchronous_awaited(const void* what);

}  // namespace fourfold
