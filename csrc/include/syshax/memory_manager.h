/* Arenas: one memory mapping on one NUMA node, backed by a memfd.
 *
 * Owns the C ABI by which memory for packed experts is had, found and given back. An arena knows
 * nothing of experts. Every call returns 0 or a negative errno and, where `error` is given, a
 * message of at most error_size bytes that says what was wanted, what was there and what helps.
 */
#ifndef SYSHAX_MEMORY_MANAGER_H
#define SYSHAX_MEMORY_MANAGER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum syshax_huge_pages {
  SYSHAX_HUGE_OFF = 0,    /* 4 KiB pages */
  SYSHAX_HUGE_AUTO = 1,   /* ask for transparent huge pages, accept what comes */
  SYSHAX_HUGE_REQUIRE = 2 /* reserved huge pages (MFD_HUGETLB) or an error */
} syshax_huge_pages;

typedef struct syshax_arena {
  void* base;        /* page-aligned start of the mapping, NULL when not mapped */
  size_t bytes;      /* whole pages */
  int fd;            /* the memfd; owned by the arena */
  int32_t node;      /* NUMA node the pages are bound to, -1: not bound */
  size_t huge_bytes; /* how many of the bytes lie in huge pages, as far as the kernel says; known once sealed */
  syshax_huge_pages huge_pages; /* as asked for */
} syshax_arena;

/* Creates, maps and binds; touches no page. name is for /proc only. */
int syshax_arena_create(syshax_arena* arena, const char* name, size_t bytes, int32_t node, syshax_huge_pages huge_pages,
                        char* error, size_t error_size);
/* Allocates the pages of [offset, offset + bytes) on the calling thread; -ENOMEM when it cannot. */
int syshax_arena_populate(syshax_arena* arena, size_t offset, size_t bytes, char* error, size_t error_size);
/* Forbids new writable mappings and resizing for ever; this process may go on reading. */
int syshax_arena_seal(syshax_arena* arena, char* error, size_t error_size);
/* Maps an arena again from a descriptor that it takes over on success. */
int syshax_arena_adopt(syshax_arena* arena, int fd, int32_t node, char* error, size_t error_size);
/* Unmaps and closes; safe to call twice. */
void syshax_arena_destroy(syshax_arena* arena);

#ifdef __cplusplus
}
#endif
#endif
