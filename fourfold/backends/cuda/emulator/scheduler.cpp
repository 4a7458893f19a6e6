// Runs the blocks of a launch one after another, with one fiber per CUDA thread, so that barriers and warp exchanges
// are exact. A new fiber is started only when a thread has to wait, so a kernel without barriers is a plain loop.
#include "internal.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <csignal>
#include <ctime>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <utility>
#include <vector>

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start;  // from the linker: where this shared object is loaded

namespace fourfold {

Here here{};
State now{};
Fault fault{};

namespace {

constexpr size_t PAGE = 4096;

struct Fiber {
    void* stack_pointer;
    Fiber* next;
};
enum class Wait { nothing, barrier, exchange, active_mask, event };
struct Member {
    uint3 index;
    Fiber* fiber;
    unsigned place;  // position in the schedule
    Wait wait;
    Site site;
    unsigned active;
    const void *awaited, *pc;  // of an event
};
struct Warp {
    void* slots[LANES];
    unsigned masks[LANES];
    ExchangeOp ops[LANES];
    unsigned live, arrived;
};

Member members[MAX_THREADS];
Warp warps[MAX_THREADS / LANES];
unsigned order[MAX_THREADS];              // position in the schedule -> thread
unsigned long long ready[MAX_THREADS / 64];  // a bitmap by position
unsigned started, live, at_barrier, ballot, ballot_result;
Site barrier_site;
Invoke invoke;
char yielded;  // what a thread waits for that lets others go on
void** arguments;

Fiber fibers[MAX_THREADS], *current, *idle;
unsigned fibers_used;
void* host;
volatile bool in_kernel;

// ---- the switch between stacks. swapcontext would make a system call each time.

extern "C" void fourfold_switch(void** save, void* to);
#if defined(__x86_64__)
asm(R"(.text
.hidden fourfold_switch
.globl fourfold_switch
.type fourfold_switch,@function
fourfold_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp,(%rdi); mov %rsi,%rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");
constexpr size_t FRAME_WORDS = 8, RETURN_WORD = 6;  // at fiber_main's entry sp must be 8 past a multiple of 16, as after a call
#elif defined(__aarch64__)
asm(R"(.text
.hidden fourfold_switch
.globl fourfold_switch
.type fourfold_switch,%function
fourfold_switch:
  sub sp,sp,#160
  stp x19,x20,[sp]; stp x21,x22,[sp,#16]; stp x23,x24,[sp,#32]; stp x25,x26,[sp,#48]
  stp x27,x28,[sp,#64]; stp x29,x30,[sp,#80]
  stp d8,d9,[sp,#96]; stp d10,d11,[sp,#112]; stp d12,d13,[sp,#128]; stp d14,d15,[sp,#144]
  mov x9,sp; str x9,[x0]; mov sp,x1
  ldp x19,x20,[sp]; ldp x21,x22,[sp,#16]; ldp x23,x24,[sp,#32]; ldp x25,x26,[sp,#48]
  ldp x27,x28,[sp,#64]; ldp x29,x30,[sp,#80]
  ldp d8,d9,[sp,#96]; ldp d10,d11,[sp,#112]; ldp d12,d13,[sp,#128]; ldp d14,d15,[sp,#144]
  add sp,sp,#160
  ret
)");
constexpr size_t FRAME_WORDS = 20, RETURN_WORD = 11;
#else
#error "fourfold: no context switch is written for this processor"
#endif

}  // namespace

void run_as(unsigned thread) {
    now.thread = thread;
    here.thread = members[thread].index;
    here.lane = thread % LANES;
    here.warp = thread / LANES;
}

namespace {

void fiber_main();

Fiber* fresh_fiber() {
    if (Fiber* f = idle) {
        idle = f->next;
        return f;
    }
    if (!stacks) {
        void* memory = mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            std::perror("cuda_on_cpu: no memory for the threads' stacks");
            std::abort();
        }
        stacks = static_cast<char*>(memory);
    }
    if (fibers_used == fibers_guarded) mprotect(stacks + fibers_guarded++ * STACK_BYTES, PAGE, PROT_NONE);
    // Shift the tops of the stacks, which would otherwise share a few cache sets.
    size_t shift = fibers_used * 448 % 16384;
    void** top = reinterpret_cast<void**>(stacks + (fibers_used + 1) * STACK_BYTES - shift) - FRAME_WORDS;
    std::memset(static_cast<void*>(top), 0, FRAME_WORDS * sizeof(void*));
    top[RETURN_WORD] = reinterpret_cast<void*>(fiber_main);
    fibers[fibers_used].stack_pointer = top;
    return &fibers[fibers_used++];
}

void switch_to(Fiber* to) {
    Fiber* from = current;
    if (from == to) return;
    current = to;
    fourfold_switch(&from->stack_pointer, to->stack_pointer);
}

void make_ready(Member& m) {
    m.wait = Wait::nothing;
    ready[m.place / 64] |= 1ull << m.place % 64;
}

bool resume_one() {
    for (unsigned word = 0; word * 64 < now.threads; word++) {
        if (!ready[word]) continue;
        unsigned place = word * 64 + __builtin_ctzll(ready[word]);
        ready[word] &= ready[word] - 1;
        unsigned thread = order[place];
        run_as(thread);
        switch_to(members[thread].fiber);
        return true;
    }
    return false;
}

// Answers __activemask once no other thread can run: a warp's threads that wait at one line are active together.
bool grant_active_masks() {
    bool granted = false;
    for (unsigned t = 0; t < now.threads; t++) {
        if (members[t].wait != Wait::active_mask) continue;
        unsigned first = t / LANES * LANES, mask = 0;
        for (unsigned u = first; u < first + LANES && u < now.threads; u++)
            if (members[u].wait == Wait::active_mask && members[u].site.line == members[t].site.line) mask |= 1u << u % LANES;
        for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
            Member& m = members[first + __builtin_ctz(lanes)];
            m.active = mask;
            make_ready(m);
        }
        granted = true;
    }
    return granted;
}

// Where no thread can run: wake those that have yielded, or let copies land until a thread can go on.
bool land_copies() {
    if (!asynchronous) return false;
    for (unsigned t = 0; t < now.threads; t++)
        if (members[t].wait == Wait::event && members[t].awaited == &yielded) {
            asynchronous_progress();
            wake_on(&yielded);
            return true;
        }
    auto none_ready = [] {
        for (unsigned word = 0; word * 64 < now.threads; word++)
            if (ready[word]) return false;
        return true;
    };
    while (none_ready())
        if (!asynchronous_progress()) return false;
    return true;
}

[[noreturn]] void deadlock() {
    unsigned waiting = 0, somebody = 0;
    for (unsigned t = now.threads; t--;)
        if (members[t].wait != Wait::nothing) {
            somebody = t;
            waiting++;
        }
    run_as(somebody);
    if (members[somebody].wait == Wait::event)
        fail(DEADLOCK, {}, members[somebody].pc, "waits for ever for %s; so do %u threads in all, and %u have left the kernel",
             asynchronous_awaited(members[somebody].awaited).c_str(), waiting, now.threads - live);
    bool held = members[somebody].wait == Wait::exchange;
    fail(DEADLOCK, members[somebody].site, nullptr, "waits for ever at a %s, as do %u threads in all; %u have left the kernel",
         held ? "warp exchange whose other lanes never come" : "barrier", waiting, now.threads - live);
}

// Suspend the running thread until something makes it ready. Meanwhile others run or start.
void park(Wait what, Site site) {
    unsigned self = now.thread;
    members[self].fiber = current;
    members[self].wait = what;
    members[self].site = site;
    if (!resume_one()) {
        if (started < now.threads) switch_to(fresh_fiber());
        else if (grant_active_masks() || land_copies()) resume_one();
        else deadlock();
    }
    run_as(self);
}

void release_barrier() {
    if (now.checking) checker_settle();
    if (asynchronous) asynchronous_sync_block();
    now.epoch++;
    at_barrier = 0;
    ballot_result = ballot;
    ballot = 0;
    for (unsigned t = 0; t < now.threads; t++)
        if (members[t].wait == Wait::barrier) make_ready(members[t]);
}

// Run the exchange over `mask` if all of its live lanes have arrived.
bool complete(Warp& w, unsigned mask) {
    unsigned present = mask & w.live;
    if (!present || (w.arrived & present) != present) return false;
    unsigned lead = __builtin_ctz(present), first = here.warp * LANES;
    for (unsigned rest = present; rest; rest &= rest - 1) {
        unsigned lane = __builtin_ctz(rest);
        if (w.masks[lane] != mask || w.ops[lane] != w.ops[lead])
            fail(DIVERGENT_WARP, members[first + lane].site, nullptr, "lane %u (mask %08x, line %u) meets lane %u (mask %08x, line %u) in one warp exchange",
                 lead, w.masks[lead], members[first + lead].site.line, lane, w.masks[lane], members[first + lane].site.line);
    }
    w.ops[lead](w.slots, present);
    w.arrived &= ~present;
    return true;
}

void wake(unsigned warp, unsigned lanes) {
    for (; lanes; lanes &= lanes - 1) make_ready(members[warp * LANES + __builtin_ctz(lanes)]);
}

// The running thread has returned from the kernel.
void leave() {
    if (asynchronous) asynchronous_leave();
    unsigned warp = here.warp;
    Warp& w = warps[warp];
    live--;
    w.live &= ~(1u << here.lane);
    if (at_barrier) {
        if (now.checking)
            fail(DIVERGENT_BARRIER, barrier_site, nullptr, "this thread left the kernel while %u wait at the barrier", at_barrier);
        if (at_barrier == live) release_barrier();
    }
    for (unsigned rest = w.arrived; rest; rest &= rest - 1) {
        unsigned mask = w.masks[__builtin_ctz(rest)];
        if (complete(w, mask)) {
            wake(warp, mask & w.live);
            break;
        }
    }
}

void fiber_main() {
    for (;;) {
        while (started < now.threads) {
            run_as(order[started++]);
            invoke(arguments);
            leave();
        }
        Fiber* self = current;
        self->next = idle;
        idle = self;
        if (resume_one()) continue;
        if (live && (grant_active_masks() || land_copies()) && resume_one()) continue;
        if (live) deadlock();
        if (now.checking) checker_settle();
        if (asynchronous) asynchronous_end_block();
        fourfold_switch(&self->stack_pointer, host);
    }
}

// ---- a timer stops a kernel that never ends, since not even pytest's time limit could interrupt it

constexpr int TIMER_SIGNAL_FROM_LAST = 3;
// The return address of the function that the time limit interrupted, in case it has no frame yet.
const char* returns_to = nullptr;

void out_of_time(int signal_number, siginfo_t*, void* context) {
    if (!in_kernel) return;
    sigset_t mine;
    sigemptyset(&mine);
    sigaddset(&mine, signal_number);
    pthread_sigmask(SIG_UNBLOCK, &mine, nullptr);
    auto* machine = &static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    auto pc = reinterpret_cast<const void*>(machine->gregs[REG_RIP]);
    returns_to = *reinterpret_cast<const char* const*>(machine->gregs[REG_RSP]);
#else
    auto pc = reinterpret_cast<const void*>(machine->pc);
    returns_to = reinterpret_cast<const char*>(machine->regs[30]);
#endif
    fail(DEADLOCK, {nullptr, 0}, pc, "the launch has not ended within its time limit; this thread is still running");
}

struct TimeLimit {
    timer_t timer;
    bool armed = false;
    explicit TimeLimit(double seconds) {
        if (seconds <= 0) return;
        int number = SIGRTMAX - TIMER_SIGNAL_FROM_LAST;
        static bool installed = false;
        if (!installed) {
            struct sigaction action{};
            action.sa_sigaction = out_of_time;
            action.sa_flags = SA_SIGINFO | SA_RESTART;
            sigaction(number, &action, nullptr);
            installed = true;
        }
        sigevent event{};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = number;
        event._sigev_un._tid = pid_t(syscall(SYS_gettid));
        // The timer counts processor time, since on a busy machine a launch may wait long before its first instruction.
        if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) && timer_create(CLOCK_MONOTONIC, &event, &timer)) return;
        itimerspec when{};
        when.it_value.tv_sec = time_t(seconds);
        when.it_value.tv_nsec = long((seconds - double(time_t(seconds))) * 1e9) + 1;
        armed = timer_settime(timer, 0, &when, nullptr) == 0;
        if (!armed) timer_delete(timer);
    }
    ~TimeLimit() {
        if (armed) timer_delete(timer);
    }
};

struct Random {
    unsigned long long state;
    unsigned below(unsigned n) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return unsigned(state % n);
    }
};
Random seeded(unsigned long long seed, unsigned long long stream) {
    Random random{(seed + 1) * 0x9e3779b97f4a7c15ull ^ (stream + 1) * 0xbf58476d1ce4e5b9ull};
    if (!random.state) random.state = 1;
    for (int i = 0; i < 4; i++) random.below(2);
    return random;
}
template <class T> void shuffle(T* items, unsigned n, Random random) {
    for (unsigned i = n; i > 1; i--) std::swap(items[i - 1], items[random.below(i)]);
}

// Record the faulty code and, along the frame pointers, its callers: the access may lie in a header's function that the
// kernel's own line calls.
void trace(const void* pc) {
    struct Frame {
        const Frame* caller;
        const char* return_address;
    };
    size_t n = 0, most = sizeof fault.pcs / sizeof fault.pcs[0];
    if (pc) fault.pcs[n++] = size_t(static_cast<const char*>(pc) - &__ehdr_start);
    auto frame = static_cast<const Frame*>(__builtin_frame_address(0));
    while (n < most && on_fiber_stack(frame) && frame->return_address) {
        fault.pcs[n++] = size_t(frame->return_address - &__ehdr_start);
        if (frame->caller <= frame) break;
        frame = frame->caller;
    }
    // The time limit may strike in a hook that has no frame of its own yet, or at the beginning of an atomic operation.
    if (n < most && now.last_access) fault.pcs[n++] = size_t(static_cast<const char*>(now.last_access) - &__ehdr_start);
    if (n < most && returns_to > &__ehdr_start) fault.pcs[n] = size_t(returns_to - &__ehdr_start);
}

}  // namespace

void fail(FaultKind kind, Site site, const void* pc, const char* format, ...) {
    if (now.checking && kind != RACE) checker_settle();
    fault.kind = kind;
    fault.file = site.file;
    fault.line = site.line;
    if (!site.file) trace(pc);
    const unsigned block[3] = {here.block.x, here.block.y, here.block.z}, thread[3] = {here.thread.x, here.thread.y, here.thread.z};
    std::memcpy(fault.block, block, sizeof block);
    std::memcpy(fault.thread, thread, sizeof thread);
    va_list values;
    va_start(values, format);
    std::vsnprintf(fault.text, sizeof fault.text, format, values);
    va_end(values);
    abandon_block();
}

void abandon_block() {
    void* dead;
    in_kernel = false;
    fourfold_switch(&dead, host);
    __builtin_unreachable();
}

void barrier(Site site) {
    if (now.checking && live < now.threads)
        fail(DIVERGENT_BARRIER, site, nullptr, "%u threads have left the kernel before this barrier", now.threads - live);
    if (!at_barrier) barrier_site = site;
    else if (now.checking && (site.line != barrier_site.line || std::strcmp(site.file, barrier_site.file)))
        fail(DIVERGENT_BARRIER, site, nullptr, "this thread is at the barrier of line %u, %u others at that of line %u", site.line, at_barrier, barrier_site.line);
    if (++at_barrier == live) release_barrier();
    else park(Wait::barrier, site);
}

int barrier_vote(bool predicate, Vote vote, Site site) {
    ballot += vote == Vote::all ? !predicate : predicate;
    barrier(site);
    if (vote == Vote::count) return int(ballot_result);
    return vote == Vote::all ? ballot_result == 0 : ballot_result != 0;
}

void exchange(unsigned mask, void* slot, ExchangeOp op, Site site) {
    unsigned warp = here.warp, lane = here.lane, self = now.thread;
    if (!(mask >> lane & 1)) fail(DIVERGENT_WARP, site, nullptr, "lane %u takes part in a warp exchange whose mask %08x lacks it", lane, mask);
    unsigned in_warp = now.threads - warp * LANES;
    if (now.checking && in_warp < LANES && mask >> in_warp)
        fail(DIVERGENT_WARP, site, nullptr, "the mask %08x names lanes that this warp of %u threads lacks", mask, in_warp);
    Warp& w = warps[warp];
    w.slots[lane] = slot;
    w.masks[lane] = mask;
    w.ops[lane] = op;
    w.arrived |= 1u << lane;
    members[self].site = site;
    if (complete(w, mask)) wake(warp, mask & w.live & ~(1u << lane));
    else park(Wait::exchange, site);
}

void sync_warp(unsigned mask, Site site) {
    exchange(mask, nullptr, [](void**, unsigned present) { if (now.checking) checker_sync_warp(present); }, site);
}

void park_on(const void* what, const void* pc) {
    Member& m = members[now.thread];
    m.awaited = what;
    m.pc = pc;
    park(Wait::event, {});
}

void wake_on(const void* what) {
    for (unsigned t = 0; t < now.threads; t++)
        if (members[t].wait == Wait::event && members[t].awaited == what) make_ready(members[t]);
}

void yield_thread(const void* pc) { park_on(&yielded, pc); }

unsigned active_mask(Site site) {
    unsigned self = now.thread;
    park(Wait::active_mask, site);
    return members[self].active;
}

}  // namespace fourfold

using namespace fourfold;

// words: the grid (3), the block (3), the bytes of dynamic shared memory, the schedule (0 forward, 1 reverse, 2
// shuffled) and its seed, the number of arguments, then each argument in 8 bytes. views: see checker_begin_launch, or
// null for an unchecked launch. Returns the fault, or null if there was none.
FOURFOLD_EXPORT const Fault* fourfold_launch(int kernel, long long* words, const long long* views, double seconds) {
    const long long *grid = words, *block = words + 3, schedule = words[7], seed = words[8], count = words[9];
    void* argument_pointers[256];
    for (long long i = 0; i < count; i++) argument_pointers[i] = words + 10 + i;
    arguments = argument_pointers;
    invoke = fourfold_kernels[kernel].invoke;
    idle = nullptr;
    fibers_used = 0;
    asynchronous = fourfold_has_ptx;
    fault.kind = 0;
    std::memset(fault.pcs, 0, sizeof fault.pcs);
    fault.other_pc = 0;

    unsigned n = unsigned(block[0] * block[1] * block[2]), bx = unsigned(block[0]), by = unsigned(block[1]);
    now.threads = n;
    here.block_dim = {bx, by, unsigned(block[2])};
    here.grid_dim = {unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])};
    for (unsigned t = 0; t < n; t++) {
        members[t].index = {t % bx, t / bx % by, t / (bx * by)};
        order[t] = schedule == 1 ? n - 1 - t : t;
    }

    unsigned blocks = unsigned(grid[0] * grid[1] * grid[2]);
    static unsigned next_block = 1;
    if (blocks > ~0u - next_block) {
        checker_forget();
        next_block = 1;
    }
    now.first_block = next_block;
    next_block += blocks;
    std::vector<unsigned> shuffled;
    if (schedule == 2) {
        shuffled.resize(blocks);
        for (unsigned b = 0; b < blocks; b++) shuffled[b] = b;
        shuffle(shuffled.data(), blocks, seeded(seed, ~0ull));
    }

    now.checking = views != nullptr;
    now.last_access = returns_to = nullptr;
    if (now.checking) checker_begin_launch(views, size_t(words[6]));
    {
        TimeLimit limit(seconds);
        for (unsigned k = 0; k < blocks && !fault.kind; k++) {
            unsigned at = schedule == 2 ? shuffled[k] : schedule == 1 ? blocks - 1 - k : k;
            here.block = {at % here.grid_dim.x, at / here.grid_dim.x % here.grid_dim.y, at / here.grid_dim.x / here.grid_dim.y};
            now.block = now.first_block + at;
            if (schedule == 2) shuffle(order, n, seeded(seed, at));
            for (unsigned i = 0; i < n; i++) {
                members[order[i]].place = i;
                members[i].wait = Wait::nothing;
            }
            for (unsigned w = 0; w * LANES < n; w++) {
                warps[w].live = n - w * LANES >= LANES ? ~0u : (1u << (n - w * LANES)) - 1;
                warps[w].arrived = 0;
            }
            std::memset(ready, 0, sizeof ready);
            started = at_barrier = ballot = 0;
            live = n;
            now.epoch = 0;
            if (now.checking) checker_begin_block();
            if (asynchronous) asynchronous_begin_block();
            current = fresh_fiber();
            in_kernel = true;
            fourfold_switch(&host, current->stack_pointer);
            in_kernel = false;
        }
    }
    if (now.checking) checker_end_launch();
    return fault.kind ? &fault : nullptr;
}

FOURFOLD_EXPORT const char* fourfold_signature(int kernel) { return fourfold_kernels[kernel].signature(); }
