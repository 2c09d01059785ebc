// Makes one call on the files of a folder fail. Preloaded into a program, it counts the calls of each kind, and fails the one that
// the environment names:
//
//   FILE_FAULTS_UNDER  the folder
//   FILE_FAULTS_KIND   read (read, pread, mmap), open, write (write, pwrite, ftruncate, fsync, rename, copies);
//                      with any other word no call fails
//   FILE_FAULTS_AT     the number of the call, from 1 on
//   FILE_FAULTS_LOG    a file that gets a line with the call and its file when it fails
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static atomic_long calls;

static int is_under(const char *path) {
    const char *folder = getenv("FILE_FAULTS_UNDER");
    return folder != NULL && path != NULL && strncmp(path, folder, strlen(folder)) == 0;
}

// Whether this call is the one that fails.
static int fails(const char *kind, const char *call, const char *path) {
    const char *wanted = getenv("FILE_FAULTS_KIND"), *at = getenv("FILE_FAULTS_AT"), *log = getenv("FILE_FAULTS_LOG");
    if (wanted == NULL || at == NULL || log == NULL || strcmp(wanted, kind) != 0 || !is_under(path)) return 0;
    if (atomic_fetch_add(&calls, 1) + 1 != atol(at)) return 0;
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s %s\n", call, path);
    // By the system's own calls, because those of the library are replaced here.
    long file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (file >= 0) {
        syscall(SYS_write, file, line, (size_t)length);
        syscall(SYS_close, file);
    }
    return 1;
}

static int fails_on(const char *kind, const char *call, int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(kind, call, path);
}

// The function that this one replaces.
#define NEXT(name) (__extension__(__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define FAIL(code, result) do { errno = (code); return (result); } while (0)

static mode_t mode_of(int flags, va_list rest) {
    return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name)                                              \
    EXPORT int name(const char *path, int flags, ...) {         \
        va_list rest;                                           \
        va_start(rest, flags);                                  \
        mode_t mode = mode_of(flags, rest);                     \
        va_end(rest);                                           \
        if (fails("open", #name, path)) FAIL(EIO, -1);          \
        return NEXT(name)(path, flags, mode);                   \
    }
OPEN(open)
OPEN(open64)

EXPORT ssize_t read(int file, void *into, size_t bytes) {
    if (fails_on("read", "read", file)) FAIL(EIO, -1);
    return NEXT(read)(file, into, bytes);
}

EXPORT ssize_t pread64(int file, void *into, size_t bytes, off64_t at) {
    if (fails_on("read", "pread64", file)) FAIL(EIO, -1);
    return NEXT(pread64)(file, into, bytes, at);
}

EXPORT void *mmap64(void *address, size_t bytes, int protection, int flags, int file, off64_t at) {
    if (file >= 0 && fails_on("read", "mmap64", file)) FAIL(ENOMEM, MAP_FAILED);
    return NEXT(mmap64)(address, bytes, protection, flags, file, at);
}

EXPORT void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t at) {
    if (file >= 0 && fails_on("read", "mmap", file)) FAIL(ENOMEM, MAP_FAILED);
    return NEXT(mmap)(address, bytes, protection, flags, file, at);
}

EXPORT ssize_t write(int file, const void *from, size_t bytes) {
    if (fails_on("write", "write", file)) FAIL(ENOSPC, -1);
    return NEXT(write)(file, from, bytes);
}

EXPORT ssize_t pwrite64(int file, const void *from, size_t bytes, off64_t at) {
    if (fails_on("write", "pwrite64", file)) FAIL(ENOSPC, -1);
    return NEXT(pwrite64)(file, from, bytes, at);
}

EXPORT int ftruncate64(int file, off64_t bytes) {
    if (fails_on("write", "ftruncate64", file)) FAIL(ENOSPC, -1);
    return NEXT(ftruncate64)(file, bytes);
}

EXPORT int fsync(int file) {
    if (fails_on("write", "fsync", file)) FAIL(EIO, -1);
    return NEXT(fsync)(file);
}

EXPORT int rename(const char *from, const char *to) {
    if (fails("write", "rename", to)) FAIL(EIO, -1);
    return NEXT(rename)(from, to);
}

EXPORT ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *to_at, size_t bytes, unsigned flags) {
    if (fails_on("write", "copy_file_range", to)) FAIL(ENOSPC, -1);
    return NEXT(copy_file_range)(from, at, to, to_at, bytes, flags);
}
