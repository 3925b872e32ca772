/* Records the file operations below a directory, and lets the N-th of them fail.

   Loaded before the C library (LD_PRELOAD). file_faults_arm() starts it, in the process that is
   to be disturbed. A record of the log: kind, offset, three lengths (int64), path, other path,
   data. Operations happen one at a time, so that the order of the log is theirs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, RESIZE, WRITE, RENAME, UNLINK, MKDIR, RMDIR, SYNC };

static char root[PATH_MAX];
static long fatal, count;
static int reason, log_file = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* number: the operation that fails with this error, from 1 on; 0: none. */
void file_faults_arm(const char *directory, const char *log, long number, int error) {
  snprintf(root, sizeof root, "%s/", directory);
  count = 0; fatal = number; reason = error;
  log_file = syscall(SYS_openat, AT_FDCWD, log, O_CREAT | O_APPEND | O_WRONLY | O_CLOEXEC, 0644);
}

void file_faults_disarm(void) { log_file = -1; }

static void put(const void *data, size_t size) {
  while (size) {
    long done = syscall(SYS_write, log_file, data, size);
    if (done <= 0) abort();
    data = (const char *)data + done; size -= done;
  }
}

static void note(int64_t kind, const char *path, const char *other, int64_t offset,
                 const void *data, size_t size) {
  int64_t head[5] = {kind, offset, strlen(path), strlen(other), size};
  put(head, sizeof head);
  put(path, head[2]); put(other, head[3]); put(data, size);
}

/* Writes the absolute path of a name in a directory; returns whether it lies below the root. */
static int below(int folder, const char *name, char *path) {
  char base[PATH_MAX] = "";
  if (log_file < 0 || !name) return 0;
  if (name[0] != '/') {
    char link[64];
    if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
    else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
      ssize_t n = readlink(link, base, sizeof base - 1);
      if (n < 0) return 0;
      base[n] = 0;
    }
    strncat(base, "/", sizeof base - strlen(base) - 1);
  }
  snprintf(path, PATH_MAX, "%s%s", base, name);
  return !strncmp(path, root, strlen(root));
}

static int below_file(int file, char *path) {
  char link[64];
  if (log_file < 0) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t n = readlink(link, path, PATH_MAX - 1);
  if (n < 0) return 0;
  path[n] = 0;
  size_t own = strlen(root) - 1;  /* the root itself may be fsynced */
  return !strncmp(path, root, own) && (path[own] == '/' || !path[own])
         && !strstr(path, " (deleted)");
}

/* Counts an operation; returns whether it must fail. */
static int fails(void) {
  if (++count != fatal) return 0;
  errno = reason;
  return 1;
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); \
  if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* Performs an operation on a path under the lock, unless it is to fail, and records it. */
#define GUARDED(inside, kind, path, other, call) \
  if (!(inside)) return call; \
  pthread_mutex_lock(&lock); \
  int result = fails() ? -1 : call; \
  if (!result) note(kind, path, other, 0, "", 0); \
  int kept = errno; pthread_mutex_unlock(&lock); errno = kept; \
  return result

int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  char a[PATH_MAX], b[PATH_MAX];
  GUARDED(below(AT_FDCWD, from, a) & below(AT_FDCWD, to, b), RENAME, a, b, real(from, to));
}

int renameat(int x, const char *from, int y, const char *to) {
  REAL(int, "renameat", int, const char *, int, const char *);
  char a[PATH_MAX], b[PATH_MAX];
  GUARDED(below(x, from, a) & below(y, to, b), RENAME, a, b, real(x, from, y, to));
}

int renameat2(int x, const char *from, int y, const char *to, unsigned flags) {
  REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
  char a[PATH_MAX], b[PATH_MAX];
  GUARDED(below(x, from, a) & below(y, to, b), RENAME, a, b, real(x, from, y, to, flags));
}

int unlink(const char *name) {
  REAL(int, "unlink", const char *);
  char a[PATH_MAX];
  GUARDED(below(AT_FDCWD, name, a), UNLINK, a, "", real(name));
}

int unlinkat(int folder, const char *name, int flags) {
  REAL(int, "unlinkat", int, const char *, int);
  char a[PATH_MAX];
  int kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
  GUARDED(below(folder, name, a), kind, a, "", real(folder, name, flags));
}

int rmdir(const char *name) {
  REAL(int, "rmdir", const char *);
  char a[PATH_MAX];
  GUARDED(below(AT_FDCWD, name, a), RMDIR, a, "", real(name));
}

int mkdir(const char *name, mode_t mode) {
  REAL(int, "mkdir", const char *, mode_t);
  char a[PATH_MAX];
  GUARDED(below(AT_FDCWD, name, a), MKDIR, a, "", real(name, mode));
}

int mkdirat(int folder, const char *name, mode_t mode) {
  REAL(int, "mkdirat", int, const char *, mode_t);
  char a[PATH_MAX];
  GUARDED(below(folder, name, a), MKDIR, a, "", real(folder, name, mode));
}

int fsync(int file) {
  REAL(int, "fsync", int);
  char a[PATH_MAX];
  GUARDED(below_file(file, a), SYNC, a, "", real(file));
}

int fdatasync(int file) {
  REAL(int, "fdatasync", int);
  char a[PATH_MAX];
  GUARDED(below_file(file, a), SYNC, a, "", real(file));
}

int ftruncate64(int file, off64_t size) {
  REAL(int, "ftruncate64", int, off64_t);
  char a[PATH_MAX];
  if (!below_file(file, a)) return real(file, size);
  pthread_mutex_lock(&lock);
  int result = fails() ? -1 : real(file, size);
  if (!result) note(RESIZE, a, "", size, "", 0);
  int kept = errno; pthread_mutex_unlock(&lock); errno = kept;
  return result;
}

int ftruncate(int file, off_t size) { return ftruncate64(file, size); }

static int opened(int folder, const char *name, int flags, mode_t mode) {
  REAL(int, "openat64", int, const char *, int, ...);
  char a[PATH_MAX];
  int changes = (flags & O_TRUNC) || (flags & O_CREAT);
  if (!changes || (flags & O_TMPFILE) == O_TMPFILE || !below(folder, name, a))
    return real(folder, name, flags, mode);
  pthread_mutex_lock(&lock);
  struct stat found;
  int is_new = stat(a, &found), result = -1;
  if (!(is_new || (flags & O_TRUNC)) || !fails()) {
    result = real(folder, name, flags, mode);
    if (result >= 0 && is_new) note(CREATE, a, "", 0, "", 0);
    else if (result >= 0 && (flags & O_TRUNC)) note(RESIZE, a, "", 0, "", 0);
  }
  int kept = errno; pthread_mutex_unlock(&lock); errno = kept;
  return result;
}

#define OPEN(name, parameters, folder) \
  int name parameters { \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
      va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); \
    } \
    return opened(folder, path, flags, mode); \
  }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD)
OPEN(openat, (int folder, const char *path, int flags, ...), folder)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder)

/* Writes `size` bytes at an offset, -1 for the place of the file. */
static ssize_t written(int file, const void *data, size_t size, off64_t offset) {
  char a[PATH_MAX];
  int inside = below_file(file, a);
  if (inside) pthread_mutex_lock(&lock);
  ssize_t done = -1;
  if (!inside || !fails()) {
    done = offset < 0 ? syscall(SYS_write, file, data, size)
                      : syscall(SYS_pwrite64, file, data, size, offset);
    if (inside && done >= 0) {
      off64_t at = offset < 0 ? lseek64(file, 0, SEEK_CUR) - done : offset;
      note(WRITE, a, "", at, data, done);
    }
  }
  if (inside) { int kept = errno; pthread_mutex_unlock(&lock); errno = kept; }
  return done;
}

static ssize_t gathered(int file, const struct iovec *parts, int number, off64_t offset) {
  size_t size = 0;
  for (int i = 0; i < number; i++) size += parts[i].iov_len;
  char *all = malloc(size ? size : 1), *end = all;
  for (int i = 0; i < number; i++) {
    memcpy(end, parts[i].iov_base, parts[i].iov_len);
    end += parts[i].iov_len;
  }
  ssize_t done = written(file, all, size, offset);
  int kept = errno; free(all); errno = kept;
  return done;
}

ssize_t write(int file, const void *data, size_t size) { return written(file, data, size, -1); }
ssize_t pwrite(int f, const void *d, size_t n, off_t at) { return written(f, d, n, at); }
ssize_t pwrite64(int f, const void *d, size_t n, off64_t at) { return written(f, d, n, at); }
ssize_t writev(int f, const struct iovec *p, int n) { return gathered(f, p, n, -1); }
ssize_t pwritev(int f, const struct iovec *p, int n, off_t at) { return gathered(f, p, n, at); }
ssize_t pwritev64(int f, const struct iovec *p, int n, off64_t at) { return gathered(f, p, n, at); }
