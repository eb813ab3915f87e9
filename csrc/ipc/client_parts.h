/* What client.c uses and that knows no session: the clock, futexes, a mutex made of one, and whether the areas that a
 * ring's header names lie inside its memory. For that file alone. Libc that glibc 2.17 has; futexes by syscall.
 */
#ifndef SYSHAX_CLIENT_PARTS_H
#define SYSHAX_CLIENT_PARTS_H

#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ipc/ring_layout.h"

static const uint64_t LOCK_STEP_NS = 20000000;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t deadline_after(uint64_t timeout_ns) {
  uint64_t now = now_ns();
  return timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
}

static void futex_wait(uint32_t* word, uint32_t seen, uint64_t timeout_ns, int private_flag) {
  struct timespec t = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
  syscall(SYS_futex, word, FUTEX_WAIT | private_flag, seen, &t, NULL, 0);
}

static void futex_wake(uint32_t* word, int count, int private_flag) {
  syscall(SYS_futex, word, FUTEX_WAKE | private_flag, count, NULL, NULL, 0);
}

static void lock(uint32_t* word) {
  uint32_t expected = 0;
  if (__atomic_compare_exchange_n(word, &expected, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
  while (__atomic_exchange_n(word, 2, __ATOMIC_ACQUIRE) != 0) futex_wait(word, 2, LOCK_STEP_NS, FUTEX_PRIVATE_FLAG);
}

static void unlock(uint32_t* word) {
  if (__atomic_exchange_n(word, 0, __ATOMIC_RELEASE) == 2) futex_wake(word, 1, FUTEX_PRIVATE_FLAG);
}

/* begin + size <= end, and both on pages, without a sum that could wrap. */
static int area_fits(uint64_t begin, uint64_t size, uint64_t end) {
  return begin % SYSHAX_RING_PAGE == 0 && end % SYSHAX_RING_PAGE == 0 && begin <= end && size <= end - begin;
}

/* The daemon is trusted with the data, not with this process's memory: a header of another build must not lead outside.
 */
static int areas_fit(const syshax_ring_header* h, uint64_t bytes) {
  if (h->num_slots < 1 || h->num_slots > SYSHAX_RING_MAX_SLOTS || (h->element_bytes != 2 && h->element_bytes != 4))
    return 0;
  uint64_t rows = (uint64_t)h->max_tokens * h->hidden_size, wide = (uint64_t)h->max_tokens * h->top_k;
  if (rows == 0 || wide == 0 || rows > UINT64_MAX / 64 || wide > UINT64_MAX / 64) return 0;
  uint64_t queue = (uint64_t)h->num_slots * 64;
  if (h->total_bytes > bytes || h->slots_offset > h->total_bytes) return 0;
  if (h->slot_bytes > (h->total_bytes - h->slots_offset) / h->num_slots) return 0;
  rows *= h->element_bytes;
  wide *= 4;
  return h->requests_offset >= sizeof(*h) && area_fits(h->requests_offset, queue, h->completions_offset) &&
         area_fits(h->completions_offset, queue, h->slots_offset) && area_fits(0, rows, h->ids_offset) &&
         area_fits(h->ids_offset, wide, h->weights_offset) && area_fits(h->weights_offset, wide, h->output_offset) &&
         area_fits(h->output_offset, rows, h->slot_bytes);
}

#endif
