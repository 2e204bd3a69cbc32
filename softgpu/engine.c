/* Executes kernels: one block after another, its warps by turns, 32 lanes an instruction.
 *
 * A warp whose lanes stand at different places runs those at the lowest one first, so that branches join again. A
 * barrier is where all of a block's lanes wait. Blocks, and the warps between barriers, run in an order drawn from the
 * seed.
 */
#define _GNU_SOURCE
#include "engine.h"
#include <fenv.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;
typedef uint16_t u16;
typedef int16_t s16;
typedef uint8_t u8;
typedef int8_t s8;
typedef float f32;
typedef double f64;

#define LANES 32
#define EACH _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++)

#define OPERATION(name, ...) OP_##name,
#define OTHER(name) OP_##name,
enum {
#include "operations.h"
    N_OPERATIONS
};
#define OPERATION(name, ...) #name,
#define OTHER(name) #name,
static const char *const names[] = {
#include "operations.h"
};

int find_operation(const char *name) {
    for (int i = 0; i < N_OPERATIONS; i++)
        if (!strcmp(names[i], name))
            return i;
    return -1;
}

uint64_t random_below(uint64_t *state, uint64_t bound) { /* splitmix64, Steele et al. 2014 */
    u64 z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (z ^ (z >> 31)) % bound;
}

static inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
    u32 found = 0;
    for (u32 k = 0; k < 8; k++)
        if (table >> k & 1)
            found |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    return found;
}
static inline u32 reverse(u32 a) {
    u32 found = 0;
    for (int k = 0; k < 32; k++)
        found |= (a >> k & 1) << (31 - k);
    return found;
}
static inline u32 permute(u32 a, u32 b, u32 control) {
    u64 bytes = (u64)b << 32 | a;
    u32 found = 0;
    for (int k = 0; k < 4; k++) {
        u32 nibble = control >> (4 * k) & 15, byte = (u32)(bytes >> (8 * (nibble & 7))) & 255;
        found |= (nibble & 8 ? (byte & 128 ? 255u : 0) : byte) << (8 * k);
    }
    return found;
}
static inline u32 extract(u32 a, u32 position, u32 length) {
    position &= 255, length &= 255;
    u64 shifted = position > 31 ? 0 : (u64)a >> position;
    return (u32)(length > 31 ? shifted : shifted & ((1ull << length) - 1));
}
static inline u32 extract_signed(u32 a, u32 position, u32 length) {
    position &= 255, length &= 255;
    if (!length)
        return 0;
    u32 top = position + length - 1 > 31 ? 31 : position + length - 1;
    u32 sign = a >> top & 1, found = extract(a, position, length);
    u32 have = position > 31 ? 0 : top - position + 1;
    return sign && have < 32 ? found | ~0u << have : found;
}
static inline u32 insert(u32 a, u32 b, u32 position, u32 length) {
    position &= 255, length &= 255;
    if (position > 31 || !length)
        return b;
    u32 ones = length > 31 ? ~0u : (1u << length) - 1;
    return (b & ~(ones << position)) | (a & ones) << position;
}
static inline u64 insert_64(u64 a, u64 b, u32 position, u32 length) {
    position &= 255, length &= 255;
    if (position > 63 || !length)
        return b;
    u64 ones = length > 63 ? ~0ull : (1ull << length) - 1;
    return (b & ~(ones << position)) | (a & ones) << position;
}
static inline f64 whole(f64 value, f64 least, f64 most) { /* conversions saturate, and take what is no number for 0 */
    value = trunc(value);
    return value != value ? 0 : value < least ? least : value > most ? most : value;
}
static inline u64 whole_u64(f64 value) {
    return !(value > 0) ? 0 : value >= 18446744073709551616.0 ? ~0ull : (u64)value;
}
static inline s64 whole_s64(f64 value) {
    return value != value                    ? 0
           : value >= 9223372036854775808.0  ? INT64_MAX
           : value <= -9223372036854775808.0 ? INT64_MIN
                                             : (s64)value;
}

/* Who accessed a word last, in 64 bits. `time` counts the synchronizations of a block. A thread of 1024 + w stands for
 * several of warp w, MANY for several warps, the block MANY_BLOCKS for several blocks. */
#define TAG(launch, block, time, thread) ((u64)(launch) << 52 | (u64)(block) << 28 | (u64)(time) << 12 | (u64)(thread))
#define TAG_LAUNCH(t) ((u32)((t) >> 52))
#define TAG_BLOCK(t) ((u32)((t) >> 28) & 0xffffff)
#define TAG_TIME(t) ((u32)((t) >> 12) & 0xffff)
#define TAG_THREAD(t) ((u32)(t) & 0x7ff)
enum { MANY = 2047, MANY_BLOCKS = 0xffffff, ATOMIC = 1 << 11, LAUNCHES = 4096, TIMES = 65536 };

enum { RUNS, AT_BARRIER, AT_WARP_SYNC };
typedef struct {
    int pc, state;
    u32 mask, members;
} Group;
typedef struct {
    Group groups[LANES];
    int n_groups, number;
    u32 alive, since;  /* since: the block's time at which its own lanes were last in step */
    u32 cycles, chain; /* when the latest instruction could begin, and after how many loads one after another */
    u32 floor, floor_chain, issued, at; /* the same of the last branch or barrier; instructions since; of this one */
    u8 *file;
    u32 *ready, *loads; /* by register: the cycle in which it is known, loads one after another that it took */
} Warp;

typedef struct {
    const Launch *launch;
    Kernel *kernel;
    u8 *shared, *shared_state, *local;
    u64 *shared_writer, *shared_reader;
    u32 shared_size, index, tag_block, time, since; /* since: the time of the last barrier */
    int n_warps, n_threads, failed, byte_tags;
    Warp warps[MAX_WARPS];
} Block;

Settings settings = {.memcheck = 1, .initcheck = 1, .racecheck = 1, .synccheck = 1};
uint64_t clock_ticks;
static u32 launch_tag; /* of this launch; shared memory has no other blocks, and no other launches */

static inline u32 bits_of(const s32 *mask) {
    u32 found = 0;
    for (int l = 0; l < LANES; l++)
        found |= (u32)(mask[l] & 1) << l;
    return found;
}
static inline void spread(u32 bits, s32 *mask) { EACH mask[l] = -(s32)(bits >> l & 1); }

static inline int tag_warp(u64 tag) {
    u32 thread = TAG_THREAD(tag);
    return thread < 1024 ? (int)(thread >> 5) : (int)thread - 1024; /* MANY: no warp */
}
/* Whether an access is ordered before one that happens now, in this block, by a lane of this warp. */
static inline int is_ordered(const Block *block, const Warp *warp, u64 tag, u32 thread) {
    if (TAG_LAUNCH(tag) != launch_tag)
        return 1;
    if (TAG_BLOCK(tag) != block->tag_block)
        return 0;
    if (TAG_TIME(tag) < block->since || TAG_THREAD(tag) == thread)
        return 1;
    return tag_warp(tag) == warp->number && TAG_TIME(tag) < warp->since;
}

static void tell_race(const Block *block, const Warp *warp, const char *what, u64 tag, int code, const char *space,
                      u64 address, u32 thread) {
    char other[64];
    if (TAG_BLOCK(tag) == MANY_BLOCKS)
        snprintf(other, sizeof other, "other blocks");
    else if (TAG_BLOCK(tag) != block->tag_block)
        snprintf(other, sizeof other, "block %u", TAG_BLOCK(tag));
    else if (TAG_THREAD(tag) == MANY)
        snprintf(other, sizeof other, "other threads of its block");
    else if (TAG_THREAD(tag) >= 1024)
        snprintf(other, sizeof other, "threads of warp %d", tag_warp(tag));
    else
        snprintf(other, sizeof other, "thread %u", TAG_THREAD(tag));
    (void)warp;
    report("racecheck", block->kernel, code,
           "%s at %s address 0x%llx by thread %u of block %u, with no barrier between it and %s", what, space,
           (unsigned long long)address, thread, block->index, other);
}

/* Note an access, of one word or byte, and tell whether it conflicts with one that nothing orders before it. */
static inline void note_read(const Block *block, const Warp *warp, u64 *writer, u64 *reader, u32 thread, int code,
                             const char *space, u64 address) {
    u64 w = *writer, r = *reader, tag = TAG(launch_tag, block->tag_block, block->time, thread);
    if (__builtin_expect(!is_ordered(block, warp, w, thread), 0))
        tell_race(block, warp, "a read", w, code, space, address, thread);
    if (r == tag)
        return;
    if (TAG_LAUNCH(r) != launch_tag) {
        *reader = tag;
        return;
    }
    if (TAG_BLOCK(r) != block->tag_block) {
        *reader = TAG(launch_tag, MANY_BLOCKS, 0, MANY);
        return;
    }
    if (TAG_TIME(r) < block->since || TAG_THREAD(r) == thread) {
        *reader = tag;
        return;
    }
    int same_warp = tag_warp(r) == warp->number;
    *reader = same_warp && TAG_TIME(r) < warp->since
                  ? tag
                  : TAG(launch_tag, block->tag_block, block->time, same_warp ? 1024 + warp->number : MANY);
}
static inline void note_write(const Block *block, const Warp *warp, u64 *writer, const u64 *reader, u32 thread,
                              int code, const char *space, u64 address, int atomic) {
    u64 w = *writer, r = *reader;
    if (__builtin_expect(!is_ordered(block, warp, w, thread) && !(atomic && w & ATOMIC), 0))
        tell_race(block, warp, "a write", w, code, space, address, thread);
    if (__builtin_expect(!is_ordered(block, warp, r, thread), 0))
        tell_race(block, warp, "a write over what is read", r, code, space, address, thread);
    *writer = TAG(launch_tag, block->tag_block, block->time, thread) | (atomic ? ATOMIC : 0);
}

/* Where a lane's bytes are in the host's memory, having checked them; NULL after a fault. */
static inline u8 *locate(Block *block, const Warp *warp, const Instruction *i, int code, u64 address, u32 thread,
                         u32 bytes, int access) {
    u32 space = i->flags & SPACE_MASK;
    const Launch *launch = block->launch;
    const char *verb = access == 0 ? "a read" : access == 1 ? "a write" : "an atomic access";
    if (__builtin_expect(address & (bytes - 1), 0)) {
        report("memcheck", block->kernel, code,
               "%s of %u bytes at the misaligned address 0x%llx by thread %u of block %u", verb, bytes,
               (unsigned long long)address, thread, block->index);
        block->failed = 1;
        return NULL;
    }
    if (space == IN_GENERIC) {
        if (address - (u64)block->shared < block->shared_size)
            space = IN_SHARED, address -= (u64)block->shared;
        else if (block->local && address - (u64)block->local < (u64)block->n_threads * block->kernel->local_size)
            return (u8 *)address;
        else
            space = IN_GLOBAL;
    }
    if (space == IN_SHARED) {
        if (__builtin_expect(address + bytes > block->shared_size, 0)) {
            report("memcheck", block->kernel, code,
                   "%s of %u bytes at shared address 0x%llx, past the block's %u bytes, by thread %u of block %u", verb,
                   bytes, (unsigned long long)address, block->shared_size, thread, block->index);
            block->failed = 1;
            return NULL;
        }
        u8 *state = block->shared_state + address;
        if (settings.initcheck) {
            if (access != 1)
                for (u32 k = 0; k < bytes; k++)
                    if (__builtin_expect(!state[k], 0)) {
                        report("initcheck", block->kernel, code,
                               "%s of shared address 0x%llx, which nobody wrote, by thread %u of block %u", verb,
                               (unsigned long long)address, thread, block->index);
                        break;
                    }
            if (access)
                memset(state, 1, bytes);
        }
        if (settings.racecheck)
            for (u32 k = address >> 2; k <= (address + bytes - 1) >> 2; k++) {
                /* bytes of one word by different threads are no conflict, and are not told apart: they are left out */
                if (bytes < 4)
                    break;
                if (access == 0)
                    note_read(block, warp, block->shared_writer + k, block->shared_reader + k, thread, code, "shared",
                              address);
                else
                    note_write(block, warp, block->shared_writer + k, block->shared_reader + k, thread, code, "shared",
                               address, access == 2);
            }
        return block->shared + address;
    }
    if (space == IN_LOCAL) {
        if (__builtin_expect(address + bytes > block->kernel->local_size, 0)) {
            report("memcheck", block->kernel, code,
                   "%s of %u bytes at local address 0x%llx, past %u bytes, by thread %u of block %u", verb, bytes,
                   (unsigned long long)address, block->kernel->local_size, thread, block->index);
            block->failed = 1;
            return NULL;
        }
        return block->local + (u64)thread * block->kernel->local_size + address;
    }
    Memory *memory = launch->memory;
    u64 place = address - memory->base;
    if (__builtin_expect(place >= memory->span, 0)) {
        int other = -1;
        for (int k = 0; k < launch->devices; k++)
            if (address - launch->memories[k].base < launch->memories[k].span)
                other = k;
        if (other >= 0)
            report("memcheck", block->kernel, code, "%s at 0x%llx, memory of GPU %d, by a kernel on GPU %d", verb,
                   (unsigned long long)address, other, launch->device);
        else
            report("memcheck", block->kernel, code,
                   "%s of %u bytes at 0x%llx, no address of the GPU, by thread %u of block %u", verb, bytes,
                   (unsigned long long)address, thread, block->index);
        block->failed = 1;
        return NULL;
    }
    u8 *state = memory->state + place, all = ALLOCATED | WRITTEN;
    for (u32 k = 0; k < bytes; k++)
        all &= state[k];
    if (__builtin_expect(!(all & ALLOCATED), 0)) {
        report("memcheck", block->kernel, code,
               "%s of %u bytes at 0x%llx, outside every allocation, by thread %u of block %u", verb, bytes,
               (unsigned long long)address, thread, block->index);
        block->failed = 1;
        return NULL;
    }
    if (settings.initcheck && access != 1 && __builtin_expect(!(all & WRITTEN), 0))
        report("initcheck", block->kernel, code, "%s of 0x%llx, which nobody wrote, by thread %u of block %u", verb,
               (unsigned long long)address, thread, block->index);
    if (access)
        memset(state, ALLOCATED | WRITTEN, bytes);
    if (settings.racecheck) {
        if (bytes < 4) {
            for (u32 k = 0; k < bytes; k++) {
                if (access == 0)
                    note_read(block, warp, memory->byte_writer + place + k, memory->byte_reader + place + k, thread,
                              code, "global", address);
                else
                    note_write(block, warp, memory->byte_writer + place + k, memory->byte_reader + place + k, thread,
                               code, "global", address, access == 2);
            }
        } else
            for (u64 k = place >> 2; k <= (place + bytes - 1) >> 2; k++) {
                if (access == 0)
                    note_read(block, warp, memory->writer + k, memory->reader + k, thread, code, "global", address);
                else
                    note_write(block, warp, memory->writer + k, memory->reader + k, thread, code, "global", address,
                               access == 2);
            }
    }
    return (u8 *)address;
}

/* Count the sectors or the wavefronts of one access of a warp; tell whether it reads what its launch had not yet. */
static int count_access(Block *block, const Instruction *i, Count *count, const u64 *address, u32 bits, u32 bytes,
                        int is_write) {
    u32 space = i->flags & SPACE_MASK;
    if (space == IN_SHARED) {
        /* 32 banks of 4 bytes; lanes that ask for one word share a turn; wide accesses go in parts of 128 bytes */
        u32 lanes_at_once = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
        for (u32 first = 0; first < LANES; first += lanes_at_once) {
            u64 words[64];
            u32 n = 0, turns[32] = {0}, most = 0;
            for (u32 l = first; l < first + lanes_at_once; l++) {
                if (!(bits >> l & 1))
                    continue;
                for (u64 word = address[l] >> 2; word <= (address[l] + bytes - 1) >> 2; word++) {
                    u32 k = 0;
                    while (k < n && words[k] != word)
                        k++;
                    if (k < n)
                        continue;
                    words[n++] = word;
                    if (++turns[word & 31] > most)
                        most = turns[word & 31];
                }
            }
            count->wavefronts += most;
        }
    } else if (space == IN_GLOBAL || space == IN_GENERIC) {
        u64 sectors[4 * LANES];
        u32 n = 0;
        int fresh = 0;
        Memory *memory = block->launch->memory;
        for (u32 l = 0; l < LANES; l++) {
            if (!(bits >> l & 1))
                continue;
            u64 sector = (address[l] - memory->base) >> 5;
            if (n && sectors[n - 1] == sector)
                continue;
            u32 k = 0;
            while (k < n && sectors[k] != sector)
                k++;
            if (k < n)
                continue;
            sectors[n++] = sector;
            if (sector >= memory->span >> 5)
                continue;
            u32 mark = memory->touched[sector], read = mark & 0xffff, written = mark >> 16;
            if (!is_write && read != launch_tag + 1)
                block->kernel->totals.read_sectors++, read = launch_tag + 1, fresh = 1;
            if (is_write && written != launch_tag + 1)
                block->kernel->totals.written_sectors++, written = launch_tag + 1;
            memory->touched[sector] = read | written << 16;
        }
        count->sectors += n;
        return fresh;
    }
    return 0;
}

static inline u64 load_bytes(const u8 *from, u32 size, u32 flags) {
    switch (size) {
    case 1:
        return flags & SIGNED ? (u64)(s64) * (const s8 *)from : *from;
    case 2:
        return flags & SIGNED ? (u64)(s64) * (const s16 *)from : *(const u16 *)from;
    case 4:
        return flags & SIGNED ? (u64)(s64) * (const s32 *)from : *(const u32 *)from;
    default:
        return *(const u64 *)from;
    }
}
static inline void store_bytes(u8 *to, u32 size, u64 value) {
    switch (size) {
    case 1:
        *to = (u8)value;
        break;
    case 2:
        *(u16 *)to = (u16)value;
        break;
    case 4:
        *(u32 *)to = (u32)value;
        break;
    default:
        *(u64 *)to = value;
    }
}

static void addresses(const Instruction *i, const u8 *file, u64 *address) {
    const u64 imm = (u64)i->imm;
    if (i->flags & ADDRESS_32) {
        const u32 *a = (const u32 *)(file + i->a);
        EACH address[l] = (u64)a[l] + imm;
    } else {
        const u64 *a = (const u64 *)(file + i->a);
        EACH address[l] = a[l] + imm;
    }
}

/* Accesses of a whole warp at once, to units of 4 bytes or of 1, since nearly all are such, and without fault. Lanes that
 * are not there do as the first that is, so that no step needs a mask. */
typedef struct {
    u8 *base, *state;
    u64 *writer, *reader; /* by unit */
    u64 origin, limit;    /* of addresses; bytes */
    u32 written;          /* what a byte's state gains by a write */
    const char *name;
} Space;

static inline Space space_of(const Block *block, u32 space, const u32 size) {
    if (space == IN_SHARED)
        return (Space){block->shared, block->shared_state,  block->shared_writer, block->shared_reader, 0,
                       block->shared_size, 1, "shared"};
    const Memory *m = block->launch->memory;
    return (Space){(u8 *)m->base, m->state, size == 4 ? m->writer : m->byte_writer,
                   size == 4 ? m->reader : m->byte_reader, m->base, m->span, WRITTEN, "global"};
}
static inline u64 differs(u64 a, u64 b) { return -(u64)(a != b); }
static inline u64 is_less(u64 a, u64 b) { return -(u64)(a < b); }
static inline u64 either(u64 choice, u64 yes, u64 no) { return (choice & yes) | (~choice & no); }

/* All ones where an access by another is not ordered before one that happens now: `is_ordered`, negated, for a lane. */
static inline u64 conflicts(const Block *block, u64 own_warp, u64 since, u64 tag, u64 thread) {
    const u64 here = ~differs(tag >> 28, (u64)launch_tag << 24 | block->tag_block), time = tag >> 12 & 0xffff,
              other = tag & 0x7ff;
    const u64 same_warp = either(is_less(other, 1024), ~differs(other >> 5, own_warp), ~differs(other, 1024 + own_warp));
    const u64 ordered = here & (is_less(time, block->since) | ~differs(other, thread) | (same_warp & is_less(time, since)));
    return ~differs(tag >> 52, launch_tag) & ~ordered;
}
/* What is noted of a word's readers, once this lane has read it too: `note_read`. */
static inline u64 read_by(const Block *block, u64 own_warp, u64 since, u64 tag, u64 own) {
    const u64 thread = own & 0x7ff, time = tag >> 12 & 0xffff, other = tag & 0x7ff;
    const u64 same_warp = either(is_less(other, 1024), ~differs(other >> 5, own_warp), ~differs(other, 1024 + own_warp));
    const u64 anew = differs(tag >> 52, launch_tag), elsewhere = differs(tag >> 28 & 0xffffff, block->tag_block);
    const u64 alone = is_less(time, block->since) | ~differs(other, thread) | (same_warp & is_less(time, since));
    const u64 several = (own & ~(u64)0xfff) | either(same_warp, 1024 + own_warp, MANY);
    return either(anew, own, either(elsewhere, TAG(launch_tag, MANY_BLOCKS, 0, MANY), either(alone, own, several)));
}

/* From anywhere to 32 lanes, and back. Compilers take a processor's own instruction for this to be slow. */
static inline void gather_64(const u64 *from, const u64 *unit, const int row, u64 *to) {
    if (row) {
        EACH to[l] = from[l];
        return;
    }
#ifdef __AVX512F__
    for (int l = 0; l < LANES; l += 8)
        _mm512_store_si512(to + l, _mm512_i64gather_epi64(_mm512_load_si512(unit + l), from, 8));
#else
    EACH to[l] = from[unit[l]];
#endif
}
static inline void gather_units(const u8 *from, const u64 *place, const u32 size, u32 *to) {
    if (size == 1) {
        EACH to[l] = from[place[l]];
        return;
    }
#ifdef __AVX512F__
    for (int l = 0; l < LANES; l += 8)
        _mm256_store_si256((__m256i *)(to + l), _mm512_i64gather_epi32(_mm512_load_si512(place + l), from, 1));
#else
    EACH to[l] = *(const u32 *)(from + place[l]);
#endif
}
static inline void scatter_units(u8 *to, const u64 *place, const u32 size, const u32 *from) {
    if (size == 1)
        EACH to[place[l]] = (u8)from[l];
    else
        EACH *(u32 *)(to + place[l]) = from[l];
}

/* Note the reads of a warp's lanes, of units in a row or anywhere; 0 where one conflicts. */
static inline __attribute__((always_inline)) int note_reads(const Block *block, const Warp *warp, const Space *space,
                                                            const int row, const u64 *unit, const u64 *own) {
    const u64 own_warp = (u64)warp->number, since = warp->since;
    u64 *const writer = space->writer + (row ? unit[0] : 0), *const reader = space->reader + (row ? unit[0] : 0);
    u64 tag[LANES] __attribute__((aligned(64))), made[LANES] __attribute__((aligned(64))), met = 0, changed = 0, lost = 0;
    gather_64(writer, unit, row, tag);
    EACH met |= ~differs(tag[l] >> 52, launch_tag);
    if (met) {
        met = 0;
        EACH met |= conflicts(block, own_warp, since, tag[l], own[l] & 0x7ff);
        if (met)
            return 0;
    }
    gather_64(reader, unit, row, tag);
    EACH changed |= own[l] ^ tag[l];
    if (!changed)
        return 1;
    changed = 0;
    EACH made[l] = read_by(block, own_warp, since, tag[l], own[l]), changed |= made[l] ^ tag[l];
    if (!changed)
        return 1;
    if (row) {
        EACH reader[l] = made[l];
        return 1;
    }
    EACH reader[unit[l]] = made[l];
    gather_64(reader, unit, 0, tag);
    EACH lost |= tag[l] ^ made[l];
    if (lost) /* several lanes of one word */
        for (int l = 0; l < LANES; l++)
            if (reader[unit[l]] != made[l])
                reader[unit[l]] = (own[l] & ~(u64)0xfff) | (1024 + own_warp);
    return 1;
}
/* Note the writes of a warp's lanes; 0, and nothing noted, where one conflicts with what was before it. */
static inline __attribute__((always_inline)) int note_writes(const Block *block, const Warp *warp, const Space *space,
                                                             const int row, int code, const u64 *unit, const u64 *own,
                                                             const u64 *address) {
    const u64 own_warp = (u64)warp->number, since = warp->since;
    u64 *const writer = space->writer + (row ? unit[0] : 0), *const reader = space->reader + (row ? unit[0] : 0);
    u64 tag[LANES] __attribute__((aligned(64))), met = 0, lost = 0;
    gather_64(writer, unit, row, tag);
    EACH met |= conflicts(block, own_warp, since, tag[l], own[l] & 0x7ff);
    gather_64(reader, unit, row, tag);
    EACH met |= conflicts(block, own_warp, since, tag[l], own[l] & 0x7ff);
    if (met)
        return 0;
    if (row) {
        EACH writer[l] = own[l];
        return 1;
    }
    EACH writer[unit[l]] = own[l];
    gather_64(writer, unit, 0, tag);
    EACH lost |= tag[l] ^ own[l];
    if (__builtin_expect(lost != 0, 0))
        for (int l = 0; l < LANES; l++)
            if (writer[unit[l]] != own[l])
                tell_race(block, warp, "a write", writer[unit[l]], code, space->name, address[l], own[l] & 0x7ff);
    return 1;
}

/* One unit, read by all lanes or written by one. */
static inline __attribute__((always_inline)) int access_one(Block *block, Warp *warp, const Space *space, u32 in, int code,
                                                            u64 address, u32 *d, u32 bits, const int is_write,
                                                            const u32 size, u32 right) {
    const u64 place = address - space->origin, at = size == 4 ? place >> 2 : place;
    const u32 first = (u32)__builtin_ctz(bits), ones = size == 4 ? 0x01010101 : 1;
    const u32 thread = bits & (bits - 1) ? 1024 + (u32)warp->number : (u32)warp->number * 32 + first;
    if (place > space->limit - size || place & (size - 1))
        return 0;
    const u32 held = size == 4 ? *(const u32 *)(space->state + place) : space->state[place];
    if ((held & right) != right)
        return 0;
    const int noted = settings.racecheck && (in == IN_GLOBAL || size == 4);
    if (is_write) {
        if (noted)
            note_write(block, warp, space->writer + at, space->reader + at, thread, code, space->name, address, 0);
        if (size == 4)
            *(u32 *)(space->base + place) = d[first], *(u32 *)(space->state + place) = held | ones * space->written;
        else
            space->base[place] = (u8)d[first], space->state[place] = (u8)(held | space->written);
        return 1;
    }
    if (noted)
        note_read(block, warp, space->writer + at, space->reader + at, thread, code, space->name, address);
    const u32 found = size == 4 ? *(const u32 *)(space->base + place) : space->base[place];
    if (bits == ~0u)
        EACH d[l] = found;
    else
        EACH d[l] = bits >> l & 1 ? found : d[l];
    return 1;
}
/* Words in a row, one for each lane. */
static inline __attribute__((always_inline)) int access_row(Block *block, Warp *warp, const Space *space, int code,
                                                            const u64 *address, u32 *d, const int is_write, u32 right) {
    const u64 place = address[0] - space->origin, unit = place >> 2,
              tag = TAG(launch_tag, block->tag_block, block->time, warp->number * 32);
    u32 *const state = (u32 *)(space->state + place), *const words = (u32 *)(space->base + place);
    const u32 written = 0x01010101 * space->written;
    u64 own[LANES] __attribute__((aligned(64)));
    u32 held = ~0u;
    if (place > space->limit - 4 * LANES || space->limit < 4 * LANES || place & 3)
        return 0;
    EACH held &= state[l];
    if ((held & right) != right)
        return 0;
    EACH own[l] = tag + (u64)l;
    if (settings.racecheck && (is_write ? !note_writes(block, warp, space, 1, code, &unit, own, address)
                                        : !note_reads(block, warp, space, 1, &unit, own)))
        return 0;
    if (!is_write) {
        EACH d[l] = words[l];
        return 1;
    }
    EACH words[l] = d[l];
    if ((held & written) != written)
        EACH state[l] |= written;
    return 1;
}

/* Load units into `d`, or store them from there; 0 where a lane's access needs to be looked at by itself. */
static inline __attribute__((always_inline)) int access_units(Block *block, Warp *warp, u32 in, int code,
                                                              const u64 *given, u32 *d, u32 bits, const int is_write,
                                                              const u32 size) {
    const Space space = space_of(block, in, size);
    const u32 first = (u32)__builtin_ctz(bits), several = bits & (bits - 1), ones = size == 4 ? 0x01010101 : 1,
              written = ones * space.written;
    const u32 right = ones * (in == IN_SHARED ? settings.initcheck && !is_write
                                              : ALLOCATED | (settings.initcheck && !is_write ? WRITTEN : 0));
    u64 place[LANES] __attribute__((aligned(64))), address[LANES] __attribute__((aligned(64)));
    u64 own[LANES] __attribute__((aligned(64))), unit[LANES] __attribute__((aligned(64)));
    u32 state[LANES] __attribute__((aligned(64))), value[LANES] __attribute__((aligned(64)));
    u64 apart = 0, out_of_order = 0, wrong = 0;
    if (space.limit < size)
        return 0;
    if (bits == ~0u) {
        EACH apart |= given[l] ^ given[0], out_of_order |= given[l] ^ (given[0] + size * (u64)l);
        if (size == 4 && !out_of_order)
            return access_row(block, warp, &space, code, given, d, is_write, right);
        if (!apart && !is_write)
            return access_one(block, warp, &space, in, code, given[0], d, bits, 0, size, right);
        EACH address[l] = given[l];
    } else {
        EACH address[l] = bits >> l & 1 ? given[l] : given[first];
        EACH apart |= address[l] ^ given[first];
        if (!several || (!apart && !is_write))
            return access_one(block, warp, &space, in, code, given[first], d, bits, is_write, size, right);
    }
    const u64 last = space.limit - size;
    EACH place[l] = address[l] - space.origin, wrong |= is_less(last, place[l]) | (place[l] & (size - 1));
    if (wrong)
        return 0;
    gather_units(space.state, place, size, state);
    u32 held = ~0u;
    EACH held &= state[l];
    if ((held & right) != right)
        return 0;
    if (settings.racecheck && (in == IN_GLOBAL || size == 4)) {
        const u64 tag = TAG(launch_tag, block->tag_block, block->time, warp->number * 32);
        EACH own[l] = tag + (bits >> l & 1 ? (u64)l : first), unit[l] = size == 4 ? place[l] >> 2 : place[l];
        if (is_write ? !note_writes(block, warp, &space, 0, code, unit, own, address)
                     : !note_reads(block, warp, &space, 0, unit, own))
            return 0;
    }
    if (!is_write) {
        if (bits == ~0u) {
            gather_units(space.base, place, size, d);
            return 1;
        }
        gather_units(space.base, place, size, value);
        EACH d[l] = bits >> l & 1 ? value[l] : d[l];
        return 1;
    }
    EACH value[l] = bits >> l & 1 ? d[l] : d[first];
    scatter_units(space.base, place, size, value);
    if ((held & written) != written) {
        EACH state[l] |= written;
        scatter_units(space.state, place, size, state);
    }
    return 1;
}

/* Load or store what is made of such units: words, bytes without a sign, two words in one register, two or four in as
 * many; 0 where it is something else, or needs to be looked at lane by lane. */
static inline __attribute__((always_inline)) int access_warp(Block *block, Warp *warp, const Instruction *i, int code,
                                                             const u64 *address, u32 bits, const int is_write) {
    const u32 space = i->flags & SPACE_MASK, vector = 1u << ((i->flags & VECTOR_MASK) >> VECTOR_SHIFT);
    u64 next[LANES] __attribute__((aligned(64))), wrong = 0;
    u8 *const file = warp->file;
    if (space != IN_GLOBAL && space != IN_SHARED)
        return 0;
    if (i->size == 1 && vector == 1 && !(i->flags & (WIDE | SIGNED)))
        return access_units(block, warp, space, code, address, (u32 *)(file + i->d), bits, is_write, 1);
    if (i->size == 8 && vector == 1) {
        u32 half[LANES] __attribute__((aligned(64))), other[LANES] __attribute__((aligned(64)));
        u64 *d = (u64 *)(file + i->d);
        EACH wrong |= bits >> l & 1 ? address[l] & 7 : 0;
        EACH next[l] = address[l] + 4, half[l] = (u32)d[l], other[l] = (u32)(d[l] >> 32);
        if (wrong || !access_units(block, warp, space, code, address, half, bits, is_write, 4) ||
            !access_units(block, warp, space, code, next, other, bits, is_write, 4))
            return 0;
        if (!is_write)
            EACH d[l] = (u64)other[l] << 32 | half[l];
        return 1;
    }
    if (i->size != 4 || i->flags & WIDE)
        return 0;
    if (vector == 1)
        return access_units(block, warp, space, code, address, (u32 *)(file + i->d), bits, is_write, 4);
    const int32_t registers[4] = {i->d, i->b, i->c, i->e};
    EACH wrong |= bits >> l & 1 ? address[l] & (4 * vector - 1) : 0, next[l] = address[l];
    if (wrong)
        return 0;
    for (u32 k = 0; k < vector; k++) {
        if (!access_units(block, warp, space, code, next, (u32 *)(file + registers[k]), bits, is_write, 4))
            return 0;
        EACH next[l] += 4;
    }
    return 1;
}

static void load(Block *block, Warp *warp, const Instruction *i, int code, u32 bits) {
    u64 address[LANES] __attribute__((aligned(64)));
    addresses(i, warp->file, address);
    u32 vector = 1u << ((i->flags & VECTOR_MASK) >> VECTOR_SHIFT), bytes = i->size * vector,
        space = i->flags & SPACE_MASK;
    const int32_t targets[4] = {i->d, i->b, i->c, i->e};
    if (settings.count && !count_access(block, i, block->kernel->count + code, address, bits, bytes, 0) &&
        space <= IN_GLOBAL)
        for (u32 k = 0; k < vector; k++)
            warp->ready[targets[k] >> 7] = warp->at + settings.cached_latency;
    if (access_warp(block, warp, i, code, address, bits, 0))
        return;
    for (u32 left = bits; left; left &= left - 1) {
        int l = __builtin_ctz(left);
        u8 *from = locate(block, warp, i, code, address[l], (u32)warp->number * 32 + (u32)l, bytes, 0);
        if (!from)
            return;
        for (u32 k = 0; k < vector; k++) {
            u64 value = load_bytes(from + k * i->size, i->size, i->flags);
            if (i->flags & WIDE)
                ((u64 *)(warp->file + targets[k]))[l] = value;
            else
                ((u32 *)(warp->file + targets[k]))[l] = (u32)value;
        }
    }
}
static void store(Block *block, Warp *warp, const Instruction *i, int code, u32 bits) {
    u64 address[LANES] __attribute__((aligned(64)));
    addresses(i, warp->file, address);
    u32 vector = 1u << ((i->flags & VECTOR_MASK) >> VECTOR_SHIFT), bytes = i->size * vector;
    const int32_t sources[4] = {i->d, i->b, i->c, i->e};
    if (settings.count)
        count_access(block, i, block->kernel->count + code, address, bits, bytes, 1);
    if (access_warp(block, warp, i, code, address, bits, 1))
        return;
    for (u32 left = bits; left; left &= left - 1) {
        int l = __builtin_ctz(left);
        u8 *to = locate(block, warp, i, code, address[l], (u32)warp->number * 32 + (u32)l, bytes, 1);
        if (!to)
            return;
        for (u32 k = 0; k < vector; k++)
            store_bytes(to + k * i->size, i->size,
                        i->flags & WIDE ? ((u64 *)(warp->file + sources[k]))[l]
                                        : ((u32 *)(warp->file + sources[k]))[l]);
    }
}
static u64 combine(int op, u32 size, u32 flags, u64 old, u64 b, u64 c) {
    if (flags & FLOATING) {
        if (size == 4) {
            f32 x, y;
            memcpy(&x, &old, 4), memcpy(&y, &b, 4);
            x = op == OP_atom_add ? x + y : op == OP_atom_min ? fminf(x, y) : fmaxf(x, y);
            u32 found;
            memcpy(&found, &x, 4);
            return found;
        }
        f64 x, y;
        memcpy(&x, &old, 8), memcpy(&y, &b, 8);
        x = op == OP_atom_add ? x + y : op == OP_atom_min ? fmin(x, y) : fmax(x, y);
        memcpy(&old, &x, 8);
        return old;
    }
    int less = flags & SIGNED ? (size == 4 ? (s32)b < (s32)old : (s64)b < (s64)old) : b < old;
    switch (op) {
    case OP_atom_add:
        return old + b;
    case OP_atom_min:
        return less ? b : old;
    case OP_atom_max:
        return less ? old : b;
    case OP_atom_exch:
        return b;
    case OP_atom_cas:
        return old == b ? c : old;
    case OP_atom_and:
        return old & b;
    case OP_atom_or:
        return old | b;
    default:
        return old ^ b;
    }
}
static void atomic(Block *block, Warp *warp, const Instruction *i, int code, u32 bits) {
    u64 address[LANES];
    addresses(i, warp->file, address);
    if (settings.count)
        count_access(block, i, block->kernel->count + code, address, bits, i->size, 1);
    for (u32 left = bits; left; left &= left - 1) {
        int l = __builtin_ctz(left);
        u8 *at = locate(block, warp, i, code, address[l], (u32)warp->number * 32 + l, i->size, 2);
        if (!at)
            return;
        int wide = i->size == 8;
        u64 b = wide ? ((u64 *)(warp->file + i->b))[l] : ((u32 *)(warp->file + i->b))[l];
        u64 c = wide ? ((u64 *)(warp->file + i->c))[l] : ((u32 *)(warp->file + i->c))[l];
        u64 old = load_bytes(at, i->size, 0);
        store_bytes(at, i->size, combine(i->op, i->size, i->flags, old, b, c));
        if (i->d < 0)
            continue;
        if (wide)
            ((u64 *)(warp->file + i->d))[l] = old;
        else
            ((u32 *)(warp->file + i->d))[l] = (u32)old;
    }
}

/* Directed rounding, by the processor's own mode. */
__attribute__((noinline, optimize("rounding-math", "no-tree-vectorize"))) static void
directed(int op, f32 *d, const f32 *a, const f32 *b, const f32 *c, const s32 *m) {
    int mode = FE_TOWARDZERO;
    if (op == OP_fma_rm_f32 || op == OP_add_rm_f32 || op == OP_mul_rm_f32)
        mode = FE_DOWNWARD;
    if (op == OP_fma_rp_f32 || op == OP_add_rp_f32 || op == OP_mul_rp_f32)
        mode = FE_UPWARD;
    fesetround(mode);
    for (int l = 0; l < LANES; l++) {
        if (!m[l])
            continue;
        volatile f32 x = a[l], y = b[l], z = c[l], r;
        switch (op) {
        case OP_fma_rm_f32:
        case OP_fma_rp_f32:
        case OP_fma_rz_f32:
            r = fmaf(x, y, z);
            break;
        case OP_add_rm_f32:
        case OP_add_rp_f32:
        case OP_add_rz_f32:
            r = x + y;
            break;
        case OP_div_rz_f32:
            r = x / y;
            break;
        case OP_sqrt_rz_f32:
            r = sqrtf(x);
            break;
        default:
            r = x * y;
        }
        d[l] = r;
    }
    fesetround(FE_TONEAREST);
}

static void shuffle(Block *block, Warp *warp, const Instruction *i, int code, u32 bits) {
    u32 *a = (u32 *)(warp->file + i->a), *b = (u32 *)(warp->file + i->b), *c = (u32 *)(warp->file + i->c), found[LANES];
    s32 valid[LANES];
    memset(found, 0, sizeof found), memset(valid, 0, sizeof valid);
    for (u32 left = bits; left; left &= left - 1) {
        int l = __builtin_ctz(left);
        int clamp = c[l] & 31, segment = c[l] >> 8 & 31, most = (l & segment) | (clamp & ~segment), least = l & segment,
            from, ok;
        switch (i->op) {
        case OP_shfl_up:
            from = l - (int)(b[l] & 31), ok = from >= most;
            break; /* `most` is the lower end here */
        case OP_shfl_down:
            from = l + (int)(b[l] & 31), ok = from <= most;
            break;
        case OP_shfl_bfly:
            from = l ^ (int)(b[l] & 31), ok = from <= most;
            break;
        default:
            from = least | ((b[l] & 31) & ~segment), ok = from <= most;
        }
        if (!ok)
            from = l;
        if (!(bits >> from & 1))
            report("synccheck", block->kernel, code,
                   "thread %u of block %u takes a value from lane %d, which is not there", (u32)warp->number * 32 + l,
                   block->index, from);
        found[l] = a[from], valid[l] = -ok;
    }
    u32 *d = (u32 *)(warp->file + i->d);
    s32 *p = i->target >= 0 ? (s32 *)(warp->file + i->target) : NULL;
    for (u32 left = bits; left; left &= left - 1) {
        int l = __builtin_ctz(left);
        d[l] = found[l];
        if (p)
            p[l] = valid[l];
    }
}
static void vote(Warp *warp, const Instruction *i, u32 bits) {
    u32 held = 0;
    s32 *a = (s32 *)(warp->file + i->a);
    for (u32 left = bits; left; left &= left - 1)
        held |= (u32)(a[__builtin_ctz(left)] & 1) << __builtin_ctz(left);
    u32 value = i->op == OP_vote_ballot ? held
                : i->op == OP_vote_any  ? (u32) - (held != 0)
                : i->op == OP_vote_all  ? (u32) - (held == bits)
                                        : (u32) - (held == bits || !held);
    u32 *d = (u32 *)(warp->file + i->d);
    for (u32 left = bits; left; left &= left - 1)
        d[__builtin_ctz(left)] = value;
}

static void next_time(Block *block) {
    if (++block->time < TIMES)
        return;
    block->time = 1; /* so many synchronizations that tags begin again: what came before is forgotten */
    launch_tag = (launch_tag + 1) % LAUNCHES;
    block->since = 0;
    for (int w = 0; w < block->n_warps; w++)
        block->warps[w].since = 0;
}

/* A wait for another group of the warp at the same instruction is over when all members are there. */
static int join_members(Block *block, Warp *warp, Group *group, int code) {
    u32 there = 0, members = group->members & warp->alive;
    for (int g = 0; g < warp->n_groups; g++)
        if (warp->groups[g].state == AT_WARP_SYNC && warp->groups[g].pc == group->pc)
            there |= warp->groups[g].mask;
    (void)block, (void)code;
    return (there & members) == members;
}

static int lowest(const Warp *warp, int state) {
    int found = -1;
    for (int g = 0; g < warp->n_groups; g++)
        if (warp->groups[g].state == state && (found < 0 || warp->groups[g].pc < warp->groups[found].pc))
            found = g;
    return found;
}

/* Tell when an instruction can begin: once what it reads is known. Between two branches the compiler may have put
 * instructions in any order, so only what one needs of another counts; past a branch nothing moves. */
static void schedule(Warp *warp, const Instruction *i) {
    const int is_load = i->op == OP_ld && (i->flags & SPACE_MASK) <= IN_GLOBAL;
    const int32_t guard = i->guard > 0 ? i->guard - 1 : -i->guard - 1;
    const int32_t used[] = {guard, i->a, i->b, i->c, i->e, i->op == OP_st ? i->d : -1};
    const int32_t made[] = {i->d, i->b, i->c, i->e};
    u32 at = warp->floor, chain = warp->floor_chain;
    for (int k = 0; k < 6; k++) {
        if (used[k] < 0 || (i->op == OP_ld && k > 1))
            continue;
        const u32 slot = (u32)used[k] >> 7;
        at = warp->ready[slot] > at ? warp->ready[slot] : at;
        chain = warp->loads[slot] > chain ? warp->loads[slot] : chain;
    }
    warp->at = at, warp->issued++;
    warp->cycles = at > warp->cycles ? at : warp->cycles;
    warp->chain = chain > warp->chain ? chain : warp->chain;
    for (int k = 0; k < (i->op == OP_st ? 0 : i->op == OP_ld ? 4 : 1); k++)
        if (made[k] >= 0) {
            warp->ready[made[k] >> 7] = at + settings.latency[i->class];
            warp->loads[made[k] >> 7] = chain + (u32)is_load;
        }
    if (i->op == OP_bra || i->op == OP_bar) { /* no warp begins more than one instruction in a cycle */
        const u32 soonest = warp->floor + warp->issued;
        warp->cycles = soonest > warp->cycles ? soonest : warp->cycles;
        warp->floor = warp->cycles, warp->floor_chain = warp->chain, warp->issued = 0;
    }
}

/* Run a warp until all of its lanes wait for the block or are gone. */
static void run_warp(Block *block, Warp *warp) {
    Kernel *kernel = block->kernel;
    const Instruction *code = kernel->code;
    u8 *const file = warp->file;
    s32 full_mask[LANES] __attribute__((aligned(64))), guarded[LANES] __attribute__((aligned(64)));
    const int counting = settings.count;
    for (;;) {
        int g = lowest(warp, RUNS);
        if (g < 0) {
            int waiting = lowest(warp, AT_WARP_SYNC);
            if (waiting < 0)
                return;
            report("synccheck", kernel, warp->groups[waiting].pc,
                   "lanes 0x%x of warp %d, block %u, wait for lanes that never come", warp->groups[waiting].mask,
                   warp->number, block->index);
            warp->groups[waiting].members = warp->groups[waiting].mask;
            warp->groups[waiting].state = RUNS;
            continue;
        }
        int pc = warp->groups[g].pc;
        u32 bits = 0, members = warp->groups[g].members;
        int limit = INT_MAX;
        for (int k = 0; k < warp->n_groups;) {
            Group *group = warp->groups + k;
            if (group->state == RUNS && group->pc == pc) {
                bits |= group->mask;
                *group = warp->groups[--warp->n_groups];
            } else {
                if (group->state == RUNS && group->pc < limit)
                    limit = group->pc;
                k++;
            }
        }
        spread(bits, full_mask);
        for (;;) {
            if (__builtin_expect(pc >= limit, 0)) {
                warp->groups[warp->n_groups++] = (Group){pc, RUNS, bits, 0};
                break;
            }
            const Instruction *i = code + pc;
            const s32 *m = full_mask;
            clock_ticks++;
            u32 active = bits;
            if (i->guard) {
                const s32 *p = (const s32 *)(file + (i->guard > 0 ? i->guard - 1 : -i->guard - 1));
                const s32 flip = i->guard > 0 ? 0 : -1;
                EACH guarded[l] = full_mask[l] & (p[l] ^ flip);
                m = guarded;
                active = bits_of(guarded);
            }
            if (counting) {
                kernel->count[pc].executed++;
                kernel->count[pc].lanes += (u32)__builtin_popcount(active);
                schedule(warp, i);
            }
            if (!active && i->op != OP_bra) {
                pc++;
                continue;
            }
            const int full = active == ~0u;
            switch (i->op) {
#define OTHER(name)
#define OPERATION(name, R, T, value)                                                                                   \
    case OP_##name: {                                                                                                  \
        R *d = (R *)(file + i->d);                                                                                     \
        const T *a = (const T *)(file + i->a), *b = (const T *)(file + i->b), *c = (const T *)(file + i->c);           \
        (void)b, (void)c;                                                                                              \
        if (full)                                                                                                      \
            EACH d[l] = (R)(value);                                                                                    \
        else                                                                                                           \
            EACH d[l] = m[l] ? (R)(value) : d[l];                                                                      \
        break;                                                                                                         \
    }
#include "operations.h"
#define SHIFT(name, T, value)                                                                                          \
    case OP_##name: {                                                                                                  \
        T *d = (T *)(file + i->d);                                                                                     \
        const T *a = (const T *)(file + i->a);                                                                         \
        const u32 *b = (const u32 *)(file + i->b);                                                                     \
        EACH d[l] = m[l] ? (T)(value) : d[l];                                                                          \
        break;                                                                                                         \
    }
                SHIFT(shl_16, u32, b[l] > 15 ? 0 : a[l] << (b[l] & 15) & 0xffff)
                SHIFT(shl_32, u32, b[l] > 31 ? 0 : a[l] << (b[l] & 31))
                SHIFT(shl_64, u64, b[l] > 63 ? 0 : a[l] << (b[l] & 63))
                SHIFT(shr_u16, u32, b[l] > 15 ? 0 : (a[l] & 0xffff) >> (b[l] & 15))
                SHIFT(shr_s16, u32, (u32)((s16)a[l] >> (b[l] > 15 ? 15 : b[l])) & 0xffff)
                SHIFT(shr_u32, u32, b[l] > 31 ? 0 : a[l] >> (b[l] & 31))
                SHIFT(shr_s32, s32, a[l] >> (b[l] > 31 ? 31 : b[l]))
                SHIFT(shr_u64, u64, b[l] > 63 ? 0 : a[l] >> (b[l] & 63))
                SHIFT(shr_s64, s64, a[l] >> (b[l] > 63 ? 63 : b[l]))
#define THREE(name, R, A, B, C, value)                                                                                 \
    case OP_##name: {                                                                                                  \
        R *d = (R *)(file + i->d);                                                                                     \
        const A *a = (const A *)(file + i->a);                                                                         \
        const B *b = (const B *)(file + i->b);                                                                         \
        const C *c = (const C *)(file + i->c);                                                                         \
        (void)c;                                                                                                       \
        EACH d[l] = m[l] ? (R)(value) : d[l];                                                                          \
        break;                                                                                                         \
    }
                THREE(shf_l, u32, u32, u32, u32, ((u64)b[l] << 32 | a[l]) << (c[l] & 31) >> 32)
                THREE(shf_r, u32, u32, u32, u32, ((u64)b[l] << 32 | a[l]) >> (c[l] & 31))
                THREE(shf_l_clamp, u32, u32, u32, u32, c[l] > 31 ? a[l] : ((u64)b[l] << 32 | a[l]) << (c[l] & 31) >> 32)
                THREE(shf_r_clamp, u32, u32, u32, u32, c[l] > 31 ? b[l] : ((u64)b[l] << 32 | a[l]) >> (c[l] & 31))
                THREE(mad_wide_u32, u64, u32, u32, u64, (u64)a[l] * b[l] + c[l])
                THREE(mad_wide_s32, s64, s32, s32, s64, (s64)a[l] * b[l] + c[l])
                THREE(mad_wide_u16, u32, u32, u32, u32, a[l] * b[l] + c[l])
                THREE(selp_32, u32, u32, u32, s32, c[l] ? a[l] : b[l])
                THREE(selp_64, u64, u64, u64, s32, c[l] ? a[l] : b[l])
                THREE(pack_64, u64, u32, u32, u32, (u64)b[l] << 32 | a[l])
            case OP_bfi_32: {
                u32 *d = (u32 *)(file + i->d), *a = (u32 *)(file + i->a), *b = (u32 *)(file + i->b),
                    *c = (u32 *)(file + i->c), *e = (u32 *)(file + i->e);
                EACH d[l] = m[l] ? insert(a[l], b[l], c[l], e[l]) : d[l];
                break;
            }
            case OP_bfi_64: {
                u64 *d = (u64 *)(file + i->d), *a = (u64 *)(file + i->a), *b = (u64 *)(file + i->b);
                u32 *c = (u32 *)(file + i->c), *e = (u32 *)(file + i->e);
                EACH d[l] = m[l] ? insert_64(a[l], b[l], c[l], e[l]) : d[l];
                break;
            }
            case OP_fma_rm_f32:
            case OP_fma_rp_f32:
            case OP_fma_rz_f32:
            case OP_add_rm_f32:
            case OP_add_rp_f32:
            case OP_add_rz_f32:
            case OP_mul_rm_f32:
            case OP_mul_rp_f32:
            case OP_mul_rz_f32:
            case OP_div_rz_f32:
            case OP_sqrt_rz_f32: {
                const f32 *a = (const f32 *)(file + i->a);
                const f32 *b = i->b < 0 ? a : (const f32 *)(file + i->b),
                          *c = i->c < 0 ? a : (const f32 *)(file + i->c);
                directed(i->op, (f32 *)(file + i->d), a, b, c, m);
                break;
            }
            case OP_ld:
                load(block, warp, i, pc, active);
                break;
            case OP_st:
                store(block, warp, i, pc, active);
                break;
            case OP_atom_add:
            case OP_atom_min:
            case OP_atom_max:
            case OP_atom_exch:
            case OP_atom_cas:
            case OP_atom_and:
            case OP_atom_or:
            case OP_atom_xor:
                atomic(block, warp, i, pc, active);
                break;
            case OP_to_shared: {
                u64 *d = (u64 *)(file + i->d), *a = (u64 *)(file + i->a);
                EACH d[l] = m[l] ? a[l] - (u64)block->shared : d[l];
                break;
            }
            case OP_from_shared: {
                u64 *d = (u64 *)(file + i->d), *a = (u64 *)(file + i->a);
                EACH d[l] = m[l] ? a[l] + (u64)block->shared : d[l];
                break;
            }
            case OP_to_local: {
                u64 *d = (u64 *)(file + i->d), *a = (u64 *)(file + i->a), mine = (u64)block->local,
                    size = kernel->local_size, first = (u64)warp->number * 32;
                EACH d[l] = m[l] ? a[l] - mine - (first + (u64)l) * size : d[l];
                break;
            }
            case OP_from_local: {
                u64 *d = (u64 *)(file + i->d), *a = (u64 *)(file + i->a), mine = (u64)block->local,
                    size = kernel->local_size, first = (u64)warp->number * 32;
                EACH d[l] = m[l] ? a[l] + mine + (first + (u64)l) * size : d[l];
                break;
            }
            case OP_bra:
                if (active == bits) {
                    pc = i->target;
                    if (pc < limit)
                        continue;
                    warp->groups[warp->n_groups++] = (Group){pc, RUNS, bits, 0};
                    goto switched;
                }
                if (active) {
                    if (counting)
                        kernel->totals.divergent++;
                    warp->groups[warp->n_groups++] = (Group){i->target, RUNS, active, 0};
                    warp->groups[warp->n_groups++] = (Group){pc + 1, RUNS, bits & ~active, 0};
                    goto switched;
                }
                break;
            case OP_exit:
                warp->alive &= ~active;
                bits &= ~active;
                if (!bits)
                    goto switched;
                spread(bits, full_mask);
                break;
            case OP_bar:
                if (active != bits)
                    warp->groups[warp->n_groups++] = (Group){pc + 1, RUNS, bits & ~active, 0};
                warp->groups[warp->n_groups++] = (Group){pc + 1, AT_BARRIER, active, 0};
                goto switched;
            case OP_warp_sync:
            case OP_shfl_idx:
            case OP_shfl_up:
            case OP_shfl_down:
            case OP_shfl_bfly:
            case OP_vote_all:
            case OP_vote_any:
            case OP_vote_uni:
            case OP_vote_ballot: {
                u32 wanted = ((u32 *)(file + i->e))[__builtin_ctz(active)];
                u32 expected = wanted & warp->alive;
                if ((active & expected) != expected &&
                    !(members && (members & active) == active && members == active)) {
                    /* wait here until the others come to the same instruction */
                    if (active != bits)
                        warp->groups[warp->n_groups++] = (Group){pc + 1, RUNS, bits & ~active, 0};
                    warp->groups[warp->n_groups++] = (Group){pc, AT_WARP_SYNC, active, wanted};
                    if (join_members(block, warp, warp->groups + warp->n_groups - 1, pc))
                        for (int k = 0; k < warp->n_groups; k++)
                            if (warp->groups[k].state == AT_WARP_SYNC && warp->groups[k].pc == pc)
                                warp->groups[k].state = RUNS, warp->groups[k].members = 0;
                    goto switched;
                }
                if (i->op >= OP_shfl_idx && i->op <= OP_shfl_bfly)
                    shuffle(block, warp, i, pc, active);
                else if (i->op != OP_warp_sync)
                    vote(warp, i, active);
                members = 0;
                next_time(block);
                warp->since = block->time;
                break;
            }
            case OP_activemask: {
                u32 *d = (u32 *)(file + i->d);
                EACH d[l] = m[l] ? bits : d[l];
                break;
            }
            case OP_nop:
                break;
            case OP_trap:
                report("memcheck", kernel, pc, "thread %u of block %u traps",
                       (u32)warp->number * 32 + (u32)__builtin_ctz(active), block->index);
                block->failed = 1;
                break;
            }
            if (__builtin_expect(block->failed, 0))
                return;
            pc++;
        }
    switched:;
    }
}

/* Let the block go on from a barrier, if all of its threads wait at one; tell of those that do not. */
static int release(Block *block) {
    int place = -1, gone = 0, waiting = 0;
    u32 latest = 0, chain = 0;
    for (int w = 0; w < block->n_warps; w++) {
        Warp *warp = block->warps + w;
        u32 threads = (u32)(block->n_threads - w * 32 < 32 ? block->n_threads - w * 32 : 32);
        gone += (int)threads - __builtin_popcount(warp->alive);
        for (int g = 0; g < warp->n_groups; g++) {
            Group *group = warp->groups + g;
            waiting += __builtin_popcount(group->mask);
            if (place >= 0 && place != group->pc && settings.synccheck)
                report("synccheck", block->kernel, group->pc - 1,
                       "threads of block %u wait at different barriers, here and at '%s'", block->index,
                       block->kernel->text[place - 1]);
            place = group->pc;
            group->state = RUNS;
        }
        if (warp->alive && warp->cycles > latest)
            latest = warp->cycles;
        if (warp->alive && warp->chain > chain)
            chain = warp->chain;
    }
    if (!waiting)
        return 0;
    if (gone && settings.synccheck)
        report("synccheck", block->kernel, place - 1,
               "%d threads of block %u wait, %d are gone and never reach the barrier", waiting, block->index, gone);
    next_time(block);
    block->since = block->time;
    for (int w = 0; w < block->n_warps; w++) {
        block->warps[w].since = block->time;
        if (block->warps[w].alive)
            block->warps[w].cycles = block->warps[w].floor = latest,
            block->warps[w].chain = block->warps[w].floor_chain = chain;
    }
    return 1;
}

static void fill(u8 *file, u32 place, u32 width, u64 value) {
    if (width == 8) {
        u64 *d = (u64 *)(file + place);
        EACH d[l] = value;
    } else {
        u32 *d = (u32 *)(file + place);
        EACH d[l] = (u32)value;
    }
}

/* Registers that hold what a thread can ask for, at fixed places, of 128 bytes each; `assembler.SPECIAL` names them. */
enum {
    TID_X,
    TID_Y,
    TID_Z,
    NTID_X,
    NTID_Y,
    NTID_Z,
    CTAID_X,
    CTAID_Y,
    CTAID_Z,
    NCTAID_X,
    NCTAID_Y,
    NCTAID_Z,
    LANEID,
    WARPID,
    GLOBALTIMER /* 8 bytes a lane: two places */
};

static void start_block(Block *block) {
    const Launch *launch = block->launch;
    const u32 *n = launch->block, *grid = launch->grid;
    u32 at[3] = {block->index % grid[0], block->index / grid[0] % grid[1], block->index / grid[0] / grid[1]};
    block->time = block->since = 1;
    block->tag_block = block->index & 0x7fffff;
    if (settings.initcheck)
        memset(block->shared_state, 0, block->shared_size);
    if (settings.racecheck) {
        memset(block->shared_writer, 255, 8ul * (block->shared_size / 4 + 1)); /* a launch that never is */
        memset(block->shared_reader, 255, 8ul * (block->shared_size / 4 + 1));
    }
    for (int w = 0; w < block->n_warps; w++) {
        Warp *warp = block->warps + w;
        int threads = block->n_threads - w * 32;
        warp->alive = threads >= 32 ? ~0u : (1u << threads) - 1;
        warp->since = 1, warp->cycles = warp->chain = warp->floor = warp->floor_chain = warp->issued = 0;
        warp->groups[0] = (Group){0, RUNS, warp->alive, 0};
        warp->n_groups = 1;
        u32 *x = (u32 *)warp->file;
        EACH {
            u32 thread = (u32)(w * 32 + l);
            x[TID_X * 32 + l] = thread % n[0], x[TID_Y * 32 + l] = thread / n[0] % n[1],
                           x[TID_Z * 32 + l] = thread / (n[0] * n[1]);
        }
        for (int k = 0; k < 3; k++)
            fill(warp->file, (u32)(CTAID_X + k) * 128, 4, at[k]);
        fill(warp->file, GLOBALTIMER * 128, 8, clock_ticks); /* stands still in a block: an instruction is a nanosecond */
        if (settings.count) {
            memset(warp->ready, 0, 4ul * (block->kernel->file_bytes / 128 + 1));
            memset(warp->loads, 0, 4ul * (block->kernel->file_bytes / 128 + 1));
        }
    }
}

static void shuffled(u32 *order, u32 count, u64 *state) {
    for (u32 k = 0; k < count; k++)
        order[k] = k;
    for (u32 k = count; settings.seed && k > 1; k--) {
        u32 other = (u32)random_below(state, k), kept = order[k - 1];
        order[k - 1] = order[other], order[other] = kept;
    }
}

static void forget(Memory *memories, int devices);

int execute(const Launch *launch) {
    static u64 random_state, seeded;
    static Block block; /* one launch at a time: the driver holds its lock */
    Kernel *kernel = launch->kernel;
    if (launch_tag + 1 >= LAUNCHES - 1)
        forget(launch->memories, launch->devices), launch_tag = 0;
    launch_tag++;
    if (seeded != settings.seed)
        random_state = seeded = settings.seed;
    memset(&block, 0, sizeof block);
    block.launch = launch, block.kernel = kernel;
    block.n_threads = (int)(launch->block[0] * launch->block[1] * launch->block[2]);
    block.n_warps = (block.n_threads + 31) / 32;
    block.shared_size = kernel->shared_size + launch->dynamic_shared;
    size_t words = block.shared_size / 4 + 1;
    block.shared = aligned_alloc(256, (block.shared_size + 511) & ~255u);
    block.shared_state = malloc(block.shared_size + 1);
    block.shared_writer = malloc(8 * words), block.shared_reader = malloc(8 * words);
    block.local =
        kernel->local_size ? aligned_alloc(256, ((size_t)block.n_threads * kernel->local_size + 255) & ~255ul) : NULL;
    size_t file = (kernel->file_bytes + 255) & ~255ul, slots = kernel->file_bytes / 128 + 1;
    u8 *files = aligned_alloc(256, file * (size_t)block.n_warps);
    u32 *ready = settings.count ? malloc(8 * slots * (size_t)block.n_warps) : NULL;
    memset(files, 0, file * (size_t)block.n_warps);
    for (int w = 0; w < block.n_warps; w++) {
        Warp *warp = block.warps + w;
        warp->number = w, warp->file = files + file * (size_t)w;
        if (ready)
            warp->ready = ready + 2 * slots * (size_t)w, warp->loads = warp->ready + slots;
        for (int k = 0; k < 3; k++) {
            fill(warp->file, (u32)(NTID_X + k) * 128, 4, launch->block[k]);
            fill(warp->file, (u32)(NCTAID_X + k) * 128, 4, launch->grid[k]);
        }
        fill(warp->file, WARPID * 128, 4, (u64)w);
        u32 *lane = (u32 *)(warp->file + LANEID * 128);
        EACH lane[l] = (u32)l;
        for (u32 k = 0; k < kernel->n_constants; k++)
            fill(warp->file, kernel->constants[k].place, kernel->constants[k].width, kernel->constants[k].value);
        for (u32 k = 0; k < kernel->n_loads; k++) {
            u64 value = 0;
            const Constant *c = kernel->loads + k;
            memcpy(&value, launch->params + (c->value & 0xffffffff), c->value >> 32);
            fill(warp->file, c->place, c->width, value);
        }
    }
    u32 count = launch->grid[0] * launch->grid[1] * launch->grid[2], turns[MAX_WARPS];
    u32 *order = malloc(4ul * count);
    shuffled(order, count, &random_state);
    for (u32 k = 0; k < count && !block.failed; k++) {
        block.index = order[k];
        start_block(&block);
        do {
            shuffled(turns, (u32)block.n_warps, &random_state);
            for (int w = 0; w < block.n_warps && !block.failed; w++)
                run_warp(&block, block.warps + turns[w]);
        } while (!block.failed && release(&block));
        u32 cycles = 0, chain = 0;
        for (int w = 0; w < block.n_warps; w++) {
            if (block.warps[w].cycles > cycles)
                cycles = block.warps[w].cycles;
            if (block.warps[w].chain > chain)
                chain = block.warps[w].chain;
        }
        Totals *totals = &kernel->totals;
        totals->cycles += cycles, totals->chain += chain;
        if (cycles > totals->longest_cycles)
            totals->longest_cycles = cycles;
        if (chain > totals->longest_chain)
            totals->longest_chain = chain;
    }
    kernel->totals.launches++, kernel->totals.blocks += count;
    kernel->totals.block_threads = (u64)block.n_threads;
    free(order), free(files), free(ready), free(block.shared), free(block.shared_state), free(block.shared_writer),
        free(block.shared_reader), free(block.local);
    return block.failed;
}

#include <sys/mman.h>
/* Tags begin again: drop the notes of all launches before. */
static void forget(Memory *memories, int devices) {
    for (int k = 0; k < devices; k++) {
        Memory *m = memories + k;
        madvise(m->writer, m->span * 2, MADV_DONTNEED), madvise(m->reader, m->span * 2, MADV_DONTNEED);
        madvise(m->byte_writer, m->span * 8, MADV_DONTNEED), madvise(m->byte_reader, m->span * 8, MADV_DONTNEED);
        madvise(m->touched, m->span / 8, MADV_DONTNEED);
    }
}
