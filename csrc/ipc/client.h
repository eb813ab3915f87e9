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
  SYSHAX_CLIENT_BAD_RING = -4, /* magic, version or size are not what this library knows */
  SYSHAX_CLIENT_SYSTEM = -5,   /* errno tells */
  SYSHAX_CLIENT_FORKED = -6,   /* opened before a fork: a child must attach for itself */
  SYSHAX_CLIENT_ENDED = -7     /* the daemon ended this session for good; syshax_client_closing tells why */
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

/* What the header said at open; constant. */
typedef struct syshax_client_layout {
  uint16_t version_major, version_minor;
  uint32_t num_slots, max_tokens, hidden_size, top_k, element_bytes, num_layers, spin_us;
  uint64_t session_id, total_bytes;
  uint8_t boot_id[16];
} syshax_client_layout;

#define SYSHAX_CLIENT_FOREVER UINT64_MAX

uint32_t syshax_client_abi(void);
const char* syshax_client_error_name(int error);

/* Maps the session's memory. The descriptors stay the caller's: shm_fd may be closed after this call, doorbell_fd
 * (eventfd) and connection_fd (the attach socket; only polled for hang-up) must outlive the client; -1 as connection_fd
 * leaves hang-ups unnoticed. */
int syshax_client_open(int shm_fd, int doorbell_fd, int connection_fd, syshax_client** client);
/* From now on every call returns DAEMON_LOST, and so do those that wait in other threads. The memory stays mapped. */
void syshax_client_shutdown(syshax_client* client);
/* shutdown, and gives the client back: the memory is unmapped when the last call in another thread has left and the
 * last slot is released. No call may begin after this one, but release of slots still held. */
void syshax_client_close(syshax_client* client);

void syshax_client_get_layout(syshax_client* client, syshax_client_layout* layout);
/* The mapping, for page-locking it: base address and bytes. */
void* syshax_client_base(syshax_client* client, uint64_t* bytes);
uint32_t syshax_client_num_slots(syshax_client* client);

/* Why the daemon ended the session, or is about to: syshax_ring_closing. Memory that was truncated tells nothing. */
uint32_t syshax_client_closing(syshax_client* client);

/* Takes a free slot, waiting up to timeout_ns (SYSHAX_CLIENT_FOREVER: until there is one or the daemon is lost). */
int syshax_client_acquire(syshax_client* client, uint64_t timeout_ns, uint32_t* slot);
/* The slot's areas; NULL for a slot that does not exist. */
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

/* acquire + copy in + submit + wait + copy out + release, in one call; the output is copied when result.status is 0.
 * More than max_tokens tokens or too wide a top_k or dtype: BAD_ARGUMENT. No tokens: done at once. */
int syshax_client_moe(syshax_client* client, uint32_t layer, uint32_t num_tokens, uint32_t top_k, uint32_t dtype,
                      const void* hidden_states, const int32_t* topk_ids, const float* topk_weights, void* output,
                      uint64_t timeout_ns, syshax_client_result* result);

#ifdef __cplusplus
}
#endif
#endif
