/* libsyshax_client.so: the client's side of the ring. Contract: client.h; the protocol: docs/RING.md.
 *
 * Owns one session's mapping in this process: which slots are free, the submission queue's position, and the wait for
 * completions. Libc alone, and of it only symbols that glibc 2.17 has (no fstat, whose symbol is younger; futexes by
 * syscall). A process-private futex mutex serialises submitters; everything else is atomic. After open it allocates
 * nothing.
 *
 * Lifetime: `refs` counts the opener, calls in progress and slots held; whoever drops the last one unmaps.
 * Fork: this struct lies in a page that a child sees zeroed (MADV_WIPEONFORK), so `alive` tells a child apart without a
 * syscall; the session's memory is not inherited at all (MADV_DONTFORK).
 */
#include "ipc/client.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/spin.h"
#include "ipc/client_parts.h"
#include "ipc/ring_layout.h"

#define EXPORT __attribute__((visibility("default")))
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif
#ifndef POLLRDHUP
#define POLLRDHUP 0x2000
#endif

enum { ALIVE = 0x53594158 };
enum { LOOKS_PER_CLOCK = 32 };
static const uint64_t STEP_NS = 20000000;          /* how often a sleeper looks at the connection */
static const uint64_t ABANDONED_STEP_NS = 1000000; /* while slots come back only by looking */

/* CLAIMED: abandoned, and one thread looks whether its completion came. */
enum slot_phase { SLOT_FREE, SLOT_HELD, SLOT_BUSY, SLOT_ABANDONED, SLOT_CLAIMED };

struct slot {
  uint32_t phase;   /* atomic */
  uint32_t spinner; /* atomic; 1: some thread's, and `spin` with it: whoever else waits for the slot sleeps */
  uint64_t tag;     /* of the last request; written by the slot's holder */
  uint64_t submit_ns;
  struct syshax_spin spin;
};

struct syshax_client {
  uint32_t alive;  /* ALIVE; 0 in a forked child */
  uint32_t closed; /* atomic */
  uint32_t refs;   /* atomic */
  int doorbell_fd, connection_fd;
  uint8_t* base;
  uint64_t bytes;
  syshax_ring_header layout; /* private copy: shared memory is read once */

  uint32_t submit_lock; /* futex mutex: 0 free, 1 locked, 2 locked with waiters */
  uint64_t position;    /* requests ever submitted, in 64 bits; its low half is submit_tail */
  uint64_t next_tag;

  uint64_t free_slots;   /* atomic bitmap */
  uint32_t free_seq;     /* futex word, counts releases */
  uint32_t slot_waiters; /* atomic */
  struct slot slots[SYSHAX_RING_MAX_SLOTS];
};

/* ---- small tools ------------------------------------------------------------------------------------------------- */

static uint32_t dtype_bytes(uint32_t dtype) { return dtype == 0 ? 4 : 2; }

static syshax_ring_header* header_of(syshax_client* client) { return (syshax_ring_header*)client->base; }

static syshax_ring_completion* completion_of(syshax_client* client, uint32_t slot) {
  return (syshax_ring_completion*)(client->base + client->layout.completions_offset) + slot;
}

static void beat(syshax_client* client) {
  __atomic_fetch_add(&header_of(client)->client_heartbeat, 1, __ATOMIC_RELAXED);
}

/* 1 when the attach connection has ended. */
static int connection_lost(syshax_client* client) {
  struct pollfd p = {client->connection_fd, POLLIN | POLLRDHUP, 0};
  if (client->connection_fd < 0 || poll(&p, 1, 0) <= 0) return 0;
  if (p.revents & (POLLHUP | POLLRDHUP | POLLERR | POLLNVAL)) return 1;
  char byte;
  return recv(client->connection_fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

static uint32_t closing_of(syshax_client* client) {
  return __atomic_load_n(&header_of(client)->closing, __ATOMIC_ACQUIRE);
}

/* 0 while the daemon serves the session. Memory alone: the connection may end later than the session, or before. */
static int ended(syshax_client* client) {
  uint32_t closing = closing_of(client);
  if (closing <= SYSHAX_RING_DRAINING) return 0;
  return closing == SYSHAX_RING_STOPPED ? SYSHAX_CLIENT_DAEMON_LOST : SYSHAX_CLIENT_ENDED;
}

/* 0 while an answer may still come. A connection that ended may have ended with the session: the reason is in memory
 * before the connection ends. */
static int lost(syshax_client* client) {
  if (__atomic_load_n(&client->closed, __ATOMIC_ACQUIRE)) return SYSHAX_CLIENT_DAEMON_LOST;
  int gone = connection_lost(client), error = ended(client);
  return error || !gone ? error : SYSHAX_CLIENT_DAEMON_LOST;
}

/* ---- lifetime ---------------------------------------------------------------------------------------------------- */

static void drop(syshax_client* client) {
  if (__atomic_sub_fetch(&client->refs, 1, __ATOMIC_ACQ_REL) != 0) return;
  munmap(client->base, client->bytes);
  munmap(client, sizeof(*client));
}

/* Every call begins here; 0: a reference is held until drop. */
static int enter(syshax_client* client) {
  if (client == NULL) return SYSHAX_CLIENT_BAD_ARGUMENT;
  if (client->alive != ALIVE) return SYSHAX_CLIENT_FORKED;
  __atomic_add_fetch(&client->refs, 1, __ATOMIC_ACQ_REL);
  if (!__atomic_load_n(&client->closed, __ATOMIC_ACQUIRE)) return 0;
  drop(client);
  return SYSHAX_CLIENT_DAEMON_LOST;
}

static int map_ring(syshax_client* client, int shm_fd) {
  off_t end = lseek(shm_fd, 0, SEEK_END);
  if (end < 0) return SYSHAX_CLIENT_SYSTEM;
  if ((uint64_t)end < SYSHAX_RING_PAGE) return SYSHAX_CLIENT_BAD_RING;
  client->bytes = (uint64_t)end;
  void* base = mmap(NULL, client->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shm_fd, 0);
  if (base == MAP_FAILED) return SYSHAX_CLIENT_SYSTEM;
  client->base = base;
  memcpy(&client->layout, base, sizeof(client->layout));
  const syshax_ring_header* h = &client->layout;
  if (h->magic == SYSHAX_RING_MAGIC && h->version_major == SYSHAX_RING_VERSION_MAJOR && areas_fit(h, client->bytes) &&
      madvise(base, client->bytes, MADV_DONTFORK) == 0)
    return 0;
  munmap(base, client->bytes);
  return SYSHAX_CLIENT_BAD_RING;
}

EXPORT int syshax_client_open(int shm_fd, int doorbell_fd, int connection_fd, syshax_client** out) {
  syshax_client* client = mmap(NULL, sizeof(*client), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (client == MAP_FAILED) return SYSHAX_CLIENT_SYSTEM;
  madvise(client, sizeof(*client), MADV_WIPEONFORK); /* before Linux 4.14: forks go unnoticed */
  int error = map_ring(client, shm_fd);
  if (error) {
    int saved = errno;
    munmap(client, sizeof(*client));
    errno = saved;
    return error;
  }
  client->doorbell_fd = doorbell_fd;
  client->connection_fd = connection_fd;
  client->refs = 1;
  /* The daemon chose where positions begin; tags begin at the same place, so that both wrap early. */
  client->position = client->layout.submit_tail;
  client->next_tag = (uint64_t)client->layout.submit_tail + 1;
  client->free_slots = client->layout.num_slots == 64 ? UINT64_MAX : (UINT64_C(1) << client->layout.num_slots) - 1;
  client->alive = ALIVE;
  *out = client;
  return 0;
}

EXPORT void syshax_client_shutdown(syshax_client* client) {
  if (enter(client) != 0) return;
  __atomic_store_n(&client->closed, 1, __ATOMIC_SEQ_CST);
  for (uint32_t slot = 0; slot < client->layout.num_slots; slot++)
    futex_wake(&completion_of(client, slot)->state, INT32_MAX, 0);
  futex_wake(&client->free_seq, INT32_MAX, FUTEX_PRIVATE_FLAG);
  drop(client);
}

EXPORT void syshax_client_close(syshax_client* client) {
  if (client == NULL) return;
  if (client->alive != ALIVE) { /* a forked child: the session's memory was never its own */
    munmap(client, sizeof(*client));
    return;
  }
  syshax_client_shutdown(client);
  drop(client);
}

/* ---- what it is -------------------------------------------------------------------------------------------------- */

EXPORT uint32_t syshax_client_abi(void) { return SYSHAX_CLIENT_ABI; }

EXPORT const char* syshax_client_error_name(int error) {
  switch (error) {
    case 0:
      return "ok";
    case SYSHAX_CLIENT_TIMEOUT:
      return "timeout";
    case SYSHAX_CLIENT_DAEMON_LOST:
      return "daemon_lost";
    case SYSHAX_CLIENT_BAD_ARGUMENT:
      return "bad_argument";
    case SYSHAX_CLIENT_BAD_RING:
      return "bad_ring";
    case SYSHAX_CLIENT_SYSTEM:
      return "system";
    case SYSHAX_CLIENT_FORKED:
      return "forked";
    case SYSHAX_CLIENT_ENDED:
      return "ended";
    default:
      return "unknown";
  }
}

EXPORT void syshax_client_get_layout(syshax_client* client, syshax_client_layout* layout) {
  const syshax_ring_header* h = &client->layout;
  *layout = (syshax_client_layout){.version_major = h->version_major,
                                   .version_minor = h->version_minor,
                                   .num_slots = h->num_slots,
                                   .max_tokens = h->max_tokens,
                                   .hidden_size = h->hidden_size,
                                   .top_k = h->top_k,
                                   .element_bytes = h->element_bytes,
                                   .num_layers = h->num_layers,
                                   .spin_us = h->spin_us,
                                   .session_id = h->session_id,
                                   .total_bytes = h->total_bytes};
  memcpy(layout->boot_id, h->boot_id, sizeof(layout->boot_id));
}

EXPORT uint32_t syshax_client_closing(syshax_client* client) {
  if (enter(client) != 0) return SYSHAX_RING_OPEN;
  uint32_t closing = closing_of(client);
  drop(client);
  return closing;
}

EXPORT void* syshax_client_base(syshax_client* client, uint64_t* bytes) {
  if (bytes) *bytes = client->bytes;
  return client->base;
}

EXPORT uint32_t syshax_client_num_slots(syshax_client* client) { return client->layout.num_slots; }

static void* area(syshax_client* client, uint32_t slot, uint64_t offset) {
  const syshax_ring_header* h = &client->layout;
  if (client->alive != ALIVE || slot >= h->num_slots) return NULL;
  return client->base + h->slots_offset + slot * h->slot_bytes + offset;
}

EXPORT void* syshax_client_hidden_states(syshax_client* client, uint32_t slot) { return area(client, slot, 0); }
EXPORT int32_t* syshax_client_topk_ids(syshax_client* client, uint32_t slot) {
  return area(client, slot, client->layout.ids_offset);
}
EXPORT float* syshax_client_topk_weights(syshax_client* client, uint32_t slot) {
  return area(client, slot, client->layout.weights_offset);
}
EXPORT void* syshax_client_output(syshax_client* client, uint32_t slot) {
  return area(client, slot, client->layout.output_offset);
}

/* ---- slots ------------------------------------------------------------------------------------------------------- */

static int completed(syshax_client* client, uint32_t slot, uint64_t tag) {
  return __atomic_load_n(&completion_of(client, slot)->state, __ATOMIC_ACQUIRE) == (uint32_t)tag;
}

static void free_slot(syshax_client* client, uint32_t slot) {
  __atomic_store_n(&client->slots[slot].phase, SLOT_FREE, __ATOMIC_RELAXED);
  __atomic_fetch_or(&client->free_slots, UINT64_C(1) << slot, __ATOMIC_RELEASE);
  __atomic_fetch_add(&client->free_seq, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&client->slot_waiters, __ATOMIC_SEQ_CST)) futex_wake(&client->free_seq, 1, FUTEX_PRIVATE_FLAG);
}

/* Frees the slots that were given back before their completion came. 1: some are still out. A slot is claimed before
 * its tag is read: between two looks others might free it, use it again and give it back once more. */
static int reclaim(syshax_client* client) {
  int out = 0;
  for (uint32_t slot = 0; slot < client->layout.num_slots; slot++) {
    struct slot* s = &client->slots[slot];
    uint32_t phase = SLOT_ABANDONED;
    if (!__atomic_compare_exchange_n(&s->phase, &phase, SLOT_CLAIMED, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
      out |= phase == SLOT_CLAIMED;
    } else if (completed(client, slot, s->tag)) {
      free_slot(client, slot);
    } else {
      __atomic_store_n(&s->phase, SLOT_ABANDONED, __ATOMIC_RELEASE);
      out = 1;
    }
  }
  return out;
}

static int take_free(syshax_client* client, uint32_t* slot) {
  uint64_t free_slots = __atomic_load_n(&client->free_slots, __ATOMIC_RELAXED);
  while (free_slots) {
    uint32_t lowest = (uint32_t)__builtin_ctzll(free_slots);
    if (!__atomic_compare_exchange_n(&client->free_slots, &free_slots, free_slots & ~(UINT64_C(1) << lowest), 0,
                                     __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
      continue;
    __atomic_store_n(&client->slots[lowest].phase, SLOT_HELD, __ATOMIC_RELAXED);
    *slot = lowest;
    return 1;
  }
  return 0;
}

static int acquire(syshax_client* client, uint64_t deadline, uint32_t* slot) {
  for (;;) {
    if (take_free(client, slot)) return 0;
    uint32_t seen = __atomic_load_n(&client->free_seq, __ATOMIC_SEQ_CST);
    uint64_t step = reclaim(client) ? ABANDONED_STEP_NS : STEP_NS;
    if (take_free(client, slot)) return 0;
    int error = lost(client);
    if (error) return error;
    uint64_t now = now_ns();
    if (now >= deadline) return SYSHAX_CLIENT_TIMEOUT;
    beat(client);
    __atomic_fetch_add(&client->slot_waiters, 1, __ATOMIC_SEQ_CST);
    futex_wait(&client->free_seq, seen, deadline - now < step ? deadline - now : step, FUTEX_PRIVATE_FLAG);
    __atomic_fetch_sub(&client->slot_waiters, 1, __ATOMIC_SEQ_CST);
  }
}

/* On success the reference that enter took stays: the slot holds it until release. */
EXPORT int syshax_client_acquire(syshax_client* client, uint64_t timeout_ns, uint32_t* slot) {
  int error = enter(client);
  if (error) return error;
  error = acquire(client, deadline_after(timeout_ns), slot);
  if (error) drop(client);
  return error;
}

EXPORT void syshax_client_release(syshax_client* client, uint32_t slot) {
  if (client == NULL || client->alive != ALIVE || slot >= client->layout.num_slots) return;
  struct slot* s = &client->slots[slot];
  uint32_t phase = __atomic_load_n(&s->phase, __ATOMIC_ACQUIRE);
  if (phase != SLOT_HELD && phase != SLOT_BUSY) return;
  if (phase == SLOT_HELD || completed(client, slot, s->tag))
    free_slot(client, slot);
  else
    __atomic_store_n(&s->phase, SLOT_ABANDONED, __ATOMIC_RELEASE);
  drop(client);
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

/* The client's half of the sleep protocol: publish the tail, full fence, then look whether the daemon sleeps. The
 * daemon: parked = 1, full fence, look at the tails, then sleep. One of the two sees the other. */
static void ring_doorbell(syshax_client* client) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (!__atomic_load_n(&header_of(client)->parked, __ATOMIC_RELAXED)) return;
  uint64_t one = 1;
  while (write(client->doorbell_fd, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

static void publish(syshax_client* client, struct slot* s, syshax_ring_request request) {
  syshax_ring_request* queue = (syshax_ring_request*)(client->base + client->layout.requests_offset);
  lock(&client->submit_lock);
  if ((uint32_t)client->next_tag == 0) client->next_tag++; /* a state word of 0 means "nothing yet" */
  s->tag = request.tag = client->next_tag++;
  s->submit_ns = now_ns();
  queue[client->position % client->layout.num_slots] = request;
  client->position++;
  __atomic_store_n(&header_of(client)->submit_tail, (uint32_t)client->position, __ATOMIC_RELEASE);
  unlock(&client->submit_lock);
}

EXPORT int syshax_client_submit(syshax_client* client, uint32_t slot, uint32_t layer, uint32_t num_tokens,
                                uint32_t top_k, uint32_t dtype, uint64_t* tag) {
  int error = enter(client);
  if (error) return error;
  if ((error = ended(client)) != 0) {
    drop(client);
    return error;
  }
  uint32_t held = SLOT_HELD;
  if (slot >= client->layout.num_slots || !__atomic_compare_exchange_n(&client->slots[slot].phase, &held, SLOT_BUSY, 0,
                                                                       __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
    drop(client);
    return SYSHAX_CLIENT_BAD_ARGUMENT;
  }
  syshax_ring_request request = {
      .slot = slot, .layer = layer, .num_tokens = num_tokens, .top_k = top_k, .dtype = dtype, .flags = 0};
  publish(client, &client->slots[slot], request);
  *tag = client->slots[slot].tag;
  beat(client);
  ring_doorbell(client);
  drop(client);
  return 0;
}

static int spin_for(syshax_client* client, uint32_t slot, uint64_t tag, uint64_t deadline) {
  struct slot* s = &client->slots[slot];
  uint32_t spin_us = __atomic_load_n(&header_of(client)->spin_us, __ATOMIC_RELAXED);
  if (spin_us == 0 || __atomic_exchange_n(&s->spinner, 1, __ATOMIC_ACQUIRE)) return 0;
  uint64_t now;
  int done = 0;
  while (!done && syshax_spin_again(&s->spin, spin_us, now = now_ns())) {
    for (int i = 0; i < LOOKS_PER_CLOCK && !done; i++) {
      syshax_cpu_pause();
      done = completed(client, slot, tag);
    }
    if (done) syshax_spin_found(&s->spin, now_ns());
    /* However long the header wants it: nobody looks at the connection meanwhile. */
    if (!done && (now >= deadline || now - s->spin.begin_ns >= STEP_NS)) {
      syshax_spin_given_up(&s->spin, now);
      break;
    }
  }
  __atomic_store_n(&s->spinner, 0, __ATOMIC_RELEASE);
  return done;
}

static int wait_for(syshax_client* client, uint32_t slot, uint64_t tag, uint64_t deadline) {
  if (completed(client, slot, tag) || spin_for(client, slot, tag, deadline)) return 0;
  syshax_ring_completion* completion = completion_of(client, slot);
  for (;;) {
    uint64_t now = now_ns();
    if (now >= deadline) return completed(client, slot, tag) ? 0 : SYSHAX_CLIENT_TIMEOUT;
    beat(client);
    /* The daemon stores state, full fence, then reads waiters; the futex compares state again after this increment. */
    __atomic_fetch_add(&completion->waiters, 1, __ATOMIC_SEQ_CST);
    uint32_t seen = __atomic_load_n(&completion->state, __ATOMIC_SEQ_CST);
    if (seen != (uint32_t)tag)
      futex_wait(&completion->state, seen, deadline - now < STEP_NS ? deadline - now : STEP_NS, 0);
    __atomic_fetch_sub(&completion->waiters, 1, __ATOMIC_SEQ_CST);
    if (completed(client, slot, tag)) return 0;
    int error = lost(client);
    if (error) return completed(client, slot, tag) ? 0 : error;
  }
}

EXPORT int syshax_client_wait(syshax_client* client, uint32_t slot, uint64_t tag, uint64_t timeout_ns,
                              syshax_client_result* result) {
  int error = enter(client);
  if (error) return error;
  struct slot* s = slot < client->layout.num_slots ? &client->slots[slot] : NULL;
  uint32_t phase = s ? __atomic_load_n(&s->phase, __ATOMIC_ACQUIRE) : SLOT_FREE;
  if ((phase != SLOT_HELD && phase != SLOT_BUSY) || tag == 0 || s->tag != tag)
    error = SYSHAX_CLIENT_BAD_ARGUMENT;
  else
    error = wait_for(client, slot, tag, deadline_after(timeout_ns));
  if (error == 0) {
    const syshax_ring_completion* c = completion_of(client, slot);
    *result = (syshax_client_result){
        c->status, c->detail, c->detail2, 0, c->queued_ns, c->compute_ns, now_ns() - s->submit_ns};
    __atomic_fetch_add(&header_of(client)->client_wait_ns, result->wait_ns, __ATOMIC_RELAXED);
    uint32_t busy = SLOT_BUSY;
    __atomic_compare_exchange_n(&s->phase, &busy, SLOT_HELD, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  }
  drop(client);
  return error;
}

EXPORT int syshax_client_moe(syshax_client* client, uint32_t layer, uint32_t num_tokens, uint32_t top_k, uint32_t dtype,
                             const void* hidden_states, const int32_t* topk_ids, const float* topk_weights,
                             void* output, uint64_t timeout_ns, syshax_client_result* result) {
  uint64_t deadline = deadline_after(timeout_ns), tag;
  uint32_t slot;
  memset(result, 0, sizeof(*result));
  if (client == NULL) return SYSHAX_CLIENT_BAD_ARGUMENT;
  if (client->alive != ALIVE) return SYSHAX_CLIENT_FORKED;
  const syshax_ring_header* h = &client->layout;
  if (num_tokens > h->max_tokens || top_k > h->top_k || dtype > 2 || dtype_bytes(dtype) > h->element_bytes)
    return SYSHAX_CLIENT_BAD_ARGUMENT;
  if (num_tokens == 0) return 0;
  int error = syshax_client_acquire(client, timeout_ns, &slot);
  if (error) return error;
  size_t row_bytes = (size_t)num_tokens * h->hidden_size * dtype_bytes(dtype),
         wide_bytes = (size_t)num_tokens * top_k * 4;
  memcpy(syshax_client_hidden_states(client, slot), hidden_states, row_bytes);
  memcpy(syshax_client_topk_ids(client, slot), topk_ids, wide_bytes);
  memcpy(syshax_client_topk_weights(client, slot), topk_weights, wide_bytes);
  error = syshax_client_submit(client, slot, layer, num_tokens, top_k, dtype, &tag);
  if (error == 0) {
    uint64_t now = now_ns();
    error = syshax_client_wait(client, slot, tag, deadline > now ? deadline - now : 0, result);
  }
  if (error == 0 && result->status == SYSHAX_RING_OK) memcpy(output, syshax_client_output(client, slot), row_bytes);
  syshax_client_release(client, slot);
  return error;
}
