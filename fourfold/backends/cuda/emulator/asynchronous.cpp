// What runs beside a block's threads: mbarriers, the copy engine (TMA), cp.async and wgmma.
//
// A copy into shared memory lands as late as it can: one of the copy engine when no thread can go on without it, one of a
// thread (cp.async) when the thread waits for its group. Such a copy is a write of its thread, which the checker orders
// like any other, so that a unit with no other asynchronous work needs no clocks. wgmma's registers hold poison
// until its group is waited for. Every access to shared memory is checked against both: who reads what has not landed,
// or has landed without a wait on its mbarrier, and who writes what is still being read, is reported.
//
// What orders accesses is kept in vector clocks: known[t][u] is the event of thread u up to which thread t knows u's
// accesses, and after the threads come the phases of the mbarriers. proxied[t] says the same of what the asynchronous
// proxy, which copies and multiplies, may see: fence.proxy.async brings it up to known[t].
#include "internal.h"
#include "ptx.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fourfold {

bool asynchronous = false, copying = false;

namespace {

constexpr unsigned MAX_MBARRIERS = 256, GRANULE = 16, WARPGROUP = 128, WINDOW = 1024;

// ---- vector clocks

using Clock = std::vector<unsigned>;
std::vector<Clock> known, proxied;

void join(Clock& into, const Clock& from) {
    for (size_t i = 0; i < into.size(); i++) into[i] = std::max(into[i], from[i]);
}

// What the running thread did so far gets a number that others can learn.
void new_event() {
    known[now.thread][now.thread] = ++warp_event(here.warp);
}

bool knows(unsigned thread, unsigned other, unsigned event) { return thread == other || event < known[thread][other]; }

// Work in groups: what is not committed, and the groups that are.
template <class T> struct Groups {
    std::vector<T> open;
    std::deque<std::vector<T>> committed;

    bool empty() const { return open.empty() && committed.empty(); }
    void commit() {
        committed.push_back(std::move(open));
        open.clear();
    }
    // Finishes all groups but the last `pending`.
    template <class F> void wait(unsigned pending, F finish) {
        for (; committed.size() > pending; committed.pop_front())
            for (T& one : committed.front()) finish(one);
    }
};

// ---- shared memory, in granules of 16 bytes

struct Writer {
    unsigned thread, event, bytes;  // a bit for each byte of the granule
    const void* pc;
};
struct Reader {
    unsigned thread, event;
    bool warp;  // any lane of the thread's warp stands for it
};
struct Granule {
    unsigned block = 0;
    std::vector<Writer> writers;
    std::vector<Reader> readers;
    int barrier = -1;           // of the copy that has landed here last
    unsigned phase = 0;
    unsigned arriving = 0;      // a bit for each byte to which a copy is under way
    unsigned reading = 0;       // reads from here that are under way
    const char *awaited = nullptr, *reader = nullptr;
    bool written = false;
    const void* pc = nullptr;   // of the copy or the read under way
};
std::vector<Granule> granules;

Granule& granule(size_t address) {
    if (address / GRANULE >= granules.size()) granules.resize(address / GRANULE + 1);
    Granule& g = granules[address / GRANULE];
    if (g.block != now.block) {
        g.writers.clear();
        g.readers.clear();
        g.barrier = -1;
        g.arriving = g.reading = 0;
        g.written = false;
        g.block = now.block;
    }
    return g;
}

// A bit for each byte of [address, address + bytes) in the granule at `a`.
unsigned bytes_in(size_t a, size_t address, size_t bytes) {
    size_t begin = std::max(a, address) - a, end = std::min(a + GRANULE, address + bytes) - a;
    return unsigned((1ull << end) - (1ull << begin));
}

char* window() { return shared_memory_begin() - WINDOW; }

char* checked_shared(unsigned address, size_t bytes, const char* what, const void* pc) {
    char* p = window() + address;
    if (now.checking && !inside_shared(p, bytes))
        fail(OUT_OF_BOUNDS, {}, pc, "%s of %zu bytes at shared address %u, outside of every shared array", what, bytes, address);
    return p;
}

// Whether the running thread may let the asynchronous proxy use what was written here: read it, which takes a fence, or
// write over it.
void check_writers(const Granule& g, unsigned address, bool reads, const char* what, const void* pc) {
    for (const Writer& w : g.writers) {
        if (!knows(now.thread, w.thread, w.event)) {
            fault_beside(w.pc);
            fail(RACE, {}, pc, "%s shared address %u, which thread %u wrote{other}, with no barrier between", what, address, w.thread);
        }
        if (reads && w.event >= proxied[now.thread][w.thread]) {
            fault_beside(w.pc);
            fail(RACE, {}, pc, "%s shared address %u, which thread %u wrote{other}, with no fence.proxy.async between", what, address, w.thread);
        }
    }
}

void check_landed(const Granule& g, unsigned thread, unsigned address, const char* what, const void* pc, unsigned bytes = 0xffff) {
    if (g.arriving & bytes) {
        fault_beside(g.pc);
        fail(RACE, {}, pc, "%s shared address %u before the copy to it has landed{other}: no wait %s", what, address, g.awaited);
    }
    if (g.barrier >= 0 && g.phase >= known[thread][now.threads + unsigned(g.barrier)]) {
        fault_beside(g.pc);
        fail(RACE, {}, pc, "%s shared address %u, to which a copy was made{other}, without a wait on its mbarrier's phase", what, address);
    }
}

void check_not_read(const Granule& g, unsigned address, const char* what, const void* pc) {
    if (g.reading) {
        fault_beside(g.pc);
        fail(RACE, {}, pc, "%s shared address %u, which %s still reads{other}: no wait for its group", what, address, g.reader);
    }
    for (const Reader& r : g.readers) {
        bool is_known = knows(now.thread, r.thread, r.event);
        for (unsigned u = r.thread / LANES * LANES; r.warp && !is_known && u < now.threads && u / LANES == r.thread / LANES; u++)
            is_known = knows(now.thread, u, r.event);
        if (!is_known) fail(RACE, {}, pc, "%s shared address %u, which thread %u has read, with no barrier between", what, address, r.thread);
    }
}

// The asynchronous proxy reads [address, address + bytes) for the running thread.
void read_by_proxy(unsigned address, unsigned bytes, const char* who, const char* what, const void* pc) {
    for (unsigned a = address / GRANULE * GRANULE; a < address + bytes; a += GRANULE) {
        Granule& g = granule(a);
        check_landed(g, now.thread, a, what, pc);
        check_writers(g, a, true, what, pc);
        g.reading++;
        g.reader = who;
        g.pc = pc;
    }
}

void reading_ends(unsigned address, unsigned bytes, unsigned thread, bool of_warpgroup) {
    for (unsigned a = address / GRANULE * GRANULE; a < address + bytes; a += GRANULE) {
        Granule& g = granule(a);
        if (g.reading) g.reading--;
        for (unsigned w = 0; w < (of_warpgroup ? WARPGROUP / LANES : 1); w++) {
            Reader r{thread + w * LANES, warp_event(thread / LANES + w), of_warpgroup};
            auto same = std::find_if(g.readers.begin(), g.readers.end(), [&](const Reader& o) { return o.thread == r.thread && o.warp == r.warp; });
            if (same == g.readers.end()) g.readers.push_back(r);
            else same->event = r.event;
        }
    }
}

// ---- mbarriers

struct MBarrier {
    unsigned index = 0, expected = 0, arrivals = 0, phase = 0, owner = 0, event = 0;
    long long bytes = 0;
    bool fenced = false;  // seen by the asynchronous proxy
    Clock gathered, gathered_proxied, completed, completed_proxied;
};
std::map<unsigned, MBarrier> mbarriers;
unsigned mbarriers_so_far;  // in this block

MBarrier& mbarrier(unsigned address, const void* pc) {
    if (address % 8) fail(MISALIGNED, {}, pc, "an mbarrier at shared address %u, which is not a multiple of 8", address);
    auto found = mbarriers.find(address);
    if (found == mbarriers.end()) fail(UNINITIALISED_SHARED, {}, pc, "no mbarrier has been initialised at shared address %u", address);
    MBarrier& b = found->second;
    if (now.checking && !knows(now.thread, b.owner, b.event))
        fail(RACE, {}, pc, "the mbarrier at shared address %u was initialised by thread %u, with no barrier between", address, b.owner);
    return b;
}

void check_no_mbarrier(unsigned address, unsigned bytes, const char* what, const void* pc) {
    auto past = mbarriers.lower_bound(address > 7 ? address - 7 : 0);
    if (past != mbarriers.end() && past->first < address + bytes)
        fail(OUT_OF_BOUNDS, {}, pc, "%s %u bytes to shared address %u, over the mbarrier at %u", what, bytes, address, past->first);
}

void complete_phase(MBarrier& b) {
    if (b.arrivals || b.bytes) return;
    b.phase++;
    b.arrivals = b.expected;
    if (now.checking) {
        b.completed = b.gathered;
        b.completed[now.threads + b.index] = b.phase;
        b.completed_proxied = b.gathered_proxied;
    }
    wake_on(&b);
}

void gather(MBarrier& b) {
    if (!now.checking) return;
    new_event();
    join(b.gathered, known[now.thread]);
    join(b.gathered_proxied, proxied[now.thread]);
}

bool wait_on(unsigned address, bool try_, const void* pc, bool (*over)(const MBarrier&, unsigned long long), unsigned long long which) {
    MBarrier& b = mbarrier(address, pc);
    while (!over(b, which)) {
        if (!try_) {
            yield_thread(pc);
            if (!over(b, which)) return false;
            break;
        }
        park_on(&b, pc);
    }
    if (now.checking && b.phase) {
        join(known[now.thread], b.completed);
        join(proxied[now.thread], b.completed_proxied);
    }
    return true;
}

// ---- copies

struct Map {  // tensor_map.py packs it
    unsigned long long mark;
    char* address;
    long long planes, rows, columns, plane_bytes, row_bytes;
    unsigned dimensions, box_planes, box_rows, box_columns, element_bytes, swizzle;

    bool holds(long long plane, long long row, long long column) const {
        return plane >= 0 && plane < planes && row >= 0 && row < rows && column >= 0 && column < columns;
    }
    char* at(long long plane, long long row, long long column) const {
        return address + plane * plane_bytes + row * row_bytes + column * element_bytes;
    }
};
constexpr unsigned long long MAP_MARK = 0x70616d726f736e74;

const Map& as_map(const void* given, const ptx::Start& start, const void* pc) {
    const Map* map = static_cast<const Map*>(given);
    if (map->mark != MAP_MARK) fail(OUT_OF_BOUNDS, {}, pc, "what is passed as a tensor map is none");
    if (map->dimensions != unsigned(start.dimensions))
        fail(OUT_OF_BOUNDS, {}, pc, "a bulk copy of %d dimensions by the map of a tensor of %u", start.dimensions, map->dimensions);
    return *map;
}

unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// Calls of each 16 bytes of a box: the shared address, and the plane, row and column in the tensor.
template <class F> void each_chunk(const Map& map, unsigned shared, const ptx::Start& start, F each) {
    unsigned line = map.box_columns * map.element_bytes;
    long long plane = start.dimensions > 2 ? start.at[2] : 0, row = start.at[1], column = start.at[0];
    for (unsigned i = 0; i < map.box_planes * map.box_rows; i++)
        for (unsigned at = 0; at < line; at += GRANULE) {
            unsigned address = shared + i * line + at;
            each(map.swizzle ? swizzled(address) : address, plane + i / map.box_rows, row + i % map.box_rows, column + at / map.element_bytes);
        }
}

unsigned box_bytes(const Map& map) { return map.box_planes * map.box_rows * map.box_columns * map.element_bytes; }

struct Transfer {
    Map map;
    unsigned to, barrier;
    ptx::Start start;
    const void* pc;
};
std::deque<Transfer> transfers;

void land(const Transfer& t) {
    MBarrier& b = mbarriers.at(t.barrier);
    each_chunk(t.map, t.to, t.start, [&](unsigned address, long long plane, long long row, long long column) {
        char chunk[GRANULE] = {};
        for (unsigned e = 0; e * t.map.element_bytes < GRANULE; e++)
            if (t.map.holds(plane, row, column + e))
                std::memcpy(chunk + e * t.map.element_bytes, t.map.at(plane, row, column + e), t.map.element_bytes);
        std::memcpy(window() + address, chunk, GRANULE);
        if (!now.checking) return;
        mark_written(window() + address, GRANULE);
        Granule& g = granule(address);
        g.arriving = 0;
        g.written = true;
        g.barrier = int(b.index);
        g.phase = b.phase;
        g.pc = t.pc;
    });
    b.bytes -= box_bytes(t.map);
    complete_phase(b);
}

struct Range {
    unsigned address, bytes;
};
std::vector<Groups<Range>> bulk_reads;  // by thread: of copies from shared memory
const void* last_bulk_pc;  // of the last copy from shared memory

// A copy of a thread, with zeros after what it reads.
struct Copy {
    unsigned to, bytes, read;
    const void *from, *pc;
};
struct Copies {
    unsigned block = 0;
    Groups<Copy> groups;
} copies[MAX_THREADS];

Groups<Copy>& own_copies() {
    Copies& own = copies[now.thread];
    if (own.block != now.block) own = {now.block, {}};
    return own.groups;
}

void land(const Copy& c) {
    if (now.checking) {
        for (unsigned a = c.to / GRANULE * GRANULE; a < c.to + c.bytes; a += GRANULE) granule(a).arriving &= ~bytes_in(a, c.to, c.bytes);
        access_shared(window() + c.to, c.bytes, true, c.pc);
    }
    std::memset(window() + c.to, 0, c.bytes);
    std::memcpy(window() + c.to, c.from, c.read);
}

// ---- wgmma

struct Accumulator {
    unsigned columns, pending;
    std::vector<void*> registers;  // [thread of the warpgroup][register]
    std::vector<char> values;      // [64][columns], of 4 bytes

    char* value(unsigned row, unsigned column) { return &values[(row * columns + column) * 4]; }
};
// A variable whose value wgmma takes as a register of a.
struct Taken {
    const void* place;
    unsigned thread, value;
};
struct Multiplication {
    std::vector<Range> reads;
    Accumulator* accumulator;
    std::vector<Taken> taken;
    const void* pc;
};
struct Rendezvous {
    const void* pc;
    const char* what;
    unsigned pending, columns;
    ptx::Elements elements;
    bool add, a_transposed, b_transposed;
    int a_sign, b_sign;
    void* const* d;
    const unsigned* a_registers;  // null: a is in shared memory
    const void* const* a_places;
    unsigned long long a, b;
    const char* frame = nullptr;  // of a wait: variables below it no longer exist
};
struct Warpgroup {
    unsigned arrived = 0, round = 0;
    Rendezvous slots[WARPGROUP];
    bool fenced = false;
    Groups<Multiplication> groups;
    std::vector<std::unique_ptr<Accumulator>> accumulators;
};
std::vector<Warpgroup> warpgroups;

// The last thread to come has waited for the copy's phase, or it is reported; so must each warp of its warpgroup have.
void check_all_warps_waited(const Granule& g, unsigned address, const void* pc) {
    if (g.barrier < 0 || g.arriving) return;
    unsigned first = now.thread / WARPGROUP * WARPGROUP, component = now.threads + unsigned(g.barrier);
    for (unsigned warp = 0; warp < WARPGROUP / LANES; warp++) {
        unsigned lane = 0;
        while (lane < LANES && known[first + warp * LANES + lane][component] <= g.phase) lane++;
        if (lane == LANES) check_landed(g, first + warp * LANES, address, "wgmma reads", pc);
    }
}

// The values of float16, or null for other elements.
const float* halves_of(ptx::Elements elements) { return elements == ptx::Elements::FLOAT16 ? half_values() : nullptr; }

// Converts two bytes: an element, or two of int8.
void convert(unsigned bits, const float* halves, float* out, unsigned) {
    unsigned whole = bits << 16;
    std::memcpy(out, &whole, sizeof *out);
    if (halves) *out = halves[bits];
}
void convert(unsigned bits, const float*, unsigned* out, unsigned apart) {
    for (unsigned e = 0; e < 2; e++) out[e * apart] = unsigned(static_cast<signed char>(bits >> e * 8));
}

// Terms in 32 bytes of elements that are summed as T.
template <class T> constexpr unsigned TERMS = std::is_same_v<T, float> ? 16 : 32;

// Reads `lines` x 32 bytes by a descriptor of the swizzle of 128 bytes, to out[TERMS][lines].
template <class T>
void read_matrix(unsigned long long descriptor, unsigned lines, bool transposed, ptx::Elements elements, T* out, Multiplication& m, const void* pc) {
    unsigned start = unsigned(descriptor & 0x3fff) << 4, leading = unsigned(descriptor >> 16 & 0x3fff) << 4, stride = unsigned(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) fail(OUT_OF_BOUNDS, {}, pc, "wgmma with another swizzle than that of 128 bytes is not emulated");
    const float* halves = halves_of(elements);
    // The pairs of bytes that are adjacent in memory go in chunks of 8.
    unsigned outer = transposed ? 16 : lines, inner = transposed ? lines : 16;
    for (unsigned i = 0; i < outer; i++)
        for (unsigned j = 0; j < inner; j += 8) {
            unsigned linear = start + i / 8 * stride + i % 8 * 128 + j / 64 * leading + j % 64 * 2;
            unsigned address = swizzled(linear) & ~15u;
            char* from = checked_shared(address, GRANULE, "wgmma's read", pc);
            if (linear & 15) fail(MISALIGNED, {}, pc, "wgmma reads at shared address %u, which is not a multiple of 16", linear);
            if (now.checking) {
                check_all_warps_waited(granule(address), address, pc);
                read_by_proxy(address, GRANULE, "wgmma", "wgmma reads", pc);
                m.reads.push_back({address, GRANULE});
            }
            unsigned short bits[8];
            // Rows that nothing has written may belong to no element of the result: they are NaN, or -1.
            if (now.checking && !granule(address).written) std::memset(bits, 0xff, sizeof bits);
            else std::memcpy(bits, from, sizeof bits);
            for (unsigned e = 0; e < 8; e++) {
                unsigned line = transposed ? j + e : i, k = transposed ? i : j + e;
                convert(bits[e], halves, out + k * (TERMS<T> / 16) * lines + line, lines);
            }
        }
}

// Of the registers of a that each thread holds, [16][64]: of two elements in each, as mma.sync has them.
void take_registers(const Rendezvous* slots, ptx::Elements elements, float* out) {
    const float* halves = halves_of(elements);
    for (unsigned t = 0; t < WARPGROUP; t++)
        for (unsigned e = 0; e < 8; e++) {
            unsigned row = t / 32 * 16 + t % 32 / 4 + e / 2 % 2 * 8, k = t % 4 * 2 + e / 4 * 8 + e % 2;
            convert(slots[t].a_registers[e / 2] >> e % 2 * 16 & 0xffff, halves, out + k * 64 + row, 0);
        }
}

// Row and column of a thread's register in the result of 64 rows.
unsigned row_of(unsigned thread, unsigned i) { return thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8; }
unsigned column_of(unsigned thread, unsigned i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

Accumulator& accumulator_of(Warpgroup& g, const Rendezvous* slots) {
    unsigned columns = slots[0].columns;
    for (auto& known_one : g.accumulators)
        if (known_one->registers[0] == slots[0].d[0] && known_one->columns == columns) return *known_one;
    if (!g.fenced && now.checking)
        fail(RACE, {}, slots[0].pc, "wgmma takes registers that the threads have used, with no wgmma.fence between");
    auto fresh = std::make_unique<Accumulator>();
    fresh->columns = columns;
    fresh->pending = 0;
    fresh->values.resize(64 * columns * 4);
    unsigned each = columns / 2;
    for (unsigned t = 0; t < WARPGROUP; t++)
        for (unsigned i = 0; i < each; i++) {
            void* place = slots[t].d[i];
            fresh->registers.push_back(place);
            std::memcpy(fresh->value(row_of(t, i), column_of(t, i)), place, 4);
            std::memset(place, 0xff, 4);
        }
    g.accumulators.push_back(std::move(fresh));
    return *g.accumulators.back();
}

// Return the variables from which a wgmma takes registers of a. An earlier wgmma with the same ones forgets them, because
// a GPU's compiler may have unrolled the loop, and then each pass has registers of its own.
std::vector<Taken> taken(Warpgroup& g) {
    std::vector<Taken> all;
    for (unsigned t = 0; t < WARPGROUP; t++)
        for (unsigned i = 0; i < 4; i++)
            if (g.slots[t].a_places[i]) all.push_back({g.slots[t].a_places[i], t, g.slots[t].a_registers[i]});
    const auto forget = [&](std::vector<Multiplication>& group) {
        for (Multiplication& m : group)
            if (!m.taken.empty() && !all.empty() && m.taken[0].place == all[0].place) m.taken.clear();
    };
    forget(g.groups.open);
    for (auto& group : g.groups.committed) forget(group);
    return all;
}

// Adds the product of a, in registers or in shared memory, and b, in shared memory.
template <class T> void add_product(const Rendezvous* slots, Accumulator& acc, Multiplication& m) {
    const Rendezvous& s = slots[0];
    static T a[TERMS<T> * 64], b[TERMS<T> * 256];
    if constexpr (std::is_same_v<T, float>) {
        if (s.a_registers) take_registers(slots, s.elements, a);
    }
    if (!s.a_registers) read_matrix(s.a, 64, s.a_transposed, s.elements, a, m, s.pc);
    read_matrix(s.b, s.columns, s.b_transposed, s.elements, b, m, s.pc);
    if (!s.add) std::fill(acc.values.begin(), acc.values.end(), '\0');
    T sign = T(s.a_sign * s.b_sign);
    for (unsigned row = 0; row < 64; row++) {
        T* sums = reinterpret_cast<T*>(acc.value(row, 0));
        for (unsigned k = 0; k < TERMS<T>; k++) {
            T factor = sign * a[k * 64 + row];
            const T* terms = b + k * s.columns;
            for (unsigned column = 0; column < s.columns; column++) sums[column] += factor * terms[column];
        }
    }
}

void multiply(Warpgroup& g) {
    const Rendezvous& s = g.slots[0];
    for (const Rendezvous& other : g.slots)
        if (other.a != s.a || other.b != s.b || other.add != s.add || other.columns != s.columns || !other.a_registers != !s.a_registers)
            fail(DIVERGENT_WARP, {}, s.pc, "the threads of a warpgroup give wgmma different operands");
    if (s.a_registers && !g.fenced && now.checking)
        fail(RACE, {}, s.pc, "wgmma takes registers that the threads have used, with no wgmma.fence between");
    Accumulator& acc = accumulator_of(g, g.slots);
    Multiplication m{{}, &acc, {}, s.pc};
    if (s.a_registers && now.checking) m.taken = taken(g);
    if (s.elements == ptx::Elements::INT8) add_product<unsigned>(g.slots, acc, m);
    else add_product<float>(g.slots, acc, m);
    acc.pending++;
    g.groups.open.push_back(std::move(m));
}

void finish(Warpgroup& g, unsigned first_thread, const Multiplication& m) {
    if (now.checking)
        for (const Range& r : m.reads) reading_ends(r.address, r.bytes, first_thread, true);
    for (const Taken& one : m.taken)
        if (one.place >= g.slots[one.thread].frame && std::memcmp(one.place, &one.value, sizeof one.value)) {
            fault_beside(m.pc);
            fail(RACE, {}, g.slots[one.thread].pc, "waits for wgmma, one of whose registers was overwritten while it was reading{other}: no wait for its group before");
        }
    if (--m.accumulator->pending) return;
    Accumulator& acc = *m.accumulator;
    unsigned each = acc.columns / 2;
    for (unsigned t = 0; t < WARPGROUP; t++)
        for (unsigned i = 0; i < each; i++) std::memcpy(acc.registers[t * each + i], acc.value(row_of(t, i), column_of(t, i)), 4);
    g.accumulators.erase(std::find_if(g.accumulators.begin(), g.accumulators.end(), [&](auto& one) { return one.get() == &acc; }));
}

// The threads of a warpgroup come together; the last to come does what they all ask for.
void together(Rendezvous mine, void (*act)(Warpgroup&, unsigned first_thread)) {
    unsigned number = now.thread / WARPGROUP, first = number * WARPGROUP;
    if (first + WARPGROUP > now.threads) fail(DIVERGENT_WARP, {}, mine.pc, "%s in a warpgroup of %u threads; it takes 128", mine.what, now.threads - first);
    Warpgroup& g = warpgroups[number];
    if (g.arrived) {
        const Rendezvous* other = nullptr;
        for (unsigned t = 0; t < WARPGROUP && !other; t++)
            if (g.slots[t].pc) other = &g.slots[t];
        if (other && std::strcmp(other->what, mine.what)) fail(DIVERGENT_WARP, {}, mine.pc, "%s meets %s of other threads of the warpgroup", mine.what, other->what);
    }
    g.slots[now.thread - first] = mine;
    if (++g.arrived < WARPGROUP) {
        for (unsigned round = g.round; g.round == round;) park_on(&g, mine.pc);
        return;
    }
    act(g, first);
    g.arrived = 0;
    g.round++;
    for (Rendezvous& slot : g.slots) slot.pc = nullptr;
    wake_on(&g);
}

// ---- named barriers

struct NamedBarrier {
    unsigned arrived = 0, threads = 0, round = 0;
    Clock gathered, gathered_proxied, completed, completed_proxied;
};
NamedBarrier named[16];

}  // namespace

// ---- for the scheduler and the checker

void asynchronous_begin_block() {
    size_t components = now.threads + MAX_MBARRIERS;
    known.assign(now.threads, Clock(components));
    proxied.assign(now.threads, Clock(components));
    mbarriers.clear();
    mbarriers_so_far = 0;
    transfers.clear();
    bulk_reads.assign(now.threads, {});
    warpgroups = std::vector<Warpgroup>((now.threads + WARPGROUP - 1) / WARPGROUP);
    for (NamedBarrier& b : named) b = {};
}

bool asynchronous_progress() {
    if (transfers.empty()) return false;
    Transfer next = transfers.front();
    transfers.pop_front();
    land(next);
    return true;
}

void asynchronous_leave() {
    if (now.checking && !bulk_reads[now.thread].empty())
        fail(RACE, {}, last_bulk_pc, "leaves the kernel while a bulk copy still reads shared memory: no cp.async.bulk.wait_group");
}

void asynchronous_end_block() {
    if (!transfers.empty() && now.checking)
        fail(RACE, {}, nullptr, "the block ends while a bulk copy to shared address %u is under way: nothing waits for it", transfers.front().to);
}

void asynchronous_sync_block() {
    for (unsigned w = 0; w * LANES < now.threads; w++) ++warp_event(w);
    Clock all = known[0], all_proxied = proxied[0];
    for (unsigned t = 0; t < now.threads; t++) {
        join(all, known[t]);
        join(all_proxied, proxied[t]);
    }
    for (unsigned t = 0; t < now.threads; t++) all[t] = warp_event(t / LANES);
    for (unsigned t = 0; t < now.threads; t++) {
        known[t] = all;
        proxied[t] = all_proxied;
    }
}

void asynchronous_sync_warp(unsigned mask) {
    unsigned first = here.warp * LANES;
    Clock all(known[0].size()), all_proxied(known[0].size());
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
        join(all, known[first + __builtin_ctz(lanes)]);
        join(all_proxied, proxied[first + __builtin_ctz(lanes)]);
    }
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) all[first + __builtin_ctz(lanes)] = warp_event(here.warp);
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
        known[first + __builtin_ctz(lanes)] = all;
        proxied[first + __builtin_ctz(lanes)] = all_proxied;
    }
}

void asynchronous_forget() {
    for (Granule& g : granules) g.block = 0;
    for (Copies& c : copies) c.block = 0;
}

bool asynchronous_knows(unsigned thread, unsigned event) { return knows(now.thread, thread, event); }

void asynchronous_access(const char* p, unsigned bytes, bool write, const void* pc) {
    size_t at = size_t(p - window());
    if (asynchronous && write) check_no_mbarrier(unsigned(at), bytes, "writes", pc);
    for (size_t a = at / GRANULE * GRANULE; a < at + bytes; a += GRANULE) {
        Granule& g = granule(a);
        unsigned mask = bytes_in(a, at, bytes);
        check_landed(g, now.thread, unsigned(at), write ? "writes" : "reads", pc, mask);
        if (!asynchronous) continue;
        if (!write) {
            Reader r{now.thread, warp_event(here.warp), false};
            auto same = std::find_if(g.readers.begin(), g.readers.end(), [&](const Reader& o) { return o.thread == r.thread && !o.warp; });
            if (same == g.readers.end()) g.readers.push_back(r);
            else same->event = r.event;
            continue;
        }
        if (g.reading) check_not_read(g, unsigned(at), "writes", pc);
        for (const Reader& r : g.readers)  // reads by threads are checked more finely elsewhere
            if (r.warp) check_not_read(g, unsigned(at), "writes", pc);
        for (Writer& w : g.writers) w.bytes &= ~mask;
        g.writers.erase(std::remove_if(g.writers.begin(), g.writers.end(), [&](const Writer& w) { return !w.bytes; }), g.writers.end());
        g.writers.push_back({now.thread, warp_event(here.warp), mask, pc});
        g.written = true;
    }
}

std::string asynchronous_awaited(const void* what) {
    char text[160];
    for (auto& [address, b] : mbarriers)
        if (&b == what) {
            std::snprintf(text, sizeof text, "the mbarrier at shared address %u, whose phase %u lacks %u arrivals and %lld bytes", address, b.phase, b.arrivals, b.bytes);
            return text;
        }
    for (unsigned n = 0; n < 16; n++)
        if (&named[n] == what) {
            std::snprintf(text, sizeof text, "the named barrier %u, to which %u of %u threads have come", n, named[n].arrived, named[n].threads);
            return text;
        }
    return "an instruction of the warpgroup that not all of its threads reach";
}

}  // namespace fourfold

namespace fourfold::ptx {

#define HERE __builtin_return_address(0)

size_t shared_address(const void* pointer) { return size_t(static_cast<const char*>(pointer) - window()); }
void* shared_pointer(size_t address) { return window() + address; }

void mbarrier_init(unsigned address, unsigned arrivals) {
    checked_shared(address, 8, "mbarrier.init", HERE);
    if (address % 8) fail(MISALIGNED, {}, HERE, "an mbarrier at shared address %u, which is not a multiple of 8", address);
    if (!arrivals || arrivals >= 1u << 20) fail(UNDEFINED_ARITHMETIC, {}, HERE, "an mbarrier of %u arrivals", arrivals);
    if (mbarriers_so_far == MAX_MBARRIERS) fail(OUT_OF_BOUNDS, {}, HERE, "more than %u mbarriers are not emulated", MAX_MBARRIERS);
    if (now.checking) access_shared(window() + address, 8, true, HERE);
    MBarrier b;
    b.index = mbarriers_so_far++;
    b.expected = b.arrivals = arrivals;
    b.owner = now.thread;
    b.event = warp_event(here.warp);
    size_t components = now.threads + MAX_MBARRIERS;
    for (Clock* c : {&b.gathered, &b.gathered_proxied, &b.completed, &b.completed_proxied}) c->resize(components);
    mbarriers[address] = b;
}

void mbarrier_invalidate(unsigned address) {
    mbarrier(address, HERE);
    for (const Transfer& t : transfers)
        if (t.barrier == address) fail(RACE, {}, HERE, "the mbarrier at shared address %u is invalidated while a bulk copy is under way that reports to it", address);
    mbarriers.erase(address);
}

static unsigned long long arrive(unsigned address, unsigned arrivals, unsigned bytes, const void* pc) {
    MBarrier& b = mbarrier(address, pc);
    if (arrivals > b.arrivals) fail(UNDEFINED_ARITHMETIC, {}, pc, "%u more arrivals at the mbarrier at shared address %u than the %u that its phase expects", arrivals - b.arrivals, address, b.expected);
    unsigned long long phase = b.phase;
    b.bytes += bytes;
    gather(b);
    b.arrivals -= arrivals;
    complete_phase(b);
    return phase;
}
unsigned long long mbarrier_arrive(unsigned address, unsigned arrivals) { return arrive(address, arrivals, 0, HERE); }
unsigned long long mbarrier_arrive_expecting(unsigned address, unsigned bytes) { return arrive(address, 1, bytes, HERE); }
void mbarrier_expect(unsigned address, unsigned bytes) { mbarrier(address, HERE).bytes += bytes; }

bool mbarrier_wait_parity(unsigned address, unsigned parity, bool try_) {
    if (parity > 1) fail(UNDEFINED_ARITHMETIC, {}, HERE, "a parity of %u; it is 0 or 1", parity);
    return wait_on(address, try_, HERE, [](const MBarrier& b, unsigned long long which) { return (b.phase & 1) != which; }, parity);
}
bool mbarrier_wait_phase(unsigned address, unsigned long long phase, bool try_) {
    return wait_on(address, try_, HERE, [](const MBarrier& b, unsigned long long which) { return b.phase > which; }, phase);
}

void fence_mbarrier_init() {
    for (auto& [address, b] : mbarriers) b.fenced |= b.owner == now.thread;
}
void fence_proxy_async() {
    fence_mbarrier_init();
    if (!now.checking) return;
    new_event();
    join(proxied[now.thread], known[now.thread]);
}

void load_box(unsigned to, const void* given, unsigned barrier, Start start) {
    const Map& map = as_map(given, start, HERE);
    MBarrier& b = mbarrier(barrier, HERE);
    if (to % 128) fail(MISALIGNED, {}, HERE, "a bulk copy to shared address %u, which is not a multiple of 128", to);
    checked_shared(to, box_bytes(map), "bulk copy", HERE);
    if (!b.fenced && now.checking)
        fail(RACE, {}, HERE, "a bulk copy with the mbarrier at shared address %u, with no fence after its initialisation: fence.mbarrier_init or fence.proxy.async", barrier);
    const void* pc = HERE;
    check_no_mbarrier(to, box_bytes(map), "copies", pc);
    each_chunk(map, to, start, [&](unsigned address, long long, long long, long long) {
        if (now.checking) {
            Granule& g = granule(address);
            check_landed(g, now.thread, address, "copies to", pc);
            check_not_read(g, address, "copies to", pc);
            check_writers(g, address, false, "copies to", pc);
            g.writers.clear();
            g.readers.clear();
            g.arriving = 0xffff;
            g.awaited = "on its mbarrier's phase";
            g.pc = pc;
        }
        std::memset(window() + address, 0xff, GRANULE);
    });
    transfers.push_back({map, to, barrier, start, pc});
}

void store_box(const void* given, unsigned from, Start start) {
    const Map& map = as_map(given, start, HERE);
    if (from % 128) fail(MISALIGNED, {}, HERE, "a bulk copy from shared address %u, which is not a multiple of 128", from);
    checked_shared(from, box_bytes(map), "bulk copy", HERE);
    const void* pc = HERE;
    each_chunk(map, from, start, [&](unsigned address, long long plane, long long r, long long c) {
        // What lies outside of the matrix is not written there, and need not have been written here.
        bool inside = map.holds(plane, r, 0) && c + GRANULE / map.element_bytes > 0 && c < map.columns;
        if (now.checking && inside && !granule(address).written)
            fail(UNINITIALISED_SHARED, {}, pc, "a bulk copy reads shared address %u, which nothing in this block has written", address);
        if (now.checking && inside) {
            read_by_proxy(address, GRANULE, "a bulk copy", "a bulk copy reads", pc);
            bulk_reads[now.thread].open.push_back({address, GRANULE});
        }
        for (unsigned e = 0; e * map.element_bytes < GRANULE; e++)
            if (map.holds(plane, r, c + e))
                std::memcpy(map.at(plane, r, c + e), window() + address + e * map.element_bytes, map.element_bytes);
    });
    last_bulk_pc = pc;
}

void commit_bulk() { bulk_reads[now.thread].commit(); }

void wait_bulk(unsigned pending, bool) {
    bulk_reads[now.thread].wait(pending, [](const Range& r) { reading_ends(r.address, r.bytes, now.thread, false); });
}

void copy_async(unsigned to, const void* from, unsigned bytes, unsigned read) {
    if (read > bytes) fail(UNDEFINED_ARITHMETIC, {}, HERE, "cp.async reads %u bytes to write %u", read, bytes);
    if (to % bytes || (read && size_t(from) % bytes)) fail(MISALIGNED, {}, HERE, "cp.async of %u bytes to shared address %u or from an address that is not a multiple of %u", bytes, to, bytes);
    char* p = checked_shared(to, bytes, "cp.async", HERE);
    const void* pc = HERE;
    if (now.checking) {
        if (read) access_shared(static_cast<const char*>(from), read, false, pc);
        copying = true;
        access_shared(p, bytes, true, pc);
        for (unsigned a = to / GRANULE * GRANULE; a < to + bytes; a += GRANULE) {
            Granule& g = granule(a);
            g.arriving |= bytes_in(a, to, bytes);
            g.awaited = "for its group";
            g.pc = pc;
        }
    }
    std::memset(p, 0xff, bytes);
    own_copies().open.push_back({to, bytes, read, from, pc});
}
void commit_copies() { own_copies().commit(); }
void wait_copies(unsigned pending) {
    own_copies().wait(pending, [](const Copy& c) { land(c); });
}
void wait_all_copies() {
    commit_copies();
    wait_copies(0);
}

void named_barrier(unsigned number, unsigned threads, bool waits) {
    if (number > 15) fail(OUT_OF_BOUNDS, {}, HERE, "a barrier of number %u; there are 0 to 15", number);
    if (!threads) threads = (now.threads + LANES - 1) / LANES * LANES;
    if (threads % LANES || threads > (now.threads + LANES - 1) / LANES * LANES)
        fail(DIVERGENT_BARRIER, {}, HERE, "a barrier of %u threads in a block of %u", threads, now.threads);
    NamedBarrier& b = named[number];
    if (b.arrived && b.threads != threads) fail(DIVERGENT_BARRIER, {}, HERE, "the barrier %u is of %u threads here, and of %u for others", number, threads, b.threads);
    b.threads = threads;
    if (now.checking) {
        if (!b.arrived) b.gathered.assign(known[0].size(), 0), b.gathered_proxied = b.gathered;
        new_event();
        join(b.gathered, known[now.thread]);
        join(b.gathered_proxied, proxied[now.thread]);
    }
    const void* pc = HERE;
    unsigned round = b.round;
    if (++b.arrived == std::min(threads, now.threads)) {
        b.arrived = 0;
        b.round++;
        b.completed = b.gathered;
        b.completed_proxied = b.gathered_proxied;
        wake_on(&b);
    } else if (waits) {
        while (b.round == round) park_on(&b, pc);
    }
    if (waits && now.checking) {
        join(known[now.thread], b.completed);
        join(proxied[now.thread], b.completed_proxied);
    }
}

void wgmma_fence() {
    together({HERE, "wgmma.fence"}, [](Warpgroup& g, unsigned) { g.fenced = true; });
}
void wgmma_commit() {
    together({HERE, "wgmma.commit_group"}, [](Warpgroup& g, unsigned) { g.groups.commit(); });
}
void wgmma_wait(unsigned pending) {
    Rendezvous mine{HERE, "wgmma.wait_group", pending};
    mine.frame = static_cast<const char*>(__builtin_frame_address(0));
    together(mine, [](Warpgroup& g, unsigned first) {
        g.fenced = false;
        g.groups.wait(g.slots[0].pending, [&](const Multiplication& m) { finish(g, first, m); });
    });
}
void wgmma(unsigned columns, Elements elements, void* const* d, const unsigned* a_registers, const void* const* a_places, unsigned long long a, unsigned long long b, bool add, int a_sign, int b_sign, bool a_transposed, bool b_transposed) {
    together({HERE, "wgmma.mma_async", 0, columns, elements, add, a_transposed, b_transposed, a_sign, b_sign, d, a_registers, a_places, a, b}, [](Warpgroup& g, unsigned) { multiply(g); });
}

float exp2_approximate(float x) {
    if (std::fabs(x) < 1.17549435e-38f) x = 0;
    float y = std::exp2(x);
    return y < 1.17549435e-38f ? 0 : y;
}

void set_registers(unsigned count) {
    if (count % 8 || count < 24 || count > 256) fail(UNDEFINED_ARITHMETIC, {}, HERE, "setmaxnreg to %u registers; a multiple of 8 from 24 to 256 is possible", count);
}

void store_shared(unsigned to, const void* value, unsigned bytes) {
    if (to % bytes) fail(MISALIGNED, {}, HERE, "write of %u bytes at shared address %u, which is not a multiple of %u", bytes, to, bytes);
    if (now.checking) access_shared(window() + to, bytes, true, HERE);
    std::memcpy(window() + to, value, bytes);
}
void load_shared(void* value, unsigned from, unsigned bytes) {
    if (from % bytes) fail(MISALIGNED, {}, HERE, "read of %u bytes at shared address %u, which is not a multiple of %u", bytes, from, bytes);
    if (now.checking) access_shared(window() + from, bytes, false, HERE);
    std::memcpy(value, window() + from, bytes);
}

}  // namespace fourfold::ptx
