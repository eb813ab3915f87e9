/* When a thread that waits may spin, and when it must sleep: the one rule for the pool's threads, the dispatcher and
 * the client's library (C and C++; libc alone). Spinning saves the cost of falling asleep and being woken, but takes
 * the CPU from whoever else wants it, and no thread can ask who that is. So a spinner goes by what it sees itself:
 *
 *   - A look takes a microsecond. When two looks are SYSHAX_SPIN_GAP_NS apart, the thread lost its CPU while it spun:
 *     others want it, or a quota ran out. It spins no more for a while, longer each time that this happens again.
 *   - Each wait that spinning shortened earns what a wake-up costs, or twice its own length if that is more; what is
 *     spun in vain is paid from that. A wait is spun no longer than a few times what waits took that ended so. When
 *     nothing is left, a hundredth of the time is spun, so that a change for the better is noticed.
 *
 * Both cost nothing where spinning pays, and find out the sooner the more it harms. Figures: docs/decisions/0012. */
#ifndef SYSHAX_BASE_SPIN_H
#define SYSHAX_BASE_SPIN_H
#include <stdint.h>

#define SYSHAX_SPIN_FIXED 0x80000000u /* or-ed to a spin_us: spin so long whatever happens, to measure against */
#define SYSHAX_SPIN_GAP_NS 100000u    /* far above an interrupt, far below a time slice */
#define SYSHAX_SPIN_WAKE_NS 20000u    /* what a sleep and a wake-up cost, about */
#define SYSHAX_SPIN_LEAST_NS 1000u    /* spinning less is not worth reading the clock */
#define SYSHAX_SPIN_TRY 100u          /* whatever was earned, one wait in so many limits of time is spun in full */
#define SYSHAX_SPIN_TIMES \
  4u /* the others so many times as long as waits that spinning shortened, and a wake-up's time */
#define SYSHAX_SPIN_REST 4u              /* the first rest, in lengths of the loss; a loss soon after it doubles it, */
#define SYSHAX_SPIN_RESTS 4u             /* so many times at most */
#define SYSHAX_SPIN_LONGEST_NS 20000000u /* a loss that was longer counts as this */

/* One waiting place of one thread; all zero at first. Nobody else may touch it. */
struct syshax_spin {
  uint64_t begin_ns, last_ns, end_ns; /* of the wait that is being spun; begin 0: none */
  uint64_t spent_ns;                  /* in vain, less what was earned */
  uint64_t tried_ns;                  /* when a wait was last spun in full, whatever was earned */
  uint64_t usual_ns;                  /* the longest of the last waits that spinning shortened, about */
  uint64_t rest_until_ns, rest_ns;    /* the last rest's end and length */
  uint32_t rests;                     /* in a row */
};

/* The CPU was lost between the last look and now. */
static inline void syshax_spin_rest(struct syshax_spin* spin, uint64_t now_ns) {
  uint64_t lost_ns = now_ns - spin->last_ns;
  if (lost_ns > SYSHAX_SPIN_LONGEST_NS) lost_ns = SYSHAX_SPIN_LONGEST_NS;
  if (now_ns > spin->rest_until_ns + spin->rest_ns)
    spin->rests = 0;
  else if (spin->rests < SYSHAX_SPIN_RESTS)
    spin->rests++;
  spin->rest_ns = (lost_ns * SYSHAX_SPIN_REST) << spin->rests;
  spin->rest_until_ns = now_ns + spin->rest_ns;
}

/* How long the wait that begins now may be spun. */
static inline uint64_t syshax_spin_allowance(struct syshax_spin* spin, uint64_t limit_ns, uint64_t now_ns) {
  if (spin->spent_ns > 2 * limit_ns) spin->spent_ns = 2 * limit_ns;
  if (now_ns < spin->rest_until_ns) return 0;
  if (now_ns - spin->tried_ns >= SYSHAX_SPIN_TRY * limit_ns) {
    spin->tried_ns = now_ns;
    return limit_ns;
  }
  uint64_t left = 2 * limit_ns - spin->spent_ns, usual = SYSHAX_SPIN_TIMES * spin->usual_ns + SYSHAX_SPIN_WAKE_NS;
  if (left > usual) left = usual;
  if (left > limit_ns) left = limit_ns;
  return left < SYSHAX_SPIN_LEAST_NS ? 0 : left;
}

/* The wait that is being spun was in vain. */
static inline void syshax_spin_given_up(struct syshax_spin* spin, uint64_t now_ns) {
  if (now_ns - spin->last_ns >= SYSHAX_SPIN_GAP_NS)
    syshax_spin_rest(spin, now_ns);
  else
    spin->spent_ns += now_ns - spin->begin_ns;
  spin->begin_ns = 0;
}

/* There is nothing yet: 1: look again, 0: sleep. The first call of a wait begins it; spin_us may be 0. */
static inline int syshax_spin_again(struct syshax_spin* spin, uint32_t spin_us, uint64_t now_ns) {
  int fixed = (spin_us & SYSHAX_SPIN_FIXED) != 0;
  uint64_t limit_ns = (uint64_t)(spin_us & ~SYSHAX_SPIN_FIXED) * 1000;
  if (spin->begin_ns == 0) {
    uint64_t allowed = limit_ns == 0 || fixed ? limit_ns : syshax_spin_allowance(spin, limit_ns, now_ns);
    if (allowed == 0) return 0;
    spin->begin_ns = spin->last_ns = now_ns;
    spin->end_ns = now_ns + allowed;
    return 1;
  }
  if (now_ns < spin->end_ns && (fixed || now_ns - spin->last_ns < SYSHAX_SPIN_GAP_NS)) {
    spin->last_ns = now_ns;
    return 1;
  }
  syshax_spin_given_up(spin, now_ns);
  return 0;
}

/* What was waited for is there, or need not be waited for any more. Does nothing when no wait is being spun. */
static inline void syshax_spin_found(struct syshax_spin* spin, uint64_t now_ns) {
  if (spin->begin_ns == 0) return;
  uint64_t length_ns = now_ns - spin->begin_ns, earned_ns = 2 * length_ns;
  spin->begin_ns = 0;
  if (now_ns - spin->last_ns >= SYSHAX_SPIN_GAP_NS) {
    syshax_spin_rest(spin, now_ns);
    return;
  }
  if (earned_ns < SYSHAX_SPIN_WAKE_NS) earned_ns = SYSHAX_SPIN_WAKE_NS;
  spin->spent_ns = spin->spent_ns > earned_ns ? spin->spent_ns - earned_ns : 0;
  spin->usual_ns -= spin->usual_ns / 8;
  if (spin->usual_ns < length_ns) spin->usual_ns = length_ns;
}

static inline void syshax_cpu_pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

#endif
