/* The client's side of the ring: a small C library (libsyshax_client.so) with a plain C ABI.
 *
 * Loaded with ctypes by the Python client, usable from any other engine and from an accelerator's host callback.
 * Depends on libc alone. It owns the mapping and the waiting; the attach message (JSON over the socket) is the
 * caller's. All functions are thread-safe unless they say otherwise and return 0 or a negative SYSHAX_CLIENT_*.
 */
#ifndef SYSHAX_CLIENT_H
#define SYSHAX_CLIENT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SYSHAX_CLIENT_ABI 1

enum syshax_client_error {
  SYSHAX_CLIENT_TIMEOUT = -1,     /* nothing came in time; the slot stays busy until its completion comes */
  SYSHAX_CLIENT_DAEMON_LOST = -2, /* the attach connection ended */
  SYSHAX_CLIENT_BAD_ARGUMENT = -3,
  SYSHAX_CLIENT_BAD_RING = -4,    /* magic, version or size are not what this library knows */
  SYSHAX_CLIENT_SYSTEM = -5       /* errno tells */
};

typedef struct syshax_client syshax_client;

typedef struct syshax_client_result {
  uint32_t status; /* syshax_ring_status */
  int32_t detail;
  uint32_t detail2;
  uint32_t reserved;
  uint64_t queued_ns;
  uint64_t compute_ns;
  uint64_t wait_ns; /* from submit to seeing the completion, measured here */
} syshax_client_result;

uint32_t syshax_client_abi(void);
const char* syshax_client_error_name(int error);

/* Maps the session's memory. The descriptors stay the caller's and must outlive the client: shm_fd (may be closed
 * after this call), doorbell_fd (eventfd), connection_fd (the attach socket; only polled for hang-up). */
int syshax_client_open(int shm_fd, int doorbell_fd, int connection_fd, syshax_client** client);
/* Waiters in other threads come back with DAEMON_LOST; unmaps when the last has left. */
void syshax_client_close(syshax_client* client);

/* The mapping, for page-locking it: base address and bytes. */
void* syshax_client_base(syshax_client* client, uint64_t* bytes);
uint32_t syshax_client_num_slots(syshax_client* client);

/* Takes a free slot, waiting up to timeout_ns. */
int syshax_client_acquire(syshax_client* client, uint64_t timeout_ns, uint32_t* slot);
/* The slot's areas. */
void* syshax_client_hidden_states(syshax_client* client, uint32_t slot);
int32_t* syshax_client_topk_ids(syshax_client* client, uint32_t slot);
float* syshax_client_topk_weights(syshax_client* client, uint32_t slot);
void* syshax_client_output(syshax_client* client, uint32_t slot);

/* Submits what the slot's areas hold; the tag identifies the request in wait. */
int syshax_client_submit(syshax_client* client, uint32_t slot, uint32_t layer, uint32_t num_tokens, uint32_t top_k,
                         uint32_t dtype, uint64_t* tag);
/* Waits for the slot's request `tag`: spins as the header says, then sleeps on the completion, looking at the
 * connection all 20 ms. The output stays valid until release. */
int syshax_client_wait(syshax_client* client, uint32_t slot, uint64_t tag, uint64_t timeout_ns,
                       syshax_client_result* result);
/* Gives the slot back. A slot whose request has not completed is given back when it does. */
void syshax_client_release(syshax_client* client, uint32_t slot);

/* acquire + copy in + submit + wait + copy out + release, in one call. */
int syshax_client_moe(syshax_client* client, uint32_t layer, uint32_t num_tokens, uint32_t top_k, uint32_t dtype,
                      const void* hidden_states, const int32_t* topk_ids, const float* topk_weights, void* output,
                      uint64_t timeout_ns, syshax_client_result* result);

#ifdef __cplusplus
}
#endif
#endif
