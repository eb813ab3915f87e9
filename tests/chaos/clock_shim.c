/* LD_PRELOAD: CLOCK_REALTIME and CLOCK_MONOTONIC moved by what lies in the file that SYSHAX_CHAOS_CLOCK names.
 *
 * Two int64, nanoseconds: realtime's and monotonic's. The chaos run writes there to let a process's clocks jump.
 * The kernel's own timers know nothing of it, so waits until a point in time are given the true one; libc's time() and
 * gettimeofday() do not come through here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const int64_t zero[2];
static const int64_t* offsets = zero;

__attribute__((constructor)) static void begin(void) {
  const char* path = getenv("SYSHAX_CHAOS_CLOCK");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void* mapped = mmap(NULL, sizeof(zero), PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped != MAP_FAILED) offsets = mapped;
}

static int64_t offset_of(clockid_t clock) {
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) return __atomic_load_n(&offsets[0], __ATOMIC_RELAXED);
  if (clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_COARSE)
    return __atomic_load_n(&offsets[1], __ATOMIC_RELAXED);
  return 0;
}

static struct timespec moved(struct timespec t, int64_t by) {
  int64_t ns = t.tv_nsec + by % 1000000000, s = t.tv_sec + by / 1000000000;
  if (ns < 0) ns += 1000000000, s--;
  if (ns >= 1000000000) ns -= 1000000000, s++;
  return (struct timespec){.tv_sec = s, .tv_nsec = ns};
}

static void* next(void** kept, const char* name) {
  void* found = __atomic_load_n(kept, __ATOMIC_RELAXED);
  if (!found) __atomic_store_n(kept, found = dlsym(RTLD_NEXT, name), __ATOMIC_RELAXED);
  return found;
}

int clock_gettime(clockid_t clock, struct timespec* t) {
  static void* real;
  int result = ((int (*)(clockid_t, struct timespec*))next(&real, "clock_gettime"))(clock, t);
  if (result == 0) *t = moved(*t, offset_of(clock));
  return result;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec* request, struct timespec* remain) {
  static void* real;
  struct timespec t = flags & TIMER_ABSTIME ? moved(*request, -offset_of(clock)) : *request;
  return ((int (*)(clockid_t, int, const struct timespec*, struct timespec*))next(&real, "clock_nanosleep"))(
      clock, flags, &t, remain);
}

int sem_clockwait(sem_t* semaphore, clockid_t clock, const struct timespec* until) {
  static void* real;
  struct timespec t = moved(*until, -offset_of(clock));
  return ((int (*)(sem_t*, clockid_t, const struct timespec*))next(&real, "sem_clockwait"))(semaphore, clock, &t);
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  static void* real;
  struct timespec t = moved(*until, -offset_of(clock));
  return ((int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*))next(
      &real, "pthread_cond_clockwait"))(condition, mutex, clock, &t);
}

/* The condition knows its clock and does not tell; points in time of the two lie decades apart. */
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const struct timespec* until) {
  static void* real;
  if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* x86-64 has an older one too */
  struct timespec t = moved(*until, -offset_of(until->tv_sec > 1000000000 ? CLOCK_REALTIME : CLOCK_MONOTONIC));
  return ((int (*)(pthread_cond_t*, pthread_mutex_t*, const struct timespec*))next(&real, "pthread_cond_timedwait"))(
      condition, mutex, &t);
}
