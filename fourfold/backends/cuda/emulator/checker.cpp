// Checks every access of a checked kernel. Only the kernel is compiled with -fsanitize=thread and parts of
// -fsanitize=undefined. This file defines the functions that such code calls, in place of the sanitizers' libraries.
#include "internal.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <unordered_map>
#include <vector>

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;  // from the linker: the bounds of this shared object

namespace fourfold {
namespace {

// ---- records of accesses

constexpr unsigned short SEVERAL_WARPS = 0xffff;
constexpr unsigned NEVER = ~0u;  // an epoch that no barrier ends

enum Kind : unsigned char { NONE, PLAIN, ATOMIC, RELEASING_ATOMIC };

// One access, or the union of several unordered ones. A union counts as its latest access, made by all of the threads.
struct Access {
    unsigned block, epoch, event, lanes, pc;
    unsigned short warp;
    Kind kind;
};
struct Cell {
    Access write, read;
};

// Time within a warp: `event` counts its synchronisations and fences. synced[i][j] is the latest event of lane j that
// lane i knows of, directly or through other lanes.
struct WarpClock {
    unsigned event, synced_block, synced[LANES][LANES];
};
WarpClock clocks[MAX_THREADS / LANES];

const unsigned* synced_row(unsigned warp, unsigned lane) {
    static const unsigned nothing[LANES] = {};
    return clocks[warp].synced_block == now.block ? clocks[warp].synced[lane] : nothing;
}

Access this_access(Kind kind, const void* pc) {
    return {now.block, now.epoch, clocks[here.warp].event, 1u << here.lane, unsigned(static_cast<const char*>(pc) - &__ehdr_start), static_cast<unsigned short>(here.warp), kind};
}

// Of a unit with inline PTX, whose barriers are of some threads: who made the accesses of a union of several warps. The
// union's `lanes` is the position here.
struct Member {
    unsigned thread, event;
};
std::vector<std::vector<Member>> crowds;

bool ordered_by_clocks(const Access& a) {
    if (a.warp == SEVERAL_WARPS) {
        for (const Member& m : crowds[a.lanes])
            if (m.thread != now.thread && !asynchronous_knows(m.thread, m.event)) return false;
        return true;
    }
    for (unsigned lanes = a.lanes; lanes; lanes &= lanes - 1)
        if (unsigned thread = a.warp * LANES + __builtin_ctz(lanes); thread != now.thread && !asynchronous_knows(thread, a.event)) return false;
    return true;
}

// Whether program order, a barrier or a __syncwarp orders an access before the running thread's next one.
bool ordered_in_block(const Access& a) {
    if (a.block != now.block) return false;
    if (a.epoch < now.epoch) return true;
    if (asynchronous) return a.epoch == now.epoch && ordered_by_clocks(a);
    if (a.warp != here.warp || a.epoch != now.epoch) return false;
    const unsigned* row = nullptr;
    for (unsigned others = a.lanes & ~(1u << here.lane); others; others &= others - 1) {
        if (!row) row = synced_row(here.warp, here.lane);
        if (a.event >= row[__builtin_ctz(others)]) return false;
    }
    return true;
}

// ---- fences and atomics: a thread that executes a fence and then an atomic on X releases its accesses before the
// fence to any thread that later executes an atomic on X. This is how one block passes results to another.

struct Fenced {
    unsigned block, epoch, row[LANES];
    Scope scope;
};
Fenced fenced[MAX_THREADS];  // by thread: what its last fence covers

struct SyncVariable;
struct Release : Fenced {
    unsigned short warp;
};
// What the releasing thread had itself acquired is released too.
struct Join {
    size_t position;
    SyncVariable* from;
    size_t length;
};
struct SyncVariable {
    std::vector<Release> releases;
    std::unordered_map<unsigned, std::vector<size_t>> by_block;
    std::vector<Join> joins;
};
std::unordered_map<const void*, SyncVariable> sync_variables;
struct Acquired {
    size_t length;
    Access when;
};
std::map<std::pair<SyncVariable*, unsigned>, Acquired> acquired;  // in this block, by variable and thread
unsigned acquired_block;

bool covers(const Release& r, const Access& a) {
    if (r.scope == Scope::block && r.block != now.block) return false;
    if (a.epoch < r.epoch) return true;
    if (a.epoch != r.epoch || a.warp != r.warp) return false;
    for (unsigned lanes = a.lanes; lanes; lanes &= lanes - 1)
        if (a.event >= r.row[__builtin_ctz(lanes)]) return false;
    return true;
}

bool reaches(SyncVariable* variable, size_t length, const Access& a, std::vector<SyncVariable*>& seen) {
    if (std::find(seen.begin(), seen.end(), variable) != seen.end()) return false;
    seen.push_back(variable);
    auto found = variable->by_block.find(a.block);
    if (found != variable->by_block.end())
        for (size_t position : found->second)
            if (position < length && covers(variable->releases[position], a)) return true;
    for (const Join& join : variable->joins)
        if (join.position < length && reaches(join.from, join.length, a, seen)) return true;
    return false;
}

bool ordered_by_fences(const Access& a) {
    if (acquired_block != now.block || a.epoch == NEVER) return false;
    for (auto& [key, value] : acquired) {
        if (!ordered_in_block(value.when)) continue;
        std::vector<SyncVariable*> seen;
        if (reaches(key.first, value.length, a, seen)) return true;
    }
    return false;
}

// Whether an access happens before the running thread's next one: in most cases by a barrier.
inline bool ordered(const Access& a) {
    if (a.kind == NONE || a.block < now.first_block || (a.block == now.block && a.epoch < now.epoch)) return true;
    return ordered_in_block(a) || (!sync_variables.empty() && ordered_by_fences(a));
}

unsigned crowd_of(const Access& old, const Access& latest) {
    unsigned position = old.lanes;
    if (old.warp != SEVERAL_WARPS) {
        position = unsigned(crowds.size());
        crowds.emplace_back();
        for (unsigned lanes = old.lanes; lanes; lanes &= lanes - 1) crowds[position].push_back({old.warp * LANES + __builtin_ctz(lanes), old.event});
    }
    auto& crowd = crowds[position];
    auto same = std::find_if(crowd.begin(), crowd.end(), [](const Member& m) { return m.thread == now.thread; });
    if (same == crowd.end()) crowd.push_back({now.thread, latest.event});
    else same->event = latest.event;
    return position;
}

inline Access merged(const Access& old, Access latest) {
    bool taken_over = old.kind == RELEASING_ATOMIC && latest.kind >= ATOMIC;
    if (taken_over || ordered(old)) return latest;
    if (old.block != latest.block) {
        latest.epoch = NEVER;
        latest.warp = SEVERAL_WARPS;
    } else if (old.warp != latest.warp) {
        latest.lanes = asynchronous ? crowd_of(old, latest) : ~0u;
        latest.warp = SEVERAL_WARPS;
    } else {
        latest.lanes |= old.lanes;
    }
    return latest;
}

// ---- the memory that a launch may access

struct Unmap {
    size_t bytes = 0;
    void operator()(void* memory) const { munmap(memory, bytes); }
};
// Zeros whose pages exist only once touched, so that a tensor with huge strides costs no more than its elements.
template <class T>
using LazyZeros = std::unique_ptr<T[], Unmap>;

template <class T>
LazyZeros<T> lazy_zeros(size_t n) {
    void* memory = mmap(nullptr, n * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        std::fputs("cuda_on_cpu: no memory for the checker\n", stderr);
        std::abort();
    }
    return {static_cast<T*>(memory), Unmap{n * sizeof(T)}};
}

// The cells of tensors, reused from launch to launch. Block numbers mark old cells, which are never cleared.
struct Arena {
    LazyZeros<Cell> cells;
    size_t room = 0, used = 0;
    void reserve(size_t n) {
        if (n > room) {
            room = std::max(n, 2 * room);
            cells.reset();
            cells = lazy_zeros<Cell>(room);
        }
        used = 0;
    }
    Cell* take(size_t n) {
        used += n;
        return cells.get() + used - n;
    }
    void release() {
        cells.reset();
        room = 0;
    }
};
constexpr size_t KEPT_CELLS = 1 << 20;
Arena arena;

enum Byte : unsigned char { VALID = 1, WRITABLE = 2 };

struct Region {
    char* begin = nullptr;
    size_t bytes = 0;
    unsigned grain_bits = 0;  // a cell stands for 1 << grain_bits bytes
    Cell* cells = nullptr;    // null if no one writes here, so that there can be no race
    bool writable = true;
    LazyZeros<unsigned char> map;          // of Byte, if some bytes of the span are not valid
    std::unique_ptr<Cell[]> own_cells;     // for shared arrays, and tensors accessed by parts of an element
    const char* shared_name = nullptr;
};
std::vector<Region> tensors;
std::vector<View> views;

struct SharedArray {
    ptrdiff_t from_anchor;
    long long bytes;   // -1: the dynamic array, whose size the launch sets
    std::string name;  // empty: the compiler's guard of an array's constructor
    Region region;
};
std::vector<SharedArray> shared_arrays;  // by address
thread_local char anchor;                // shared arrays are thread-local too, so their offsets from here are constant

size_t cell_count(const Region& r) { return (r.bytes + (size_t(1) << r.grain_bits) - 1) >> r.grain_bits; }

// Split the cells of a region into smaller ones, because an access covers part of an element.
void refine(Region& r, unsigned bits) {
    size_t n = (r.bytes >> bits) + 1;
    std::unique_ptr<Cell[]> fine(new Cell[n]());
    for (size_t i = 0; i << bits < r.bytes; i++) fine[i] = r.cells[(i << bits) >> r.grain_bits];
    r.own_cells = std::move(fine);
    r.cells = r.own_cells.get();
    r.grain_bits = bits;
}

void mark(unsigned char* map, const View& v, long long dimension, size_t offset, unsigned char bits) {
    if (dimension == v.dimensions) {
        for (long long i = 0; i < v.element_bytes; i++) map[offset + i] |= bits;
        return;
    }
    bool repeats = v.strides[dimension] == 0;
    for (long long i = 0; i < (repeats ? 1 : v.sizes[dimension]); i++)
        mark(map, v, dimension + 1, offset + size_t(i * v.strides[dimension] * v.element_bytes), bits);
}

bool dense(const View& v) {
    size_t elements = 1;
    for (long long d = 0; d < v.dimensions; d++)
        if (v.strides[d]) elements *= size_t(v.sizes[d]);
    return elements * size_t(v.element_bytes) == v.bytes;
}

// Build the regions. Tensors that overlap, as views of one storage may, share a region.
void build_regions() {
    std::vector<const View*> sorted;
    for (const View& v : views)
        if (v.bytes) sorted.push_back(&v);
    std::sort(sorted.begin(), sorted.end(), [](const View* a, const View* b) { return a->begin < b->begin; });
    size_t total = 0;
    for (size_t i = 0, end; i < sorted.size(); i = end) {
        Region r;
        r.begin = sorted[i]->begin;
        char* last = r.begin + sorted[i]->bytes;
        for (end = i + 1; end < sorted.size() && sorted[end]->begin < last; end++) last = std::max(last, sorted[end]->begin + sorted[end]->bytes);
        r.bytes = size_t(last - r.begin);
        r.writable = false;
        bool uniform = true;
        unsigned long long grain = 1 << 4;
        for (size_t k = i; k < end; k++) {
            const View& v = *sorted[k];
            uniform &= v.bytes == r.bytes && dense(v);
            r.writable |= v.writable != 0;
            grain |= (unsigned long long)v.element_bytes | (unsigned long long)(v.begin - r.begin);
        }
        r.grain_bits = unsigned(__builtin_ctzll(grain));
        if (!uniform) {
            r.map = lazy_zeros<unsigned char>(r.bytes);
            for (size_t k = i; k < end; k++) mark(r.map.get(), *sorted[k], 0, size_t(sorted[k]->begin - r.begin), sorted[k]->writable ? VALID | WRITABLE : VALID);
        }
        if (r.writable) total += cell_count(r);
        tensors.push_back(std::move(r));
    }
    arena.reserve(total);
    for (Region& r : tensors)
        if (r.writable) r.cells = arena.take(cell_count(r));
}

// ---- faults. Python replaces {argument N} by the tensor's description.

std::string tensor_name(const View& v) { return "{argument " + std::to_string(v.argument) + "}"; }

std::string name_of(const Region& r, const char* address) {
    if (r.shared_name) return std::string("shared array ") + r.shared_name;
    for (const View& v : views)
        if (address >= v.begin && address < v.begin + v.bytes) return tensor_name(v);
    return "the tensors";
}

constexpr size_t NEARBY = 1 << 16;  // bytes between an access and a second tensor that its report names

[[noreturn]] void fail_outside(const char* address, unsigned bytes, bool write, const void* pc) {
    const char* verb = write ? "write" : "read";
    if (size_t(address) < 4096) fail(OUT_OF_BOUNDS, {}, pc, "%s of %u bytes through a null pointer", verb, bytes);
    // The kernel's pointer is unknown here, so the next nearest tensor may be the one that it meant. Where the host has
    // placed a shared array beside a tensor says nothing: on a GPU, they are in different memories.
    struct Place {
        size_t distance;
        bool shared;
        std::string description;
    };
    std::vector<Place> places;
    auto consider = [&](const char* begin, size_t size, bool shared, const std::string& what) {
        const bool past = address >= begin + size;
        const size_t distance = past ? size_t(address - begin - size) : size_t(begin - address);
        if (distance >= size_t(1) << 30) return;
        const std::string offset = distance || !past ? std::to_string(distance) + " bytes " : "just ";
        places.push_back({distance, shared, offset + (past ? "past the end of " : "before ") + what});
    };
    // A kernel rarely writes through a pointer to const.
    const bool to_writable = write && std::any_of(views.begin(), views.end(), [](const View& v) { return v.writable; });
    for (const View& v : views)
        if (v.writable || !to_writable) consider(v.begin, v.bytes, false, tensor_name(v));
    for (const SharedArray& s : shared_arrays)
        if (!s.name.empty()) consider(s.region.begin, s.region.bytes, true, "shared array " + s.name);
    if (places.empty()) fail(OUT_OF_BOUNDS, {}, pc, "%s of %u bytes at %p, far from every tensor of this launch", verb, bytes, static_cast<const void*>(address));
    std::stable_sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.distance < b.distance; });
    std::string where = places[0].description;
    if (places.size() > 1 && places[1].distance < NEARBY && places[1].shared == places[0].shared) where += ", or " + places[1].description;
    fail(OUT_OF_BOUNDS, {}, pc, "%s of %u bytes, %s", verb, bytes, where.c_str());
}

[[noreturn]] void fail_race(const Region& r, size_t at, bool write, const Access& other, const char* did, const void* pc) {
    fault.other_pc = other.pc;
    char who[96];
    unsigned block = other.block - now.first_block;
    if (other.epoch == NEVER) std::snprintf(who, sizeof who, "threads of several blocks");
    else if (other.warp == SEVERAL_WARPS) std::snprintf(who, sizeof who, "several threads of block %u", block);
    else std::snprintf(who, sizeof who, "thread %u of block %u", other.warp * LANES + __builtin_ctz(other.lanes), block);
    const char* missing = other.block == now.block ? "no barrier" : "no fence and atomic";
    fail(RACE, {}, pc, "%s at byte %zu of %s, which %s %s{other}, with %s between", write ? "write" : "read", at, name_of(r, r.begin + at).c_str(), who, did, missing);
}

struct Pending {
    bool is;
    unsigned thread, bytes;
    const void* pc;
    const Region* region;
    size_t at;
} pending;

// ---- the check of one access

void check(Region& r, size_t at, unsigned bytes, bool write, Kind kind, const void* pc) {
    const char* verb = write ? "write" : "read";
    if (at + bytes > r.bytes)
        fail(OUT_OF_BOUNDS, {}, pc, "%s of %u bytes, of which the last %zu are past the end of %s", verb, bytes, at + bytes - r.bytes, name_of(r, r.begin + at).c_str());
    if (r.map) {
        unsigned char all = VALID | WRITABLE;
        for (unsigned i = 0; i < bytes; i++) all &= r.map[at + i];
        if (!(all & VALID)) fail(OUT_OF_BOUNDS, {}, pc, "%s of %u bytes in a gap between the elements of %s", verb, bytes, name_of(r, r.begin + at).c_str());
        if (write && !(all & WRITABLE)) fail(OUT_OF_BOUNDS, {}, pc, "write of %u bytes to %s through a pointer that should be const", bytes, name_of(r, r.begin + at).c_str());
    } else if (write && !r.writable) {
        fail(OUT_OF_BOUNDS, {}, pc, "write of %u bytes to %s, which the kernel takes as a pointer to const", bytes, name_of(r, r.begin + at).c_str());
    }
    if (!r.cells) return;
    if ((at | bytes) & ((1u << r.grain_bits) - 1)) refine(r, unsigned(__builtin_ctzll(at | bytes)));

    Access latest = this_access(kind, pc);
    size_t last = (at + bytes - 1) >> r.grain_bits;
    for (size_t i = at >> r.grain_bits; i <= last; i++) {
        Cell& c = r.cells[i];
        if (r.shared_name && c.write.block != now.block) {
            if (c.read.block != now.block) c.read = {};
            c.write = {};
            if ((!write || kind >= ATOMIC) && !pending.is) pending = {true, now.thread, bytes, pc, &r, i << r.grain_bits};
        }
        if (!(kind >= ATOMIC && c.write.kind >= ATOMIC) && !ordered(c.write)) fail_race(r, i << r.grain_bits, write, c.write, "wrote", pc);
        if (write) {
            if (!ordered(c.read)) fail_race(r, i << r.grain_bits, write, c.read, "read", pc);
            c.write = merged(c.write, latest);
        } else {
            c.read = merged(c.read, latest);
        }
    }
}

Region* shared_at(const char* p) {
    static size_t last = 0;  // most accesses are to the same array as the one before
    for (size_t n = shared_arrays.size(), k = 0; k < n; k++, last = last + 1 < n ? last + 1 : 0)
        if (Region& r = shared_arrays[last].region; size_t(p - r.begin) < r.bytes) return &r;
    return nullptr;
}

bool in_this_object(const char* p) { return p >= &__ehdr_start && p < &_end; }

inline void touch(const void* address, size_t bytes, bool write, Kind kind, const void* pc) {
    if (!now.checking) return;
    now.last_access = pc;
    char* p = const_cast<char*>(static_cast<const char*>(address));
    if (on_fiber_stack(p)) return;  // as most accesses are
    for (Region& r : tensors)
        if (size_t(p - r.begin) < r.bytes) return check(r, size_t(p - r.begin), unsigned(bytes), write, kind, pc);
    if (in_this_object(p)) return;
    if (Region* r = shared_at(p)) {
        if (asynchronous || copying) asynchronous_access(p, unsigned(bytes), write, pc);
        return check(*r, size_t(p - r->begin), unsigned(bytes), write, kind, pc);
    }
    fail_outside(p, unsigned(bytes), write, pc);
}

}  // namespace

void checker_begin_launch(const long long* words, size_t dynamic_shared_bytes) {
    tensors.clear();
    views.clear();
    sync_variables.clear();
    acquired.clear();
    pending = {};
    const long long* w = words + 1;
    for (long long i = 0; i < words[0]; i++) {
        View v{reinterpret_cast<char*>(w[1]), 0, w[0], w[2], w[3], w[4], w + 5, w + 5 + w[4]};
        long long reach = 1;
        for (long long d = 0; d < v.dimensions; d++) reach = v.sizes[d] && reach ? reach + (v.sizes[d] - 1) * v.strides[d] : 0;
        v.bytes = size_t(reach * v.element_bytes);
        views.push_back(v);
        w += 5 + 2 * v.dimensions;
    }
    build_regions();
    for (SharedArray& s : shared_arrays) {
        Region& r = s.region;
        r.begin = &anchor + s.from_anchor;
        size_t bytes = s.bytes < 0 ? dynamic_shared_bytes : size_t(s.bytes);
        r.shared_name = s.name.c_str();
        if (s.name.empty()) {
            r.bytes = bytes;
            continue;
        }
        if (!r.own_cells) r.grain_bits = 2;
        if (!r.own_cells || bytes > r.bytes) r.own_cells.reset(new Cell[(bytes >> r.grain_bits) + 1]());
        r.bytes = bytes;
        r.cells = r.own_cells.get();
    }
}

void checker_end_launch() {
    if (arena.room > KEPT_CELLS) arena.release();
}

void checker_forget() {
    arena.release();
    for (SharedArray& s : shared_arrays) s.region.own_cells.reset();
    for (WarpClock& c : clocks) c.synced_block = 0;
    for (Fenced& f : fenced) f.block = 0;
    asynchronous_forget();
}

void checker_begin_block() {
    crowds.clear();
    for (unsigned w = 0; w * LANES < now.threads; w++) clocks[w].event = 0;
    if (!acquired.empty()) acquired.clear();
}

void checker_settle() {
    if (!pending.is) return;
    pending.is = false;
    run_as(pending.thread);
    fail(UNINITIALISED_SHARED, {}, pending.pc, "read of %u bytes at byte %zu of shared array %s, which nothing in this block has written", pending.bytes, pending.at, pending.region->shared_name);
}

void checker_sync_warp(unsigned mask) {
    WarpClock& c = clocks[here.warp];
    if (c.synced_block != now.block) {
        std::memset(c.synced, 0, sizeof c.synced);
        c.synced_block = now.block;
    }
    unsigned joined[LANES] = {}, event = ++c.event;
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
        const unsigned* row = c.synced[__builtin_ctz(lanes)];
        for (unsigned k = 0; k < LANES; k++) joined[k] = std::max(joined[k], row[k]);
    }
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) joined[__builtin_ctz(lanes)] = event;
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) std::memcpy(c.synced[__builtin_ctz(lanes)], joined, sizeof joined);
    if (asynchronous) asynchronous_sync_warp(mask);
}

unsigned& warp_event(unsigned warp) { return clocks[warp].event; }

char* shared_memory_begin() {
    static thread_local char* begin = nullptr;  // each thread of the host has shared arrays of its own
    if (!begin) {
        size_t least = ~size_t(0);
        for (const SharedArray& s : shared_arrays) least = std::min(least, size_t(&anchor + s.from_anchor));
        begin = reinterpret_cast<char*>(least / 1024 * 1024);
    }
    return begin;
}

bool inside_shared(const char* p, size_t bytes) {
    Region* r = shared_at(p);
    return r && size_t(p - r->begin) + bytes <= r->bytes;
}

void access_shared(const char* p, unsigned bytes, bool write, const void* pc) { touch(p, bytes, write, PLAIN, pc); }

void mark_written(const char* p, unsigned bytes) {
    Region* r = shared_at(p);
    if (!r || !r->cells) return;
    size_t at = size_t(p - r->begin), last = (at + bytes - 1) >> r->grain_bits;
    for (size_t i = at >> r->grain_bits; i <= last; i++) {
        r->cells[i] = {};
        r->cells[i].write.block = now.block;
    }
}

void fault_beside(const void* pc) { fault.other_pc = pc ? size_t(static_cast<const char*>(pc) - &__ehdr_start) : 0; }

void memory_fence(Scope scope) {
    if (!now.checking) return;
    Fenced& f = fenced[now.thread];
    f.block = now.block;
    f.epoch = now.epoch;
    f.scope = scope;
    std::memcpy(f.row, synced_row(here.warp, here.lane), sizeof f.row);
    f.row[here.lane] = ++clocks[here.warp].event;
}

void before_atomic(const void* address, unsigned bytes, const void* pc) {
    if (size_t(address) % bytes) fail(MISALIGNED, {}, pc, "atomic operation on %u bytes at an address that is not a multiple of %u", bytes, bytes);
    if (!now.checking) return;
    bool releases = fenced[now.thread].block == now.block;
    auto found = sync_variables.find(address);
    if (found == sync_variables.end() && releases) found = sync_variables.try_emplace(address).first;
    touch(address, bytes, true, releases ? RELEASING_ATOMIC : ATOMIC, pc);
    if (found == sync_variables.end()) return;
    SyncVariable* variable = &found->second;
    if (releases) {
        size_t position = variable->releases.size();
        for (auto& [key, value] : acquired)
            if (key.first != variable && ordered_in_block(value.when)) variable->joins.push_back({position, key.first, value.length});
        Release release;
        static_cast<Fenced&>(release) = fenced[now.thread];
        release.warp = static_cast<unsigned short>(here.warp);
        variable->releases.push_back(release);
        variable->by_block[now.block].push_back(position);
    }
    acquired_block = now.block;
    acquired[{variable, now.thread}] = {variable->releases.size(), this_access(ATOMIC, pc)};
}

}  // namespace fourfold

using namespace fourfold;

FOURFOLD_EXPORT void fourfold_add_shared(ptrdiff_t from_anchor, long long bytes, const char* name) { shared_arrays.push_back({from_anchor, bytes, name, {}}); }

// gcc's -fsanitize=thread calls these at each access. They are hidden, so the calls are direct.
#define ON_ACCESS(n)                                                                                                            \
    extern "C" void __tsan_read##n(void* p) { touch(p, n, false, PLAIN, __builtin_return_address(0)); }                    \
    extern "C" void __tsan_write##n(void* p) { touch(p, n, true, PLAIN, __builtin_return_address(0)); }
ON_ACCESS(1)
ON_ACCESS(2)
ON_ACCESS(4)
ON_ACCESS(8)
ON_ACCESS(16)
extern "C" void __tsan_read_range(void* p, size_t n) {
    if (n) touch(p, n, false, PLAIN, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* p, size_t n) {
    if (n) touch(p, n, true, PLAIN, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}

// gcc's -fsanitize-coverage=trace-pc calls this at the head of each block of instructions: a byte for each address, which
// is not 0 where a call has returned to.
static char* reached;
extern "C" void __sanitizer_cov_trace_pc() {
    if (!reached) reached = static_cast<char*>(std::calloc(&_end - &__ehdr_start, 1));
    if (reached) reached[static_cast<char*>(__builtin_return_address(0)) - &__ehdr_start] = 1;
}
FOURFOLD_EXPORT int fourfold_reached(size_t address) { return reached && address < size_t(&_end - &__ehdr_start) && reached[address]; }

// The build redirects the kernel's calls of memcpy, memmove and memset to these.
extern "C" void* fourfold_memcpy(void* to, const void* from, size_t n) {
    if (n) touch(from, n, false, PLAIN, __builtin_return_address(0));
    if (n) touch(to, n, true, PLAIN, __builtin_return_address(0));
    return std::memmove(to, from, n);
}
extern "C" void* fourfold_memmove(void* to, const void* from, size_t n) __attribute__((alias("fourfold_memcpy")));
extern "C" void* fourfold_memset(void* to, int value, size_t n) {
    if (n) touch(to, n, true, PLAIN, __builtin_return_address(0));
    return std::memset(to, value, n);
}

// -fsanitize=bounds and others call these. Their first argument begins with the place in the source.
struct Place {
    const char* file;
    unsigned line, column;
};
struct Type {
    unsigned short kind, info;
    char name[];  // in quotes
};
struct IndexPlace : Place {
    const Type *array, *index;
};
struct MismatchPlace : Place {
    const Type* type;
    unsigned char log_alignment, check;
};
#define ON_UNDEFINED(name, kind, text) \
    extern "C" void __ubsan_handle_##name##_abort(const Place* p) { fail(kind, {p->file, p->line}, nullptr, text); }
extern "C" void __ubsan_handle_out_of_bounds_abort(const IndexPlace* p, size_t index) {
    fail(OUT_OF_BOUNDS, {p->file, p->line}, nullptr, "index %lld is outside the array, of type %s", static_cast<long long>(index), p->array->name);
}
ON_UNDEFINED(shift_out_of_bounds, UNDEFINED_ARITHMETIC, "shift by a negative count or by more bits than the type has")
ON_UNDEFINED(divrem_overflow, UNDEFINED_ARITHMETIC, "integer division by zero, or its overflow")
ON_UNDEFINED(add_overflow, UNDEFINED_ARITHMETIC, "signed integer overflow in an addition")
ON_UNDEFINED(sub_overflow, UNDEFINED_ARITHMETIC, "signed integer overflow in a subtraction")
ON_UNDEFINED(mul_overflow, UNDEFINED_ARITHMETIC, "signed integer overflow in a multiplication")
ON_UNDEFINED(negate_overflow, UNDEFINED_ARITHMETIC, "signed integer overflow in a negation")
ON_UNDEFINED(float_cast_overflow, UNDEFINED_ARITHMETIC, "conversion of a float to an integer type that cannot hold it")
extern "C" void __ubsan_handle_type_mismatch_v1_abort(const MismatchPlace* p, size_t address) {
    size_t alignment = size_t(1) << p->log_alignment;
    if (!address) fail(OUT_OF_BOUNDS, {p->file, p->line}, nullptr, "access through a null pointer");
    if (address % alignment) fail(MISALIGNED, {p->file, p->line}, nullptr, "access at an address that is not a multiple of %zu, as its type needs", alignment);
    fail(OUT_OF_BOUNDS, {p->file, p->line}, nullptr, "access to %s outside the array or variable that the pointer points to", p->type->name);
}
