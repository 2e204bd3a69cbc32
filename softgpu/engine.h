/* What the driver (driver.c) and the engine that executes kernels (engine.c) share. */
#ifndef SOFTGPU_ENGINE_H
#define SOFTGPU_ENGINE_H
#include <stddef.h>
#include <stdint.h>

enum { MAX_WARPS = 32, MAX_FINDINGS = 64, CLASSES = 16 };

/* One device's memory: a range of host addresses, so that a register holds an address that is real. Beside it, one byte
 * a byte tells whether it is allocated and written, and two words a word tell who wrote and read it last. */
enum { ALLOCATED = 1, WRITTEN = 2 };
typedef struct {
    uint64_t base, span;
    uint8_t *state;
    uint64_t *writer, *reader;           /* by words of 4 bytes */
    uint64_t *byte_writer, *byte_reader; /* by bytes, of what is accessed in bytes */
    uint32_t *touched; /* by sectors of 32 bytes: the launch that read it, in the lower half, or wrote it */
} Memory;

/* An instruction. `guard` is 0 or the place of its predicate in the register file plus one, negative where negated.
 * Registers are places in the file of a warp, in bytes: 32 lanes of 4 bytes or of 8. */
typedef struct {
    uint16_t op;
    uint8_t class, size;
    int32_t guard, d, a, b, c, e, target;
    int64_t imm;
    uint32_t line, flags;
} Instruction;

enum {
    IN_GENERIC,
    IN_GLOBAL,
    IN_SHARED,
    IN_LOCAL,
    SPACE_MASK = 7,
    VECTOR_SHIFT = 3,
    VECTOR_MASK = 3 << 3,
    SIGNED = 1 << 5,
    WIDE = 1 << 6,
    ADDRESS_32 = 1 << 7,
    FLOATING = 1 << 8
};

typedef struct {
    uint64_t executed, lanes; /* by warps, by threads */
    uint64_t sectors;         /* of 32 bytes, of global memory */
    uint64_t wavefronts;      /* turns that shared memory took */
} Count;

/* What a kernel did, over its launches. */
typedef struct {
    uint64_t launches, blocks, block_threads;
    uint64_t read_sectors, written_sectors; /* different ones within a launch, added up */
    uint64_t chain, longest_chain;   /* waits for global memory one after another: of all blocks, of the longest */
    uint64_t cycles, longest_cycles; /* of a block alone on a multiprocessor */
    uint64_t divergent;              /* branches at which a warp split */
} Totals;

typedef struct {
    uint32_t place, width;
    uint64_t value;
} Constant; /* of the register file, the same in every lane */

typedef struct {
    char *name;
    uint32_t target;                                            /* 90 for sm_90 and for sm_90a */
    uint32_t registers, shared_bytes, local_bytes, max_threads; /* as the compiler for the real GPU found them */
    uint32_t shared_size, local_size;                           /* as the PTX asks for them */
    uint32_t file_bytes;
    uint32_t n_params, n_constants, n_loads, n_code;
    uint32_t *param_size, *param_offset;
    uint32_t param_bytes;
    Constant *constants, *loads; /* loads: `value` is the place in the parameters */
    Instruction *code;
    char **text; /* of every instruction */
    Count *count;
    Totals totals;
} Kernel;

typedef struct {
    Kernel *kernel;
    uint32_t grid[3], block[3], dynamic_shared;
    uint8_t *params;
    Memory *memory, *memories; /* of its device, of all */
    int device, devices;
} Launch;

typedef struct {
    int memcheck, initcheck, racecheck, synccheck, count;
    uint64_t seed;
    uint32_t latency[CLASSES], cached_latency; /* cycles; the latter of a load of what this launch has read before */
} Settings;
extern Settings settings;

/* Execute; 0, or 1 where the launch ends in a fault that a GPU would not survive. */
int execute(const Launch *launch);
/* Instructions of warps executed so far: the clock of the software GPU. */
extern uint64_t clock_ticks;
/* Tell what is wrong, once for every kernel and instruction; `code` is -1 where there is none. */
void report(const char *check, const Kernel *kernel, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Return the kernel's operation of a name, or -1. */
int find_operation(const char *name);
uint64_t random_below(uint64_t *state, uint64_t bound);
#endif
