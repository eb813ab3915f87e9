/* The ring's binary interface: what lies where in a session's shared memory.
 *
 * An ABI between processes built at different times: fixed-width fields, offsets pinned by static_asserts and by
 * tests/golden/, described in docs/RING.md. Usable from C and C++. CAVEAT FIRST: all of this memory is writable by
 * the client at any time. The daemon copies a descriptor, checks the copy and uses only the copy; it derives every
 * offset from numbers it fixed at attach and never reads them back from shared memory.
 *
 *   offset 0        syshax_ring_header                 (one page)
 *   4096            syshax_ring_request[num_slots]     submission queue, index = position % num_slots
 *   then, aligned   syshax_ring_completion[num_slots]  one per slot
 *   then, aligned   slots, slot_bytes each:
 *                     hidden_states [max_tokens, hidden_size] of the largest dtype
 *                     topk_ids      [max_tokens, top_k] int32
 *                     topk_weights  [max_tokens, top_k] float32
 *                     output        [max_tokens, hidden_size] of the largest dtype
 * Every area begins on a page. A request with fewer tokens or smaller elements uses the front of each area, rows
 * contiguous.
 */
#ifndef SYSHAX_RING_LAYOUT_H
#define SYSHAX_RING_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#define SYSHAX_RING_MAGIC 0x58485353u /* "SSHX" */
#define SYSHAX_RING_VERSION_MAJOR 1u  /* both sides must agree */
#define SYSHAX_RING_VERSION_MINOR 1u  /* a higher one only adds; 1: why a session is closing */
#define SYSHAX_RING_PAGE 4096u
#define SYSHAX_RING_MAX_SLOTS 64u

/* Status of a completion; the names are the error codes of syshax.errors. */
enum syshax_ring_status {
  SYSHAX_RING_OK = 0,
  SYSHAX_RING_BAD_REQUEST = 1,   /* slot, dtype, flags or queue state make no sense */
  SYSHAX_RING_BAD_LAYER = 2,     /* detail: the layer */
  SYSHAX_RING_BAD_SHAPE = 3,     /* num_tokens or top_k out of range; detail: the value */
  SYSHAX_RING_BAD_EXPERT_ID = 4, /* detail: the id; detail2: its index in topk_ids */
  SYSHAX_RING_MODEL_GONE = 5,    /* the model was unloaded */
  SYSHAX_RING_SHUTTING_DOWN = 6, /* the daemon drains; submit again after attaching again */
  SYSHAX_RING_INTERNAL = 7
};

/* The header's `closing`: whether and why the daemon serves this session no more; above 1 it stays. A client that reads
 * a number that it does not know has an ended session and must not attach again by itself. */
enum syshax_ring_closing {
  SYSHAX_RING_OPEN = 0,
  SYSHAX_RING_DRAINING = 1,     /* the daemon ends or begins anew: attach again */
  SYSHAX_RING_BROKEN_QUEUE = 2, /* the client named a slot that does not exist, a tag of 0, or too high a submit_tail */
  SYSHAX_RING_TRUNCATED = 3,    /* the client cut its memory short */
  SYSHAX_RING_KICKED = 4,       /* an administrator ended it */
  SYSHAX_RING_STOPPED = 5       /* its process was stopped for too long: attach again */
};

typedef struct syshax_ring_request {
  uint64_t tag;        /*  0: chosen by the client, never 0, unique in the session */
  uint32_t slot;       /*  8 */
  uint32_t layer;      /* 12 */
  uint32_t num_tokens; /* 16 */
  uint32_t top_k;      /* 20 */
  uint32_t dtype;      /* 24: syshax_dtype */
  uint32_t flags;      /* 28: 0 */
  uint64_t reserved[4];
} syshax_ring_request; /* 64 bytes */

typedef struct syshax_ring_completion {
  uint64_t tag;        /*  0: written before state */
  uint32_t status;     /*  8 */
  int32_t detail;      /* 12 */
  uint32_t detail2;    /* 16 */
  uint32_t state;      /* 20: futex word, low 32 bits of the tag; stored with release when all else is written */
  uint64_t queued_ns;  /* 24: from seeing the request to starting it */
  uint64_t compute_ns; /* 32: in the experts */
  uint32_t waiters;    /* 40: written by the client: != 0 while somebody sleeps on state */
  uint32_t pad;
  uint64_t reserved[2];
} syshax_ring_completion; /* 64 bytes */

typedef struct syshax_ring_header {
  /* written by the daemon before the client sees the memory, then constant */
  uint32_t magic;              /*  0 */
  uint16_t version_major;      /*  4 */
  uint16_t version_minor;      /*  6 */
  uint8_t boot_id[16];         /*  8 */
  uint64_t session_id;         /* 24 */
  uint32_t num_slots;          /* 32 */
  uint32_t max_tokens;         /* 36 */
  uint32_t hidden_size;        /* 40 */
  uint32_t top_k;              /* 44: the largest a request may use */
  uint32_t element_bytes;      /* 48: of the largest dtype a request may use: 2 or 4 */
  uint32_t num_layers;         /* 52 */
  uint64_t requests_offset;    /* 56 */
  uint64_t completions_offset; /* 64 */
  uint64_t slots_offset;       /* 72 */
  uint64_t slot_bytes;         /* 80 */
  uint64_t ids_offset;         /* 88: within a slot, as the next two */
  uint64_t weights_offset;     /* 96 */
  uint64_t output_offset;      /* 104 */
  uint64_t total_bytes;        /* 112 */
  uint64_t reserved0;          /* 120 */
  /* written by the client */
  uint32_t submit_tail; /* 128: requests ever submitted (mod 2^32); release */
  uint32_t reserved1[15];
  uint64_t client_heartbeat; /* 192: counts up when the client submits or waits */
  uint64_t client_wait_ns;   /* 200: from submit to seeing the completion, summed by the client; for display only */
  uint64_t reserved2[6];
  /* written by the daemon */
  uint32_t submit_head;      /* 256: requests ever taken (mod 2^32) */
  uint32_t parked;           /* 260: 1 while the daemon sleeps: the client must ring the eventfd after submitting */
  uint64_t daemon_heartbeat; /* 264: CLOCK_MONOTONIC ns of the data plane's last turn */
  uint32_t spin_us;          /* 272: how long a client should spin before it parks; 0 where CPUs are shared */
  uint32_t closing;          /* 276: syshax_ring_closing */
  uint64_t reserved3[5];
} syshax_ring_header; /* 320 bytes, in a page of its own */

#ifdef __cplusplus
#define SYSHAX_ASSERT static_assert
#else
#define SYSHAX_ASSERT _Static_assert
#endif
SYSHAX_ASSERT(sizeof(syshax_ring_request) == 64, "request");
SYSHAX_ASSERT(sizeof(syshax_ring_completion) == 64, "completion");
SYSHAX_ASSERT(offsetof(syshax_ring_completion, state) == 20, "completion.state");
SYSHAX_ASSERT(offsetof(syshax_ring_completion, waiters) == 40, "completion.waiters");
SYSHAX_ASSERT(offsetof(syshax_ring_header, total_bytes) == 112, "header.total_bytes");
SYSHAX_ASSERT(offsetof(syshax_ring_header, submit_tail) == 128, "header.submit_tail");
SYSHAX_ASSERT(offsetof(syshax_ring_header, client_heartbeat) == 192, "header.client_heartbeat");
SYSHAX_ASSERT(offsetof(syshax_ring_header, client_wait_ns) == 200, "header.client_wait_ns");
SYSHAX_ASSERT(offsetof(syshax_ring_header, submit_head) == 256, "header.submit_head");
SYSHAX_ASSERT(sizeof(syshax_ring_header) == 320, "header");

#endif
