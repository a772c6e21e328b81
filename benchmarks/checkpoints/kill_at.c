/* Kills this process with SIGKILL before the n-th write, fsync, rename, open for writing, mkdir or unlink below a
   folder: LD_PRELOAD it, then call kill_at(n, folder). kill_at(-1, folder) only counts; num_calls() returns the count. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static long armed = 0, limit = -1, calls = 0;
static char prefix[4096];

void kill_at(long n, const char *folder) {
    strncpy(prefix, folder, sizeof(prefix) - 1);
    limit = n, calls = 0, armed = 1;
}

long num_calls(void) { return calls; }

static void count(void) {
    if (limit >= 0 && calls == limit) raise(SIGKILL);
    calls++;
}

static int is_below(const char *path) { return armed && strncmp(path, prefix, strlen(prefix)) == 0; }

static int is_file_below(int fd) {
    char link[64], path[4096];
    if (!armed) return 0;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof(path) - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) { REAL(write); if (is_file_below(fd)) count(); return real(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { REAL(pwrite); if (is_file_below(fd)) count(); return real(fd, data, size, at); }
int fsync(int fd) { REAL(fsync); if (is_file_below(fd)) count(); return real(fd); }
int fdatasync(int fd) { REAL(fdatasync); if (is_file_below(fd)) count(); return real(fd); }
int rename(const char *from, const char *to) { REAL(rename); if (is_below(from) || is_below(to)) count(); return real(from, to); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); if (is_below(path)) count(); return real(path, mode); }
int unlink(const char *path) { REAL(unlink); if (is_below(path)) count(); return real(path); }
int unlinkat(int at, const char *path, int flags) { REAL(unlinkat); if (armed) count(); return real(at, path, flags); }
int rmdir(const char *path) { REAL(rmdir); if (is_below(path)) count(); return real(path); }

static int opens(int flags) { return flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR); }

int open(const char *path, int flags, ...) {
    REAL(open);
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = va_arg(arguments, mode_t);
    va_end(arguments);
    if (opens(flags) && is_below(path)) count();
    return real(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    REAL(open64);
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = va_arg(arguments, mode_t);
    va_end(arguments);
    if (opens(flags) && is_below(path)) count();
    return real(path, flags, mode);
}
