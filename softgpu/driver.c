/* A CUDA driver without a GPU: as much of libcuda.so.1 as numba-cuda and cuda-core call.
 *
 * What a program does wrong gets the error that the driver would give; beyond that, what a driver leaves undefined is
 * reported: copies of memory nobody wrote, work on a device by another one's context. Work on a stream may be put off
 * for as long as the program allows (SOFTGPU_STREAMS), so that a missing synchronization shows.
 *
 * Environment: SOFTGPU_DEVICES, SOFTGPU_CAPABILITY, SOFTGPU_MULTIPROCESSORS, SOFTGPU_MEMORY, SOFTGPU_DRIVER,
 * SOFTGPU_SEED, SOFTGPU_STREAMS (now, late or random), SOFTGPU_CHECKS, SOFTGPU_FAULT, SOFTGPU_REPORT.
 */
#define _GNU_SOURCE
#include "engine.h"
#include <cuda.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#undef cuGetProcAddress
#undef cuGetProcAddress_v2

enum { MAX_DEVICES = 8, GUARD = 512, STACK = 64 };
typedef struct {
    uint64_t address, bytes;
    int device;
} Allocation;
typedef enum { LAUNCH, COPY_TO, COPY_FROM, COPY_WITHIN, SET, GRAPH, RECORD } Kind;
typedef struct Event {
    int device, recorded;
    uint64_t ticks;
    struct Stream *stream;
} Event;
typedef struct Op {
    Kind kind;
    Launch launch;
    uint64_t to, from, bytes;
    uint8_t value;
    void *staged, *host;
    struct Exec *exec;
    Event *event;
    struct Op *next;
} Op;
typedef struct Graph {
    Op *first, *last;
    size_t count;
} Graph;
typedef struct Exec {
    Op *first;
    int device;
} Exec;
typedef struct Stream {
    int device, blocking;
    Op *first, *last;
    Graph *capture;
    int invalid;
    CUstreamCaptureMode mode;
    struct Stream *next;
    unsigned flags;
    int priority;
} Stream;
typedef struct {
    int retained;
    CUresult error;
    Stream legacy;
    uint64_t used;
} Device;
typedef struct Library {
    Kernel **kernels;
    int count;
    uint8_t *data;
} Library;

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static Device devices[MAX_DEVICES];
static Memory memories[MAX_DEVICES];
static Stream *streams;
static int n_devices, capabilities[MAX_DEVICES], started, multiprocessors, driver_version, late, captures;
static uint64_t memory_bytes, random_state;
static Allocation *allocations;
static size_t n_allocations, room;
static Allocation pinned[4096];
static int n_pinned;
static __thread Device *stack[STACK];
static __thread int depth;
static Kernel **all_kernels;
static int n_kernels;

/* findings */
typedef struct {
    const Kernel *kernel;
    int code;
    char check[16];
} Known;
static Known known[MAX_FINDINGS * 16];
static int n_known;
static char findings[1 << 18];
static size_t findings_end;

void report(const char *check, const Kernel *kernel, int code, const char *format, ...) {
    for (int k = 0; k < n_known; k++)
        if (known[k].kernel == kernel && known[k].code == code && !strcmp(known[k].check, check))
            return;
    if (n_known == MAX_FINDINGS * 16)
        return;
    known[n_known].kernel = kernel, known[n_known].code = code;
    snprintf(known[n_known++].check, 16, "%s", check);
    char line[2048];
    int end = snprintf(line, sizeof line, "%s: ", check);
    va_list arguments;
    va_start(arguments, format);
    end += vsnprintf(line + end, sizeof line - (size_t)end - 1, format, arguments);
    va_end(arguments);
    if (kernel && end < 1500) {
        end += snprintf(line + end, sizeof line - (size_t)end, ", in %.300s", kernel->name);
        if (code >= 0)
            end += snprintf(line + end, sizeof line - (size_t)end, ", PTX line %u: %.200s", kernel->code[code].line,
                            kernel->text[code]);
    }
    if (findings_end + (size_t)end + 2 < sizeof findings)
        findings_end += (size_t)sprintf(findings + findings_end, "%s\n", line);
    const char *path = getenv("SOFTGPU_REPORT");
    FILE *file = path ? fopen(path, "a") : NULL;
    fprintf(file ? file : stderr, file ? "%s\n" : "softgpu: %s\n", line);
    if (file)
        fclose(file);
}

static uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}
static void *reserve(uint64_t bytes) {
    void *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) {
        fprintf(stderr, "softgpu: no address space\n");
        abort();
    }
    return found;
}

/* What is to fail, from SOFTGPU_FAULT: "alloc:3" (the third allocation and all later ones), "launch:5", "lost:7". */
static int fails(const char *what) {
    static int counts[3];
    static const char *const kinds[3] = {"alloc", "launch", "lost"};
    const char *text = getenv("SOFTGPU_FAULT");
    int kind = !strcmp(what, kinds[0]) ? 0 : !strcmp(what, kinds[1]) ? 1 : 2;
    counts[kind]++;
    const char *found = text ? strstr(text, what) : NULL;
    return found && found[strlen(what)] == ':' && counts[kind] >= atoi(found + strlen(what) + 1);
}

#define ENTER pthread_mutex_lock(&lock)
#define LEAVE(value)                                                                                                   \
    do {                                                                                                               \
        CUresult result_ = (value);                                                                                    \
        pthread_mutex_unlock(&lock);                                                                                   \
        return result_;                                                                                                \
    } while (0)
#define NEED_CONTEXT                                                                                                   \
    if (!depth || !stack[depth - 1])                                                                                   \
    LEAVE(CUDA_ERROR_INVALID_CONTEXT)
#define NOW (stack[depth - 1])
#define INDEX(device) ((int)((device) - devices))

static CUresult f_cuInit(unsigned flags) {
    ENTER;
    (void)flags;
    if (!started) {
        n_devices = (int)setting("SOFTGPU_DEVICES", 1);
        if (n_devices > MAX_DEVICES)
            n_devices = MAX_DEVICES;
        const char *capability = getenv("SOFTGPU_CAPABILITY"); /* of each, with commas between; the last of the rest */
        for (int k = 0; k < n_devices; k++) {
            char *end = NULL;
            capabilities[k] = capability && *capability ? (int)strtol(capability, &end, 10) : k ? capabilities[k - 1] : 90;
            if (end)
                capability = *end == ',' ? end + 1 : end;
        }
        multiprocessors = (int)setting("SOFTGPU_MULTIPROCESSORS", 132);
        driver_version = (int)setting("SOFTGPU_DRIVER", 13040);
        memory_bytes = setting("SOFTGPU_MEMORY", 4ull << 30);
        settings.seed = setting("SOFTGPU_SEED", 0);
        random_state = settings.seed + 1;
        const char *order = getenv("SOFTGPU_STREAMS");
        late = !order || !strcmp(order, "now") ? 0 : !strcmp(order, "late") ? 1 : 2;
        const char *checks = getenv("SOFTGPU_CHECKS");
        settings.initcheck = !checks || strstr(checks, "init"), settings.racecheck = !checks || strstr(checks, "race");
        settings.synccheck = !checks || strstr(checks, "sync");
        uint64_t span = (2 * memory_bytes + (1 << 20)) & ~4095ull;
        for (int k = 0; k < n_devices; k++) {
            Memory *m = memories + k;
            m->span = span, m->base = (uint64_t)reserve(span), m->state = reserve(span);
            m->writer = reserve(2 * span), m->reader = reserve(2 * span);
            m->byte_writer = reserve(8 * span), m->byte_reader = reserve(8 * span), m->touched = reserve(span / 8);
            devices[k].legacy = (Stream){.device = k, .blocking = 1};
        }
        started = 1;
    }
    LEAVE(n_devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE);
}
static CUresult f_cuDriverGetVersion(int *version) {
    *version = (int)setting("SOFTGPU_DRIVER", 13040);
    return CUDA_SUCCESS;
}
static CUresult f_cuDeviceGetCount(int *count) {
    if (!started)
        return CUDA_ERROR_NOT_INITIALIZED;
    *count = n_devices;
    return CUDA_SUCCESS;
}
static CUresult f_cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal >= n_devices)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}
/* The first GPU that executes a kernel, -1 if none does. */
static int device_for(const Kernel *kernel) {
    for (int k = 0; k < n_devices; k++)
        if (kernel->target == (uint32_t)capabilities[k])
            return k;
    return -1;
}
static int block_room(int capability) {
    return capability == 75                                            ? 65536
           : capability == 80                                          ? 166912
           : capability == 86 || capability == 89 || capability >= 120 ? 101376
                                                                       : 232448;
}
static int resident_threads(int capability) {
    return capability == 75 ? 1024 : capability == 86 || capability == 89 || capability >= 120 ? 1536 : 2048;
}
static CUresult f_cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (device < 0 || device >= n_devices)
        return CUDA_ERROR_INVALID_DEVICE;
    const int capability = capabilities[device];
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = capability / 10;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = capability % 10;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = multiprocessors;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
        *value = 1024;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
        *value = 64;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
        *value = 2147483647;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
        *value = 65535;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        *value = 49152;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = block_room(capability);
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        *value = block_room(capability) + 1024;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
        *value = 65536;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        *value = resident_threads(capability);
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
        *value = capability == 75 || capability == 86 ? 16 : capability == 89 || capability >= 120 ? 24 : 32;
        break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        *value = 32;
        break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        *value = 50 << 20;
        break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        *value = 1;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}
static CUresult f_cuDeviceGetName(char *name, int length, CUdevice device) {
    (void)device;
    snprintf(name, (size_t)length, "software GPU " TRANSLATION); /* nobody takes images of another translation for this one's */
    return CUDA_SUCCESS;
}
static CUresult f_cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = (char)(device + 1);
    return CUDA_SUCCESS;
}
static CUresult f_cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    (void)device;
    *bytes = memory_bytes;
    return CUDA_SUCCESS;
}
static CUresult f_cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    snprintf(id, (size_t)length, "0000:%02x:00.0", device + 1);
    return CUDA_SUCCESS;
}
static CUresult f_cuDeviceCanAccessPeer(int *can, CUdevice a, CUdevice b) {
    (void)a, (void)b;
    *can = 0;
    return CUDA_SUCCESS;
}

/* contexts: one a device, its primary one */
static CUresult f_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (device < 0 || device >= n_devices)
        return CUDA_ERROR_INVALID_DEVICE;
    devices[device].retained++;
    *context = (CUcontext)(devices + device);
    return CUDA_SUCCESS;
}
static CUresult f_cuDevicePrimaryCtxRelease(CUdevice device) {
    devices[device].retained--;
    return CUDA_SUCCESS;
}
static CUresult f_cuDevicePrimaryCtxReset(CUdevice device) {
    (void)device;
    return CUDA_SUCCESS;
}
static CUresult f_cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0, *active = devices[device].retained > 0;
    return CUDA_SUCCESS;
}
static CUresult f_cuCtxGetCurrent(CUcontext *context) {
    *context = depth ? (CUcontext)stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}
static CUresult f_cuCtxSetCurrent(CUcontext context) {
    if (!depth)
        depth = 1;
    stack[depth - 1] = (Device *)context;
    return CUDA_SUCCESS;
}
static CUresult f_cuCtxPushCurrent(CUcontext context) {
    if (!context || depth == STACK)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = (Device *)context;
    return CUDA_SUCCESS;
}
static CUresult f_cuCtxPopCurrent(CUcontext *context) {
    if (!depth || !stack[depth - 1])
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context)
        *context = (CUcontext)stack[depth];
    return CUDA_SUCCESS;
}
static CUresult f_cuCtxGetDevice(CUdevice *device) {
    if (!depth || !stack[depth - 1])
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = INDEX(NOW);
    return CUDA_SUCCESS;
}
static CUresult f_cuCtxGetFlags(unsigned *flags) {
    *flags = 0;
    return CUDA_SUCCESS;
}
static CUresult f_cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return CUDA_SUCCESS;
}

/* memory */
static Allocation *find(uint64_t address) { /* the allocation that an address is in */
    size_t low = 0, high = n_allocations;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (allocations[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low && address - allocations[low - 1].address < allocations[low - 1].bytes ? allocations + low - 1 : NULL;
}
static CUresult f_cuMemAlloc(CUdeviceptr *pointer, size_t bytes) {
    ENTER;
    NEED_CONTEXT;
    if (NOW->error)
        LEAVE(NOW->error);
    if (captures)
        LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (!bytes)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (fails("alloc") || NOW->used + bytes > memory_bytes)
        LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    Memory *memory = memories + INDEX(NOW);
    uint64_t at = memory->base + GUARD;
    size_t k = 0;
    while (k < n_allocations && allocations[k].address < memory->base)
        k++;
    for (; k < n_allocations && allocations[k].address < memory->base + memory->span;
         k++) { /* the first gap wide enough */
        if (at + bytes + GUARD <= allocations[k].address)
            break;
        at = (allocations[k].address + allocations[k].bytes + GUARD + 511) & ~511ull;
    }
    if (at + bytes + GUARD > memory->base + memory->span)
        LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    if (n_allocations == room)
        allocations = realloc(allocations, (room = 2 * room + 64) * sizeof *allocations);
    memmove(allocations + k + 1, allocations + k, (n_allocations - k) * sizeof *allocations);
    allocations[k] = (Allocation){at, bytes, INDEX(NOW)};
    n_allocations++;
    memset(memory->state + (at - memory->base), ALLOCATED, bytes);
    memset((void *)at, 0xcb, bytes); /* whoever takes it for zeros shall see */
    NOW->used += bytes;
    *pointer = at;
    LEAVE(CUDA_SUCCESS);
}
static void drain_all(int device);
static CUresult f_cuMemFree(CUdeviceptr pointer) { /* of any context: the address tells whose */
    ENTER;
    Allocation *found = find(pointer);
    if (!pointer)
        LEAVE(CUDA_SUCCESS);
    if (!found || found->address != pointer)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    drain_all(found->device);
    Memory *memory = memories + found->device;
    memset(memory->state + (pointer - memory->base), 0, found->bytes);
    devices[found->device].used -= found->bytes;
    uint64_t first = (pointer + 4095) & ~4095ull, last = (pointer + found->bytes) & ~4095ull;
    if (last > first)
        madvise((void *)first, last - first, MADV_DONTNEED);
    memmove(found, found + 1, (n_allocations - 1 - (size_t)(found - allocations)) * sizeof *found);
    n_allocations--;
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuMemGetInfo(size_t *free, size_t *total) {
    ENTER;
    NEED_CONTEXT;
    *total = memory_bytes, *free = memory_bytes - NOW->used;
    LEAVE(NOW->error);
}
static CUresult f_cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer) {
    Allocation *found = find(pointer);
    if (!found)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = found->address;
    if (bytes)
        *bytes = found->bytes;
    return CUDA_SUCCESS;
}
static CUresult f_cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    ENTER;
    (void)flags;
    if (n_pinned == 4096)
        LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    *pointer = aligned_alloc(4096, (bytes + 4095) & ~4095ul);
    pinned[n_pinned++] = (Allocation){(uint64_t)*pointer, bytes, 0};
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuMemAllocHost(void **pointer, size_t bytes) { return f_cuMemHostAlloc(pointer, bytes, 0); }
static CUresult f_cuMemFreeHost(void *pointer) {
    ENTER;
    for (int k = 0; k < n_pinned; k++)
        if (pinned[k].address == (uint64_t)pointer) {
            for (int d = 0; d < n_devices; d++)
                drain_all(d);
            free(pointer);
            pinned[k] = pinned[--n_pinned];
            LEAVE(CUDA_SUCCESS);
        }
    LEAVE(CUDA_ERROR_INVALID_VALUE);
}
static int is_pinned(const void *pointer) {
    for (int k = 0; k < n_pinned; k++)
        if ((uint64_t)pointer - pinned[k].address < pinned[k].bytes)
            return 1;
    return 0;
}
static CUresult f_cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    Allocation *found = find(pointer);
    if (!found && !is_pinned((void *)pointer))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)value = (CUcontext)(devices + (found ? found->device : 0));
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = found ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = found ? found->device : 0;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(uint64_t *)value = pointer;
        break;
    default:
        *(unsigned *)value = 0;
    }
    return CUDA_SUCCESS;
}
static CUresult f_cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values,
                                         CUdeviceptr pointer) {
    for (unsigned k = 0; k < count; k++)
        if (f_cuPointerGetAttribute(values[k], attributes[k], pointer) != CUDA_SUCCESS)
            *(unsigned *)values[k] = 0;
    return CUDA_SUCCESS;
}

/* Whether a range is one device's, all of it allocated; tells where it is another device's. */
static int covers(uint64_t pointer, uint64_t bytes, int device, const char *verb) {
    Allocation *found = find(pointer);
    if (!found || pointer + bytes > found->address + found->bytes) {
        report("memcheck", NULL, -1, "%s of %llu bytes at 0x%llx, outside every allocation", verb,
               (unsigned long long)bytes, (unsigned long long)pointer);
        return 0;
    }
    if (found->device != device)
        report("contextcheck", NULL, -1, "%s of %llu bytes of GPU %d, in the context of GPU %d", verb,
               (unsigned long long)bytes, found->device, device);
    return 1;
}

/* work: done in the order of its stream */
static void perform(Op *op, int device);
static void drain(Stream *stream) {
    while (stream->first) {
        Op *op = stream->first;
        stream->first = op->next;
        if (!stream->first)
            stream->last = NULL;
        perform(op, stream->device);
        if (op->kind == LAUNCH)
            free(op->launch.params);
        free(op->staged), free(op);
    }
}
static void drain_all(int device) {
    Stream *own[512] = {&devices[device].legacy};
    int count = 1;
    for (Stream *s = streams; s && count < 512; s = s->next)
        if (s->device == device)
            own[count++] = s;
    while (count) {
        int k = late == 2 ? (int)random_below(&random_state, (uint64_t)count) : count - 1;
        drain(own[k]);
        own[k] = own[--count];
    }
}
static void copy_state(uint64_t to, uint64_t from, uint64_t bytes) {
    Allocation *a = find(to), *b = find(from);
    memcpy(memories[a->device].state + (to - memories[a->device].base),
           memories[b->device].state + (from - memories[b->device].base), bytes);
}
static int is_written(uint64_t from, uint64_t bytes) {
    Memory *m = memories + find(from)->device;
    const uint8_t *state = m->state + (from - m->base);
    for (uint64_t k = 0; k < bytes; k++)
        if (!(state[k] & WRITTEN))
            return 0;
    return 1;
}
static void wrote(uint64_t to, uint64_t bytes) {
    Memory *m = memories + find(to)->device;
    memset(m->state + (to - m->base), ALLOCATED | WRITTEN, bytes);
}
static void perform(Op *op, int device) {
    if (devices[device].error)
        return;
    if (fails("lost")) {
        devices[device].error = CUDA_ERROR_UNKNOWN;
        return;
    }
    switch (op->kind) {
    case LAUNCH:
        if (fails("launch"))
            devices[device].error = CUDA_ERROR_LAUNCH_FAILED;
        else if (execute(&op->launch))
            devices[device].error = CUDA_ERROR_ILLEGAL_ADDRESS;
        break;
    case COPY_TO:
        memcpy((void *)op->to, op->staged ? op->staged : op->host, op->bytes), wrote(op->to, op->bytes);
        break;
    case COPY_FROM:
        if (settings.initcheck && !is_written(op->from, op->bytes))
            report("initcheck", NULL, -1, "a copy to the host of %llu bytes at 0x%llx, not all of which were written",
                   (unsigned long long)op->bytes, (unsigned long long)op->from);
        memcpy(op->host, (void *)op->from, op->bytes);
        break;
    case COPY_WITHIN:
        memmove((void *)op->to, (void *)op->from, op->bytes), copy_state(op->to, op->from, op->bytes);
        break;
    case SET:
        memset((void *)op->to, op->value, op->bytes), wrote(op->to, op->bytes);
        break;
    case GRAPH:
        for (Op *node = op->exec->first; node; node = node->next)
            perform(node, device);
        break;
    case RECORD:
        op->event->ticks = clock_ticks, op->event->recorded = 1;
        break;
    }
}
static Stream *resolve(CUstream stream) {
    if (stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
        return &NOW->legacy;
    return (Stream *)stream;
}
/* Put work on a stream, or in the graph that is captured from it. Takes what `op` points to. */
static CUresult enqueue(Stream *stream, const Op *op) {
    Device *device = devices + stream->device;
    Op *made = malloc(sizeof *made);
    *made = *op;
    made->next = NULL;
    if (stream->capture) {
        Graph *graph = stream->capture;
        if (graph->last)
            graph->last->next = made;
        else
            graph->first = made;
        graph->last = made, graph->count++;
        return CUDA_SUCCESS;
    }
    if (captures && stream == &device->legacy) {
        free(made);
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (device->error) {
        free(made);
        return device->error;
    }
    if (stream == &device->legacy) { /* waits for the streams that are not non-blocking, and they for it */
        for (Stream *s = streams; s; s = s->next)
            if (s->device == stream->device && s->blocking)
                drain(s);
    } else if (stream->blocking)
        drain(&device->legacy);
    if (stream->last)
        stream->last->next = made;
    else
        stream->first = made;
    stream->last = made;
    if (!late || (late == 2 && random_below(&random_state, 2)))
        drain(stream);
    return CUDA_SUCCESS;
}
/* A copy that the host waits for: done on the legacy stream, which does not wait for non-blocking ones. */
static CUresult copy(Kind kind, uint64_t to, uint64_t from, void *host, size_t bytes, Stream *stream, int wait) {
    if (!bytes)
        return CUDA_SUCCESS;
    if (captures && wait)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    Op op = {.kind = kind, .to = to, .from = from, .bytes = bytes, .host = host};
    int device = stream->device;
    if (kind != COPY_FROM &&
        !covers(to, bytes, device, kind == COPY_TO ? "a copy to the GPU" : "a copy within the GPU"))
        return CUDA_ERROR_INVALID_VALUE;
    if (kind != COPY_TO &&
        !covers(from, bytes, device, kind == COPY_FROM ? "a copy to the host" : "a copy within the GPU"))
        return CUDA_ERROR_INVALID_VALUE;
    int paged = kind == COPY_TO && !is_pinned(host);
    if (paged)
        memcpy(op.staged = malloc(bytes), host, bytes);
    CUresult result = enqueue(stream, &op);
    if (result) {
        free(op.staged);
        return result;
    }
    if ((wait && !paged && kind != COPY_WITHIN) || (kind == COPY_FROM && !is_pinned(host)))
        drain(stream);
    return devices[device].error;
}
static CUresult f_cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    ENTER;
    NEED_CONTEXT;
    LEAVE(copy(COPY_TO, to, 0, (void *)from, bytes, &NOW->legacy, 1));
}
static CUresult f_cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    ENTER;
    NEED_CONTEXT;
    LEAVE(copy(COPY_FROM, 0, from, to, bytes, &NOW->legacy, 1));
}
static CUresult f_cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    ENTER;
    NEED_CONTEXT;
    LEAVE(copy(COPY_WITHIN, to, from, NULL, bytes, &NOW->legacy, 1));
}
static CUresult f_cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    ENTER;
    NEED_CONTEXT;
    LEAVE(copy(COPY_TO, to, 0, (void *)from, bytes, resolve(stream), 0));
}
static CUresult f_cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER;
    NEED_CONTEXT;
    LEAVE(copy(COPY_FROM, 0, from, to, bytes, resolve(stream), 0));
}
static CUresult f_cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER;
    NEED_CONTEXT;
    LEAVE(copy(COPY_WITHIN, to, from, NULL, bytes, resolve(stream), 0));
}
static CUresult set(CUdeviceptr to, unsigned char value, size_t bytes, Stream *stream) {
    if (!covers(to, bytes, stream->device, "a fill"))
        return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, &(Op){.kind = SET, .to = to, .bytes = bytes, .value = value});
}
static CUresult f_cuMemsetD8(CUdeviceptr to, unsigned char value, size_t bytes) {
    ENTER;
    NEED_CONTEXT;
    LEAVE(set(to, value, bytes, &NOW->legacy));
}
static CUresult f_cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    ENTER;
    NEED_CONTEXT;
    LEAVE(set(to, value, bytes, resolve(stream)));
}

/* streams and events */
static CUresult f_cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    ENTER;
    NEED_CONTEXT;
    Stream *made = calloc(1, sizeof *made);
    *made = (Stream){.device = INDEX(NOW),
                     .blocking = !(flags & CU_STREAM_NON_BLOCKING),
                     .next = streams,
                     .flags = flags,
                     .priority = priority};
    streams = made;
    *stream = (CUstream)made;
    LEAVE(NOW->error);
}
static CUresult f_cuStreamCreate(CUstream *stream, unsigned flags) {
    return f_cuStreamCreateWithPriority(stream, flags, 0);
}
static CUresult f_cuStreamDestroy(CUstream stream) {
    ENTER;
    drain((Stream *)stream);
    for (Stream **s = &streams; *s; s = &(*s)->next)
        if (*s == (Stream *)stream) {
            *s = (*s)->next;
            break;
        }
    LEAVE(CUDA_SUCCESS); /* its memory stays: an event may name it */
}
static CUresult f_cuStreamGetCtx(CUstream stream, CUcontext *context) {
    ENTER;
    NEED_CONTEXT;
    *context = (CUcontext)(devices + resolve(stream)->device);
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuStreamGetDevice(CUstream stream, CUdevice *device) {
    ENTER;
    NEED_CONTEXT;
    *device = resolve(stream)->device;
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuStreamGetFlags(CUstream stream, unsigned *flags) {
    ENTER;
    NEED_CONTEXT;
    *flags = resolve(stream)->flags;
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuStreamGetPriority(CUstream stream, int *priority) {
    ENTER;
    NEED_CONTEXT;
    *priority = resolve(stream)->priority;
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuStreamSynchronize(CUstream stream) {
    ENTER;
    NEED_CONTEXT;
    Stream *s = resolve(stream);
    if (s->capture)
        LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    drain(s);
    LEAVE(devices[s->device].error);
}
static CUresult f_cuStreamQuery(CUstream stream) { return f_cuStreamSynchronize(stream); }
static CUresult f_cuCtxSynchronize(void) {
    ENTER;
    NEED_CONTEXT;
    if (captures)
        LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    drain_all(INDEX(NOW));
    LEAVE(NOW->error);
}
static CUresult f_cuEventCreate(CUevent *event, unsigned flags) {
    ENTER;
    NEED_CONTEXT;
    (void)flags;
    Event *made = calloc(1, sizeof *made);
    made->device = INDEX(NOW);
    *event = (CUevent)made;
    LEAVE(NOW->error);
}
static CUresult f_cuEventDestroy(CUevent event) {
    ENTER;
    Event *e = (Event *)event;
    if (e->stream)
        drain(e->stream);
    free(e);
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuEventRecord(CUevent event, CUstream stream) {
    ENTER;
    NEED_CONTEXT;
    Event *e = (Event *)event;
    Stream *s = resolve(stream);
    if (e->device != s->device)
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (s->capture)
        LEAVE(CUDA_SUCCESS);
    e->stream = s, e->recorded = 0;
    LEAVE(enqueue(s, &(Op){.kind = RECORD, .event = e}));
}
static CUresult f_cuEventSynchronize(CUevent event) {
    ENTER;
    Event *e = (Event *)event;
    if (e->stream)
        drain(e->stream);
    LEAVE(devices[e->device].error);
}
static CUresult f_cuEventQuery(CUevent event) { return f_cuEventSynchronize(event); }
static CUresult f_cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    ENTER;
    NEED_CONTEXT;
    (void)flags;
    (void)stream;
    Event *e = (Event *)event;
    if (e->stream && e->stream != resolve(stream))
        drain(e->stream);
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    Event *a = (Event *)start, *b = (Event *)end;
    if (!a->recorded || !b->recorded)
        return CUDA_ERROR_NOT_READY;
    *milliseconds =
        (float)((double)(b->ticks - a->ticks) * 1e-6); /* as if an instruction of a warp took a nanosecond */
    return CUDA_SUCCESS;
}

/* modules */
typedef struct {
    const uint8_t *at;
} Reader;
static uint32_t read_u32(Reader *r) {
    uint32_t v;
    memcpy(&v, r->at, 4);
    r->at += 4;
    return v;
}
static uint64_t read_u64(Reader *r) {
    uint64_t v;
    memcpy(&v, r->at, 8);
    r->at += 8;
    return v;
}
static char *read_text(Reader *r) {
    uint32_t n = read_u32(r);
    char *text = (char *)r->at;
    r->at += n;
    return text;
}
static Constant *read_constants(Reader *r, uint32_t *count) {
    *count = read_u32(r);
    Constant *found = calloc(*count + 1, sizeof *found);
    for (uint32_t k = 0; k < *count; k++)
        found[k].place = read_u32(r), found[k].width = read_u32(r), found[k].value = read_u64(r);
    return found;
}
static CUresult load_kernel(Reader *r, Kernel *k) {
    k->name = read_text(r), k->target = read_u32(r);
    k->registers = read_u32(r), k->shared_bytes = read_u32(r), k->local_bytes = read_u32(r),
    k->max_threads = read_u32(r);
    k->shared_size = read_u32(r), k->local_size = read_u32(r), k->file_bytes = read_u32(r);
    k->n_params = read_u32(r);
    k->param_size = calloc(k->n_params + 1, 4), k->param_offset = calloc(k->n_params + 1, 4);
    for (uint32_t n = 0; n < k->n_params; n++)
        k->param_size[n] = read_u32(r);
    for (uint32_t n = 0; n < k->n_params; n++)
        k->param_offset[n] = read_u32(r), k->param_bytes = k->param_offset[n] + k->param_size[n];
    k->constants = read_constants(r, &k->n_constants), k->loads = read_constants(r, &k->n_loads);
    uint32_t n_operations = read_u32(r);
    int *operations = calloc(n_operations + 1, sizeof *operations);
    for (uint32_t n = 0; n < n_operations; n++) {
        const char *name = read_text(r);
        operations[n] = find_operation(name);
        if (operations[n] < 0) {
            report("assembler", k, -1, "no operation %s", name);
            return CUDA_ERROR_INVALID_IMAGE;
        }
    }
    k->n_code = read_u32(r);
    k->code = calloc(k->n_code, sizeof *k->code), k->text = calloc(k->n_code, sizeof *k->text),
    k->count = calloc(k->n_code, sizeof *k->count);
    for (uint32_t n = 0; n < k->n_code; n++) {
        memcpy(k->code + n, r->at, sizeof *k->code);
        r->at += sizeof *k->code;
        k->code[n].op = (uint16_t)operations[k->code[n].op];
        k->text[n] = read_text(r);
    }
    free(operations);
    return device_for(k) < 0 ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_SUCCESS;
}
static CUresult f_cuLibraryLoadData(CUlibrary *library, const void *code, void *a, void *b, unsigned n, void *c,
                                    void *d, unsigned m) {
    ENTER;
    (void)a, (void)b, (void)n, (void)c, (void)d, (void)m;
    if (memcmp(code, "SOFTGPU1", 8)) {
        report("assembler", NULL, -1,
               "a module that is not for the software GPU: the import hook of softgpu is not at work");
        LEAVE(CUDA_ERROR_INVALID_IMAGE);
    }
    uint64_t size;
    memcpy(&size, (const char *)code + 8, 8);
    Library *made = calloc(1, sizeof *made);
    made->data = malloc(size);
    memcpy(made->data, (const char *)code + 16, size);
    Reader reader = {made->data};
    Kernel *kernel = calloc(1, sizeof *kernel);
    CUresult result = load_kernel(&reader, kernel);
    if (result)
        LEAVE(result);
    made->kernels = calloc(1, sizeof *made->kernels), made->kernels[0] = kernel, made->count = 1;
    all_kernels = realloc(all_kernels, (size_t)(n_kernels + 1) * sizeof *all_kernels);
    all_kernels[n_kernels++] = kernel;
    *library = (CUlibrary)made;
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuLibraryUnload(CUlibrary library) {
    (void)library;
    return CUDA_SUCCESS;
} /* counts and texts stay */
static CUresult f_cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    Library *l = (Library *)library;
    for (int k = 0; k < l->count; k++)
        if (!strcmp(l->kernels[k]->name, name)) {
            *kernel = (CUkernel)l->kernels[k];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}
static CUresult f_cuLibraryGetKernelCount(unsigned *count, CUlibrary library) {
    *count = (unsigned)((Library *)library)->count;
    return CUDA_SUCCESS;
}
static CUresult f_cuLibraryGetModule(CUmodule *module, CUlibrary library) {
    *module = (CUmodule)library;
    return CUDA_SUCCESS;
}
static CUresult f_cuLibraryGetGlobal(CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name) {
    (void)pointer, (void)bytes, (void)library, (void)name;
    return CUDA_ERROR_NOT_FOUND;
}
static CUresult f_cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}
static CUresult f_cuKernelGetLibrary(CUlibrary *library, CUkernel kernel) {
    (void)kernel;
    *library = NULL;
    return CUDA_ERROR_NOT_SUPPORTED;
}
static CUresult f_cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    Kernel *kernel = (Kernel *)function;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = (int)kernel->registers;
        break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = (int)kernel->shared_bytes;
        break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        *value = (int)kernel->local_bytes;
        break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = kernel->max_threads ? (int)kernel->max_threads : 1024;
        break;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        *value = (int)kernel->target;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}
static CUresult f_cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device) {
    (void)device;
    return f_cuFuncGetAttribute(value, attribute, (CUfunction)kernel);
}
static CUresult f_cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
    (void)attribute, (void)value, (void)kernel, (void)device;
    return CUDA_SUCCESS;
}
static CUresult f_cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size) {
    Kernel *k = (Kernel *)kernel;
    if (index >= k->n_params)
        return CUDA_ERROR_INVALID_VALUE;
    *offset = k->param_offset[index], *size = k->param_size[index];
    return CUDA_SUCCESS;
}
static CUresult f_cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    return f_cuKernelGetParamInfo((CUkernel)function, index, offset, size);
}
static CUresult f_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int threads,
                                                              size_t dynamic) {
    Kernel *k = (Kernel *)function;
    int warps = (threads + 31) / 32, registers = ((int)k->registers * 32 + 255) / 256 * 256 * warps;
    int device = device_for(k), capability = capabilities[device];
    int by_threads = resident_threads(capability) / (warps * 32), by_registers = registers ? 65536 / registers : by_threads;
    int shared = (int)(k->shared_bytes + dynamic + 1024), by_shared = (block_room(capability) + 1024) / shared, most;
    f_cuDeviceGetAttribute(&most, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, device);
    *count = by_threads < by_registers ? by_threads : by_registers;
    if (by_shared < *count)
        *count = by_shared;
    if (most < *count)
        *count = most;
    return CUDA_SUCCESS;
}
static CUresult f_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, CUfunction function, int threads,
                                                                       size_t dynamic, unsigned flags) {
    (void)flags;
    return f_cuOccupancyMaxActiveBlocksPerMultiprocessor(count, function, threads, dynamic);
}

static CUresult launch(Kernel *kernel, const unsigned *grid, const unsigned *block, unsigned dynamic, CUstream handle,
                       void **params) {
    Stream *stream = resolve(handle);
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2], blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    if (stream->device != INDEX(NOW)) {
        report("contextcheck", kernel, -1, "a launch on a stream of GPU %d, in the context of GPU %d", stream->device,
               INDEX(NOW));
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (kernel->target != (uint32_t)capabilities[stream->device])
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    if (!threads || threads > 1024 || !blocks || blocks > 2147483647 || grid[1] > 65535 || grid[2] > 65535)
        return CUDA_ERROR_INVALID_VALUE;
    if (kernel->max_threads && threads > kernel->max_threads)
        return CUDA_ERROR_INVALID_VALUE;
    if (kernel->registers * ((threads + 31) / 32 * 32) > 65536)
        return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    if (kernel->shared_size + dynamic > 49152)
        return CUDA_ERROR_INVALID_VALUE;
    Op op = {.kind = LAUNCH,
             .launch = {.kernel = kernel,
                        .grid = {grid[0], grid[1], grid[2]},
                        .block = {block[0], block[1], block[2]},
                        .dynamic_shared = dynamic,
                        .memory = memories + stream->device,
                        .memories = memories,
                        .device = stream->device,
                        .devices = n_devices}};
    op.launch.params = calloc(kernel->param_bytes + 8, 1);
    for (uint32_t k = 0; k < kernel->n_params; k++)
        memcpy(op.launch.params + kernel->param_offset[k], params[k], kernel->param_size[k]);
    CUresult result = enqueue(stream, &op);
    if (result)
        free(op.launch.params);
    return result;
}
static CUresult f_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
    ENTER;
    NEED_CONTEXT;
    (void)extra;
    const unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ},
                   block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
    LEAVE(launch((Kernel *)function, grid, block, config->sharedMemBytes, config->hStream, params));
}
static CUresult f_cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                 unsigned bz, unsigned dynamic, CUstream stream, void **params, void **extra) {
    ENTER;
    NEED_CONTEXT;
    (void)extra;
    LEAVE(launch((Kernel *)function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, dynamic, stream, params));
}

/* graphs: what is captured from one stream, in its order */
static CUresult f_cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    ENTER;
    NEED_CONTEXT;
    Stream *s = resolve(stream);
    if (s == &NOW->legacy)
        LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (s->capture)
        LEAVE(CUDA_ERROR_ILLEGAL_STATE);
    drain(s);
    s->capture = calloc(1, sizeof *s->capture), s->mode = mode;
    captures++;
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    ENTER;
    NEED_CONTEXT;
    Stream *s = resolve(stream);
    if (!s->capture)
        LEAVE(CUDA_ERROR_ILLEGAL_STATE);
    *graph = (CUgraph)s->capture;
    s->capture = NULL;
    captures--;
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    ENTER;
    NEED_CONTEXT;
    *status = resolve(stream)->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    LEAVE(CUDA_SUCCESS);
}
static CUresult f_cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                         void *dependencies, void *edges, size_t *count) {
    ENTER;
    NEED_CONTEXT;
    (void)dependencies, (void)edges;
    Stream *s = resolve(stream);
    *status = s->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    if (id)
        *id = (cuuint64_t)s->capture;
    if (graph)
        *graph = (CUgraph)s->capture;
    if (count)
        *count = 0;
    LEAVE(CUDA_SUCCESS);
}
static CUresult instantiate(CUgraphExec *exec, CUgraph graph) {
    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    Exec *made = calloc(1, sizeof *made);
    Op **end = &made->first;
    for (Op *op = ((Graph *)graph)->first; op; op = op->next) {
        *end = malloc(sizeof **end);
        **end = *op;
        (*end)->next = NULL;
        end = &(*end)->next;
    }
    *exec = (CUgraphExec)made;
    return CUDA_SUCCESS;
}
static CUresult f_cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph,
                                               CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    ENTER;
    CUresult result = instantiate(exec, graph);
    params->result_out = result ? CUDA_GRAPH_INSTANTIATE_ERROR : CUDA_GRAPH_INSTANTIATE_SUCCESS;
    LEAVE(result);
}
static CUresult f_cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    ENTER;
    (void)flags;
    LEAVE(instantiate(exec, graph));
}
static CUresult f_cuGraphUpload(CUgraphExec exec, CUstream stream) {
    (void)exec, (void)stream;
    return CUDA_SUCCESS;
}
static CUresult f_cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    ENTER;
    NEED_CONTEXT;
    LEAVE(enqueue(resolve(stream), &(Op){.kind = GRAPH, .exec = (Exec *)exec}));
}
static CUresult f_cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    (void)nodes;
    *count = ((Graph *)graph)->count;
    return CUDA_SUCCESS;
}
static CUresult f_cuGraphDestroy(CUgraph graph) {
    (void)graph;
    return CUDA_SUCCESS;
} /* arguments are shared with what was instantiated */
static CUresult f_cuGraphExecDestroy(CUgraphExec exec) {
    ENTER;
    (void)exec;
    for (int k = 0; k < n_devices; k++)
        drain_all(k);
    LEAVE(CUDA_SUCCESS);
}

/* Objects that live as long as a graph: never destroyed, as graphs are not. */
static CUresult f_cuUserObjectCreate(CUuserObject *object, void *pointer, CUhostFn destroy, unsigned count,
                                     unsigned flags) {
    (void)destroy, (void)count, (void)flags;
    *object = (CUuserObject)pointer;
    return CUDA_SUCCESS;
}
static CUresult f_cuUserObjectRelease(CUuserObject object, unsigned count) {
    (void)object, (void)count;
    return CUDA_SUCCESS;
}
static CUresult f_cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
    (void)graph, (void)object, (void)count, (void)flags;
    return CUDA_SUCCESS;
}
static CUresult f_cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned count) {
    (void)graph, (void)object, (void)count;
    return CUDA_SUCCESS;
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};
static CUresult f_cuGetErrorName(CUresult error, const char **name) {
    for (size_t k = 0; k < sizeof errors / sizeof *errors; k++)
        if (errors[k].code == error) {
            *name = errors[k].name;
            return CUDA_SUCCESS;
        }
    *name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}
static CUresult f_cuGetErrorString(CUresult error, const char **text) {
    for (size_t k = 0; k < sizeof errors / sizeof *errors; k++)
        if (errors[k].code == error) {
            *text = errors[k].text;
            return CUDA_SUCCESS;
        }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

#define FUNCTIONS(X)                                                                                                   \
    X(cuInit)                                                                                                          \
    X(cuDriverGetVersion)                                                                                              \
    X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetAttribute) X(cuDeviceGetName) X(cuDeviceGetUuid)                   \
        X(cuDeviceTotalMem) X(cuDeviceGetPCIBusId) X(cuDeviceCanAccessPeer) X(cuDevicePrimaryCtxRetain) X(             \
            cuDevicePrimaryCtxRelease) X(cuDevicePrimaryCtxReset) X(cuDevicePrimaryCtxGetState) X(cuCtxGetCurrent)     \
            X(cuCtxSetCurrent) X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuCtxGetDevice) X(cuCtxGetFlags) X(            \
                cuCtxSynchronize) X(cuCtxGetStreamPriorityRange) X(cuMemAlloc) X(cuMemFree) X(cuMemGetInfo)            \
                X(cuMemGetAddressRange) X(cuMemHostAlloc) X(cuMemAllocHost) X(cuMemFreeHost) X(cuPointerGetAttribute)  \
                    X(cuPointerGetAttributes) X(cuMemcpyHtoD) X(cuMemcpyDtoH) X(cuMemcpyDtoD) X(cuMemcpyHtoDAsync) X(  \
                        cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync) X(cuMemsetD8) X(cuMemsetD8Async) X(cuStreamCreate)     \
                        X(cuStreamCreateWithPriority) X(cuStreamDestroy) X(cuStreamGetCtx) X(cuStreamGetDevice) X(     \
                            cuStreamGetFlags) X(cuStreamGetPriority) X(cuStreamSynchronize) X(cuStreamQuery)           \
                            X(cuStreamWaitEvent) X(cuStreamBeginCapture) X(cuStreamEndCapture) X(cuStreamIsCapturing)  \
                                X(cuStreamGetCaptureInfo) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord)          \
                                    X(cuEventSynchronize) X(cuEventQuery) X(cuEventElapsedTime) X(cuLibraryLoadData)   \
                                        X(cuLibraryUnload) X(cuLibraryGetKernel) X(cuLibraryGetKernelCount)            \
                                            X(cuLibraryGetModule) X(cuLibraryGetGlobal) X(cuKernelGetFunction) X(      \
                                                cuKernelGetLibrary) X(cuKernelGetAttribute) X(cuKernelSetAttribute)    \
                                                X(cuKernelGetParamInfo) X(cuFuncGetAttribute) X(cuFuncGetParamInfo)    \
                                                    X(cuOccupancyMaxActiveBlocksPerMultiprocessor)                     \
                                                        X(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) X(     \
                                                            cuLaunchKernel) X(cuLaunchKernelEx) X(cuGraphInstantiate)  \
                                                            X(cuGraphInstantiateWithParams) X(cuGraphUpload)           \
                                                                X(cuGraphLaunch) X(cuGraphGetNodes) X(cuGraphDestroy)  \
                                                                    X(cuGraphExecDestroy) X(cuUserObjectCreate)        \
                                                                        X(cuUserObjectRelease)                         \
                                                                            X(cuGraphRetainUserObject)                 \
                                                                                X(cuGraphReleaseUserObject)            \
                                                                                    X(cuGetErrorName)                  \
                                                                                        X(cuGetErrorString)
#define ENTRY(name) {#name, (void *)f_##name},
static const struct {
    const char *name;
    void *function;
} functions[] = {FUNCTIONS(ENTRY){"cuGraphInstantiateWithFlags", (void *)f_cuGraphInstantiate}};

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    (void)version, (void)flags;
    *function = NULL;
    if (status)
        *status = CU_GET_PROC_ADDRESS_SUCCESS;
    if (!strcmp(symbol, "cuGetProcAddress"))
        *function = (void *)cuGetProcAddress_v2;
    for (size_t k = 0; k < sizeof functions / sizeof *functions; k++)
        if (!strcmp(functions[k].name, symbol))
            *function = functions[k].function;
    if (!*function && getenv("SOFTGPU_TRACE"))
        fprintf(stderr, "softgpu: no %s\n", symbol);
    if (!*function && status)
        *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS; /* whoever calls what is not there is told so by name, by cuda-bindings */
}

/* for Python: see `softgpu` */
const char *softgpu_findings(void) { return findings; }
void softgpu_note(const char *check, const char *text) {
    pthread_mutex_lock(&lock);
    report(check, NULL, -2 - n_known, "%s", text);
    pthread_mutex_unlock(&lock);
}
void softgpu_revive(void) { /* forget all findings and faults, as a new process would */
    pthread_mutex_lock(&lock);
    n_known = 0, findings_end = 0, findings[0] = 0;
    for (int k = 0; k < n_devices; k++)
        devices[k].error = CUDA_SUCCESS;
    pthread_mutex_unlock(&lock);
}
void softgpu_order(uint64_t seed, int when) { /* from now on; `when` is 0 at once, 1 late, 2 at random */
    pthread_mutex_lock(&lock);
    for (int k = 0; k < n_devices; k++)
        drain_all(k);
    settings.seed = seed, random_state = seed + 1, late = when;
    pthread_mutex_unlock(&lock);
}
uint64_t softgpu_ticks(void) { return clock_ticks; }
void softgpu_count(int on, const uint32_t *latency, uint32_t cached_latency) {
    pthread_mutex_lock(&lock);
    settings.count = on, settings.cached_latency = cached_latency;
    for (int k = 0; latency && k < CLASSES; k++)
        settings.latency[k] = latency[k];
    for (int k = 0; k < n_kernels; k++) {
        memset(&all_kernels[k]->totals, 0, sizeof(Totals));
        memset(all_kernels[k]->count, 0, all_kernels[k]->n_code * sizeof(Count));
    }
    pthread_mutex_unlock(&lock);
}
/* What every kernel that was launched did since counting began, as JSON; by class, the numbers of `Count`. */
const char *softgpu_counts(void) {
    static char *text;
    static size_t size;
    pthread_mutex_lock(&lock);
    free(text);
    FILE *out = open_memstream(&text, &size);
    const char *separator = "[";
    for (int n = 0; n < n_kernels; n++) {
        const Kernel *k = all_kernels[n];
        const Totals *t = &k->totals;
        Count classes[CLASSES] = {0};
        if (!t->launches)
            continue;
        for (uint32_t i = 0; i < k->n_code; i++) {
            Count *c = classes + k->code[i].class;
            c->executed += k->count[i].executed, c->lanes += k->count[i].lanes;
            c->sectors += k->count[i].sectors, c->wavefronts += k->count[i].wavefronts;
        }
        fprintf(out, "%s{\"name\":\"%s\",\"registers\":%u,\"shared_bytes\":%u", separator, k->name, k->registers,
                k->shared_bytes);
#define FIELD(name) fprintf(out, ",\"" #name "\":%llu", (unsigned long long)t->name)
        FIELD(launches), FIELD(blocks), FIELD(block_threads), FIELD(read_sectors), FIELD(written_sectors);
        FIELD(chain), FIELD(longest_chain), FIELD(cycles), FIELD(longest_cycles), FIELD(divergent);
        fprintf(out, ",\"classes\":[");
        for (int c = 0; c < CLASSES; c++)
            fprintf(out, "%s[%llu,%llu,%llu,%llu]", c ? "," : "", (unsigned long long)classes[c].executed,
                    (unsigned long long)classes[c].lanes, (unsigned long long)classes[c].sectors,
                    (unsigned long long)classes[c].wavefronts);
        fprintf(out, "]}");
        separator = ",";
    }
    fprintf(out, *separator == '[' ? "[]" : "]");
    fclose(out);
    pthread_mutex_unlock(&lock);
    return text;
}
