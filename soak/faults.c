/* Makes the nth call of a kind fail: on files, below a folder alone; of pipes and new processes, any once it is armed.
   Preloaded, and armed from Python by fault_arm. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { OPEN, WRITE, SYNC, RENAME, MKDIR, UNLINK, PIPE, SEND, SPAWN, KINDS };
enum { FILES = 65536 };

static char root[4096];
static int kind = -1, at, number, sticky;
static long counts[KINDS];
enum { FILE_BELOW = 1, PIPE_END };
static char ours[FILES];

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void fault_arm(const char *folder, int of_kind, int at_call, int error, int from_then_on) {
    strncpy(root, folder, sizeof root - 1);
    memset(counts, 0, sizeof counts);
    kind = of_kind, at = at_call, number = error, sticky = from_then_on;
}

void fault_counts(long *out) { memcpy(out, counts, sizeof counts); }

static int below(const char *path) { return root[0] && path && !strncmp(path, root, strlen(root)); }

static int is(int what, int file) { return file >= 0 && file < FILES && ours[file] == what; }
static int is_ours(int file) { return is(FILE_BELOW, file); }

static int fails(int of_kind) {
    long call = ++counts[of_kind];
    if (of_kind != kind || !(call == at || (sticky && call > at))) return 0;
    errno = number;
    return 1;
}

static int opened(int file, const char *path) {
    if (file >= 0 && file < FILES) ours[file] = below(path) ? FILE_BELOW : 0;
    return file;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) {
    MODE(flags)
    return below(path) && fails(OPEN) ? -1 : opened(REAL(open)(path, flags, mode), path);
}
int open64(const char *path, int flags, ...) {
    MODE(flags)
    return below(path) && fails(OPEN) ? -1 : opened(REAL(open64)(path, flags, mode), path);
}
int openat(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return below(path) && fails(OPEN) ? -1 : opened(REAL(openat)(folder, path, flags, mode), path);
}
int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return below(path) && fails(OPEN) ? -1 : opened(REAL(openat64)(folder, path, flags, mode), path);
}
int close(int file) {
    if (file >= 0 && file < FILES) ours[file] = 0;
    return REAL(close)(file);
}

/* a disk fills up in the middle of a write */
#define HALF(size) (number == ENOSPC && counts[WRITE] == at && (size) > 1)

ssize_t write(int file, const void *bytes, size_t size) {
    if (is(PIPE_END, file)) return fails(SEND) ? -1 : REAL(write)(file, bytes, size);
    if (!is_ours(file) || !fails(WRITE)) return REAL(write)(file, bytes, size);
    return HALF(size) ? REAL(write)(file, bytes, size / 2) : -1;
}
ssize_t pwrite(int file, const void *bytes, size_t size, off_t where) {
    if (!is_ours(file) || !fails(WRITE)) return REAL(pwrite)(file, bytes, size, where);
    return HALF(size) ? REAL(pwrite)(file, bytes, size / 2, where) : -1;
}
ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t where) {
    if (!is_ours(file) || !fails(WRITE)) return REAL(pwrite64)(file, bytes, size, where);
    return HALF(size) ? REAL(pwrite64)(file, bytes, size / 2, where) : -1;
}
int fsync(int file) { return is_ours(file) && fails(SYNC) ? -1 : REAL(fsync)(file); }
int fdatasync(int file) { return is_ours(file) && fails(SYNC) ? -1 : REAL(fdatasync)(file); }
int ftruncate64(int file, off64_t size) { return is_ours(file) && fails(WRITE) ? -1 : REAL(ftruncate64)(file, size); }
int rename(const char *from, const char *to) { return below(to) && fails(RENAME) ? -1 : REAL(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { return below(path) && fails(MKDIR) ? -1 : REAL(mkdir)(path, mode); }
int unlink(const char *path) { return below(path) && fails(UNLINK) ? -1 : REAL(unlink)(path); }

int pipe2(int ends[2], int flags) {
    if (root[0] && fails(PIPE)) return -1;
    int made = REAL(pipe2)(ends, flags);
    for (int i = 0; root[0] && !made && i < 2; i++)
        if (ends[i] < FILES) ours[ends[i]] = PIPE_END;
    return made;
}
int pipe(int ends[2]) { return pipe2(ends, 0); }
pid_t fork(void) { return root[0] && fails(SPAWN) ? -1 : REAL(fork)(); }
/* a vfork cannot be wrapped: its child would return into this function and leave nothing for its parent to return to */
pid_t vfork(void) { return fork(); }
