/* LD_PRELOAD: makes one call of the C library fail.
 *
 * FAILING_CALLS_FOLDER: a folder. FAILING_CALLS_CONTROL: a file of struct Control, shared with the test.
 * Three kinds of calls are counted, as Control.kinds says:
 * - files below the folder: open, read, write, sync, truncate, rename, unlink, mkdir and mmap. Descriptors are followed
 *   from open to close, so that pipes, sockets and Python's own files do not count;
 * - sockets of TCP: accept, send and receive;
 * - memory: allocations of LARGE bytes and more, so that an interpreter survives that they fail.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct Control {
    _Atomic long first;  /* number of the first call that fails; 0: none */
    _Atomic long count;  /* how many fail, from the first on */
    _Atomic long calls;  /* counted calls */
    _Atomic long failed; /* calls that failed */
    _Atomic long kinds;  /* sum of FILES, SOCKETS and MEMORY */
    char last[64];       /* name of the last call that failed */
};

enum { FILES = 1, SOCKETS = 2, MEMORY = 4 };
#define LARGE (1 << 20)

static struct Control *control;
static const char *folder;
static const char *only; /* names of the calls that count; NULL: all */
static size_t folder_length;
static _Atomic char is_counted[65536];

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void start(void) {
    folder = getenv("FAILING_CALLS_FOLDER");
    const char *file = getenv("FAILING_CALLS_CONTROL");
    only = getenv("FAILING_CALLS_ONLY");
    if (!folder || !file) return;
    folder_length = strlen(folder);
    int fd = REAL(open)(file, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *memory = REAL(mmap)(NULL, sizeof(struct Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REAL(close)(fd);
    if (memory != MAP_FAILED) control = memory;
}

static int is_below(const char *path) {
    return control && path && strncmp(path, folder, folder_length) == 0;
}

static int counts(int fd) {
    return control && fd >= 0 && fd < 65536 && is_counted[fd];
}

/* Counts a call. Returns whether it has to fail, with errno set. */
static int fails(int kind, const char *name, int error) {
    if (!control || !(control->kinds & kind) || (only && !strstr(only, name))) return 0;
    long first = control->first, number = atomic_fetch_add(&control->calls, 1) + 1;
    if (!first || number < first || number >= first + control->count) return 0;
    atomic_fetch_add(&control->failed, 1);
    snprintf(control->last, sizeof control->last, "%s", name);
    errno = error;
    return 1;
}

static int opened(int fd, const char *path) {
    if (fd >= 0 && fd < 65536) is_counted[fd] = is_below(path);
    return fd;
}

#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...) {                          \
        va_list list;                                                     \
        va_start(list, flags);                                            \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list);                                                     \
        if (is_below(path) && fails(FILES, "open", EMFILE)) return -1;           \
        return opened(REAL(name)(path, flags, mode), path);               \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                      \
    int name(int folder_fd, const char *path, int flags, ...) {           \
        va_list list;                                                     \
        va_start(list, flags);                                            \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list);                                                     \
        if (is_below(path) && fails(FILES, "open", EMFILE)) return -1;           \
        return opened(REAL(name)(folder_fd, path, flags, mode), path);    \
    }
OPENAT(openat)
OPENAT(openat64)

int close(int fd) {
    if (fd >= 0 && fd < 65536) is_counted[fd] = 0;
    return REAL(close)(fd);
}

#define ON_FD(type, name, error, parameters, arguments)      \
    type name parameters {                                   \
        if (counts(fd) && fails(FILES, #name, error)) return -1;    \
        return REAL(name) arguments;                         \
    }
ON_FD(ssize_t, read, EIO, (int fd, void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, pread, EIO, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
ON_FD(ssize_t, pread64, EIO, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(ssize_t, write, ENOSPC, (int fd, const void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, pwrite, ENOSPC, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
ON_FD(ssize_t, pwrite64, ENOSPC, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(int, fsync, ENOSPC, (int fd), (fd))
ON_FD(int, fdatasync, ENOSPC, (int fd), (fd))
ON_FD(int, ftruncate, EIO, (int fd, off_t size), (fd, size))
ON_FD(int, ftruncate64, EIO, (int fd, off64_t size), (fd, size))

#define ON_PATH(name, error, parameters, arguments)              \
    int name parameters {                                        \
        if (is_below(path) && fails(FILES, #name, error)) return -1;    \
        return REAL(name) arguments;                             \
    }
ON_PATH(rename, EIO, (const char *path, const char *target), (path, target))
ON_PATH(unlink, EIO, (const char *path), (path))
ON_PATH(mkdir, ENOSPC, (const char *path, mode_t mode), (path, mode))

#define MMAP(name, offset_type)                                                                    \
    void *name(void *at, size_t size, int protection, int flags, int fd, offset_type offset) {     \
        if (!(flags & MAP_ANONYMOUS) && counts(fd) && fails(FILES, "mmap", ENOMEM)) return MAP_FAILED;    \
        if (flags & MAP_ANONYMOUS && size >= LARGE && fails(MEMORY, "mmap", ENOMEM)) return MAP_FAILED;   \
        return REAL(name)(at, size, protection, flags, fd, offset);                                \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

/* Sockets. A Unix socket connects processes of the service; it fails only with its process. */

static int is_tcp(int fd) {
    int domain = 0, before = errno;
    socklen_t size = sizeof domain;
    if (!control || !(control->kinds & SOCKETS)) return 0;
    int found = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
    errno = before;
    return found == 0 && (domain == AF_INET || domain == AF_INET6);
}

#define ON_SOCKET(type, name, error, parameters, arguments)                \
    type name parameters {                                                 \
        if (is_tcp(fd) && fails(SOCKETS, #name, error)) return -1;         \
        return REAL(name) arguments;                                       \
    }
ON_SOCKET(int, accept, EMFILE, (int fd, struct sockaddr *address, socklen_t *size), (fd, address, size))
ON_SOCKET(int, accept4, EMFILE, (int fd, struct sockaddr *address, socklen_t *size, int flags),
          (fd, address, size, flags))
ON_SOCKET(ssize_t, send, ECONNRESET, (int fd, const void *data, size_t size, int flags), (fd, data, size, flags))
ON_SOCKET(ssize_t, sendmsg, ECONNRESET, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
ON_SOCKET(ssize_t, writev, ECONNRESET, (int fd, const struct iovec *pieces, int count), (fd, pieces, count))
ON_SOCKET(ssize_t, recv, ECONNRESET, (int fd, void *data, size_t size, int flags), (fd, data, size, flags))
ON_SOCKET(ssize_t, recvfrom, ECONNRESET,
          (int fd, void *data, size_t size, int flags, struct sockaddr *address, socklen_t *length),
          (fd, data, size, flags, address, length))

/* Memory. dlsym allocates, so that the library's own names are used. */

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *at, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

void *malloc(size_t size) {
    return size >= LARGE && fails(MEMORY, "malloc", ENOMEM) ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    return size && count >= LARGE / size && fails(MEMORY, "calloc", ENOMEM) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *at, size_t size) {
    return size >= LARGE && fails(MEMORY, "realloc", ENOMEM) ? NULL : __libc_realloc(at, size);
}

int posix_memalign(void **at, size_t alignment, size_t size) {
    if (size >= LARGE && fails(MEMORY, "posix_memalign", ENOMEM)) return ENOMEM;
    *at = __libc_memalign(alignment, size);
    return *at || !size ? 0 : ENOMEM;
}
