/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The C library, libvrambroker.so: memory from vrambrokerd, mapped in this process. C11 and C++; -lvrambroker.
 *
 *   vrambroker_client* client = NULL;
 *   if (vrambroker_connect(NULL, &client) != VRAMBROKER_OK) die(vrambroker_last_error_message());
 *   void* memory = NULL;
 *   if (vrambroker_malloc(client, 24 << 20, 0, &memory) != VRAMBROKER_OK) die(vrambroker_last_error_message());
 *   memset(memory, 0, 24 << 20);                   // host device; on cuda a device pointer
 *   vrambroker_free(client, memory);
 *   vrambroker_disconnect(client);
 *
 * By default the process has a separate caching allocator over whole segments leased from the daemon: a request served
 * from the cache makes no call. The daemon still owns, counts and limits every byte. A C++ program may use
 * vrambroker/client.h instead; a process must not use both libraries.
 *
 * Units     All sizes are bytes, all times milliseconds.
 * Errors    Functions return VRAMBROKER_OK or an error code; vrambroker_last_error_message() explains the error. No
 *           function ends or blocks the process, whatever happens to the daemon. Failed functions set their output
 *           pointers to NULL.
 * Threads   Any thread may call any function, also concurrently, except that a client must not be used during or after
 *           its vrambroker_disconnect(). Do not call from signal handlers, or cancel a thread (pthread_cancel) inside.
 * fork()    In a child forked after the parent's first vrambroker_connect() that found a daemon, every call fails with
 *           FAILED_PRECONDITION; the parent is not affected. Fork before vrambroker_connect(), or exec.
 * Copies    Several copies of the library in a process share the core of the first copy to connect. A copy of another
 *           version fails with FAILED_PRECONDITION.
 * Structs   Set struct_size to sizeof: the library fills or reads no more bytes.
 */
#ifndef VRAMBROKER_VRAMBROKER_H_
#define VRAMBROKER_VRAMBROKER_H_

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Changes when programs must be recompiled; the number is part of libvrambroker.so.N. */
#define VRAMBROKER_ABI_VERSION 1

#define VRAMBROKER_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Errors ---- */

/* gRPC's codes, as far as they occur: */
enum vrambroker_code {
  VRAMBROKER_OK = 0,
  VRAMBROKER_CANCELLED = 1, /* the caller has given up waiting: see vrambroker_malloc_until() */
  VRAMBROKER_UNKNOWN = 2,
  VRAMBROKER_INVALID_ARGUMENT = 3,    /* from the caller: a wild pointer, a double free, a malformed limit */
  VRAMBROKER_DEADLINE_EXCEEDED = 4,   /* the daemon did not answer in time */
  VRAMBROKER_NOT_FOUND = 5,           /* no such device */
  VRAMBROKER_PERMISSION_DENIED = 7,   /* the sockets belong to another user */
  VRAMBROKER_RESOURCE_EXHAUSTED = 8,  /* no memory: see vrambroker_last_out_of_memory(). Held memory stays usable. */
  VRAMBROKER_FAILED_PRECONDITION = 9, /* a wrong version; or a child made by fork() */
  VRAMBROKER_ABORTED = 10,            /* an operator has ended the session */
  VRAMBROKER_OUT_OF_RANGE = 11,       /* outside a block; a buffer is too small */
  VRAMBROKER_UNIMPLEMENTED = 12,
  VRAMBROKER_INTERNAL = 13,
  VRAMBROKER_UNAVAILABLE = 14 /* no daemon, or the daemon went away. Held memory stays usable. */
};

/* "UNAVAILABLE"; "UNKNOWN" for an unknown code. */
VRAMBROKER_API const char* vrambroker_code_name(int code);

/* From this thread's last failed call; successful calls do not change the error. Never NULL; the text is valid until
 * the next failed call on this thread. */
VRAMBROKER_API int vrambroker_last_error_code(void);
VRAMBROKER_API const char* vrambroker_last_error_message(void);

enum vrambroker_cause {
  VRAMBROKER_CAUSE_UNKNOWN = 0,
  VRAMBROKER_CAUSE_LIMIT = 1,             /* the session's limit */
  VRAMBROKER_CAUSE_CAPACITY = 2,          /* other sessions hold the rest of the device */
  VRAMBROKER_CAUSE_FRAGMENTATION = 3,     /* without the holes between used blocks, the request would have fit */
  VRAMBROKER_CAUSE_LARGER_THAN_DEVICE = 4 /* will never fit */
};

/* Why a request was refused. */
typedef struct vrambroker_out_of_memory {
  size_t struct_size;
  int cause; /* enum vrambroker_cause */
  int device;
  uint64_t requested_bytes;
  uint64_t segment_bytes; /* requested from the daemon for the request */
  uint64_t limit_bytes;
  uint64_t reserved_bytes;  /* segments held by this session */
  uint64_t allocated_bytes; /* handed out of segments */
  uint64_t idle_bytes;
  uint64_t largest_free_block_bytes;
  uint64_t device_capacity_bytes;
  uint64_t device_available_bytes; /* not reserved by any session */
  char advice[512];
  uint64_t guarantee_bytes;          /* of this session */
  uint64_t inactive_split_bytes;     /* of this session: free, in segments with used blocks */
  uint64_t device_kept_free_bytes;   /* part of device_available_bytes, kept for other sessions' guarantees */
  uint64_t device_idle_bytes;        /* kept by the daemon for reuse, not leased */
  uint64_t device_quarantined_bytes; /* of disconnected or ended sessions, and left by ended processes */
  uint64_t idle_elsewhere_bytes;     /* reserved by other sessions and not in use */
  uint64_t waited_ms;                /* milliseconds spent waiting for memory */
  uint64_t block_bytes;              /* requested_bytes, rounded */
  uint64_t room_bytes;               /* still reservable by this session */
  uint64_t hole_bytes;               /* of this session: free memory between used blocks, not returned by trims */
  uint64_t holes;                    /* number; 0 when only the application knows its holes */
  uint64_t hole_segments;            /* segments with holes */
  char explanation[1024];            /* the cause, with the deciding figures */
} vrambroker_out_of_memory;

/* OK when this thread's last error was a lack of device memory; else NOT_FOUND, not remembered as an error. */
VRAMBROKER_API int vrambroker_last_out_of_memory(vrambroker_out_of_memory* out);
/* The whole report as a JSON object with a terminating NUL, some KiB. Adds the scope of the request, the scopes and
 * sessions holding most, other sessions' idle memory with reasons, the segments with most holes, with the blocks
 * pinning the segments, and the number of the refusal for `vramctl ooms --diagnose`. Fields as in `vramctl ooms
 * --format=json`: client/JSON.md, "out of memory". `buffer`, `size` and `needed` as in vrambroker_memory_stats_json(),
 * but OUT_OF_RANGE and NOT_FOUND (as above, or no memory was left for the report) are not remembered as errors: call
 * again with a larger buffer. */
VRAMBROKER_API int vrambroker_last_out_of_memory_json(char* buffer, size_t size, size_t* needed);
VRAMBROKER_API const char* vrambroker_cause_name(int cause); /* "LIMIT", ... */

/* ---- Versions ---- */

VRAMBROKER_API int vrambroker_abi_version(void);     /* the library's VRAMBROKER_ABI_VERSION */
VRAMBROKER_API const char* vrambroker_version(void); /* the library's version: "0.1.0" */

/* ---- Amounts as people write them ---- */

/* "8G", "8GiB" (2^30), "24GB" (10^9), "512MiB", "1.5GiB", "2097152"; drops fractions of a byte. INVALID_ARGUMENT: the
 * message names the accepted forms, and `*bytes` is not changed. */
VRAMBROKER_API int vrambroker_parse_bytes(const char* text, uint64_t* bytes);
/* "500ms", "30s", "10m", "10min", "2h", "1d", "1h30m", "0"; rounds up fractions of a millisecond. INVALID_ARGUMENT as
 * above, also for a number without a unit. */
VRAMBROKER_API int vrambroker_parse_duration(const char* text, int64_t* milliseconds);

/* ---- Sessions ---- */

typedef struct vrambroker_client vrambroker_client;

enum vrambroker_placement {
  VRAMBROKER_LEASED = 0, /* blocks are cut in this process: a request served from the cache makes no call */
  VRAMBROKER_REMOTE = 1  /* every request is a call to the daemon; for programs with rare allocations */
};

/* All zero, except the first two fields, means all defaults. */
typedef struct vrambroker_options {
  size_t struct_size;
  uint32_t abi_version;   /* VRAMBROKER_ABI_VERSION */
  uint32_t placement;     /* enum vrambroker_placement */
  const char* socket_dir; /* NULL: $VRAMBROKER_SOCKET_DIR, or else /run/vrambroker */
  /* The session's name in metrics, logs and tools; up to 63 letters, digits and . _ - / : @ characters. Other
   * characters become _, the rest is cut, and the log says so. NULL: $VRAMBROKER_NAME, else the command name of this
   * process. */
  const char* name;
  /* An upper bound on reserved memory: a size as in vrambroker_parse_bytes(), or "0.5" or "50%" of each device's
   * capacity. A number below 1048576 without a unit is refused. NULL: $VRAMBROKER_LIMIT, else the limit of the daemon's
   * policy. */
  const char* limit;
  /* Settings of the session's allocator, in PyTorch's syntax: "max_split_size_mb:128". NULL: the first variable set
   * among $PYTORCH_CUDA_ALLOC_CONF, $PYTORCH_HIP_ALLOC_CONF, $PYTORCH_ALLOC_CONF. "": the daemon's settings. */
  const char* alloc_conf;
  int64_t idle_decay_ms;      /* segments without blocks are returned automatically after this time; 0: never */
  int64_t connect_timeout_ms; /* 0: 5 s */
  int64_t call_timeout_ms;    /* 0: 30 s */
  /* Called on a thread of the library with `context`; must not block or disconnect. */
  void (*on_lost)(void* context, int code, const char* message); /* each time the daemon is lost; or NULL */
  void (*log)(void* context, const char* line); /* daemon lost or reached again, or name changed; NULL: stderr */
  void* context;
  /* Memory of each device to be kept free for this session at all times; as `limit`. NULL: $VRAMBROKER_GUARANTEE, else
   * everything granted by the daemon's policy. */
  const char* guarantee;
  /* Time for a request without memory to wait for returns by other sessions; at most an hour. 0: $VRAMBROKER_WAIT, else
   * no wait. */
  int64_t wait_ms;
  /* The session's devices, separated by commas, each by the daemon's ordinal or by UUID: "0" or "GPU-...,1". The
   * session cannot use other devices, and its guarantee applies to these devices only. NULL: $VRAMBROKER_DEVICES, else
   * the GPUs visible to this process (CUDA_VISIBLE_DEVICES), or all devices when the process sees all GPUs, or none. */
  const char* devices;
} vrambroker_options;

#define VRAMBROKER_OPTIONS_INIT \
  { sizeof(vrambroker_options), VRAMBROKER_ABI_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* `options` NULL: all defaults. FAILED_PRECONDITION when the program was compiled for another abi_version. */
VRAMBROKER_API int vrambroker_connect(const vrambroker_options* options, vrambroker_client** client);
/* Ends the session. Memory not yet returned stays usable, and charged, until the process ends. NULL: does nothing.
 * Waits for a running callback; no callback runs after the return. Waits 2 s for a silent daemon; later a thread of the
 * library tells the daemon as soon as it answers. */
VRAMBROKER_API int vrambroker_disconnect(vrambroker_client* client);
/* For programs returning much memory before vrambroker_disconnect(): from now on, calls returning memory
 * (vrambroker_free(), vrambroker_return_segment(), vrambroker_empty_cache()) wait at most 2 s for a silent daemon, then
 * not again until the daemon has answered. A thread of the library later tells the daemon the rest. */
VRAMBROKER_API int vrambroker_begin_disconnect(vrambroker_client* client);

/* OK while the session lives; else the reason for its end. LEASED: OK again after reaching the daemon, or a new daemon;
 * memory from an old daemon stays usable until freed. */
VRAMBROKER_API int vrambroker_status(vrambroker_client* client);

typedef struct vrambroker_session {
  size_t struct_size;
  uint64_t session_id;
  uint64_t calls; /* calls to the daemon so far; for benchmarks */
  char name[128]; /* made unique by the daemon */
} vrambroker_session;

VRAMBROKER_API int vrambroker_get_session(vrambroker_client* client, vrambroker_session* out);
/* Warnings from connecting: a sentence for each allocator setting without effect. NULL past the last warning. Valid
 * until the client is disconnected. */
VRAMBROKER_API const char* vrambroker_warning(vrambroker_client* client, size_t index);

/* ---- Devices ---- */

typedef struct vrambroker_device {
  size_t struct_size;
  int ordinal; /* index among the daemon's devices, from 0 */
  uint64_t total_bytes;
  uint64_t capacity_bytes; /* part available to sessions */
  uint64_t limit_bytes;    /* now: the session's limit, changeable by an operator, or vrambroker_set_memory_fraction()'s
                            * limit */
  char kind[16];           /* "host" or "cuda" */
  char uuid[64];
  char name[128];
} vrambroker_device;

VRAMBROKER_API int vrambroker_device_count(vrambroker_client* client, int* count);
VRAMBROKER_API int vrambroker_get_device(vrambroker_client* client, int device, vrambroker_device* out);

/* ---- Memory ---- */

/* Allocates at least 1 byte. `stream` is the memory's queue of GPU work, a cudaStream_t: freed memory serves only its
 * own stream, and returns to the daemon when the stream's work is done. Without `stream`: the default stream. Call
 * vrambroker_empty_cache() before destroying a stream: afterwards the library can only wait for all devices, which
 * invalidates every capture of a CUDA graph. */
VRAMBROKER_API int vrambroker_malloc(vrambroker_client* client, uint64_t bytes, int device, void** pointer);
VRAMBROKER_API int vrambroker_malloc_stream(vrambroker_client* client, uint64_t bytes, int device, void* stream,
                                            void** pointer);
/* Like vrambroker_malloc_stream(), but does not wait for memory (wait_ms) once `*give_up` is not 0: returns CANCELLED,
 * soon after another thread has set the flag, unless memory is available without waiting. Reads the flag without a
 * lock; NULL: never gives up. REMOTE: with the flag already set, makes no request that may have to wait. */
VRAMBROKER_API int vrambroker_malloc_until(vrambroker_client* client, uint64_t bytes, int device, void* stream,
                                           const int* give_up, void** pointer);
/* INVALID_ARGUMENT, without effect, when `pointer` is not from vrambroker_malloc() of this client, or was freed
 * already. NULL: does nothing. Work on the block's own stream may still be running. */
VRAMBROKER_API int vrambroker_free(vrambroker_client* client, void* pointer);
/* Frees memory last used by `stream`, like vrambroker_record_stream() and vrambroker_free(). REMOTE: waits for all work
 * queued on `stream`. FAILED_PRECONDITION, without effect, when waiting is impossible, as during a CUDA graph capture
 * on `stream`. */
VRAMBROKER_API int vrambroker_free_stream(vrambroker_client* client, void* pointer, void* stream);
/* Declares that `stream` uses the memory, too: freed memory is not reused before all work queued on `stream` at the
 * free is done. Destroy `stream` only after the free; if a CUDA graph was being captured on `stream` then, only after
 * its work is done, since CUDA reuses the handle for new streams. LEASED only (FAILED_PRECONDITION). */
VRAMBROKER_API int vrambroker_record_stream(vrambroker_client* client, void* pointer, void* stream);

/* Leases a whole segment, for programs with a custom allocator; rounded up to 2 MiB. Not cached: leasing and returning
 * are round trips to the daemon. LEASED only (FAILED_PRECONDITION). */
VRAMBROKER_API int vrambroker_lease_segment(vrambroker_client* client, uint64_t bytes, int device, void** pointer);
/* Like vrambroker_lease_segment(), with `give_up` as in vrambroker_malloc_until(). */
VRAMBROKER_API int vrambroker_lease_segment_until(vrambroker_client* client, uint64_t bytes, int device,
                                                  const int* give_up, void** pointer);
/* After the return, no GPU work uses the segment, and the daemon has the segment back. UNAVAILABLE: the daemon is gone,
 * or gets the segment after a reconnect; in any case the memory is no longer yours. Waits for the whole device, like
 * cudaFree(). The wait invalidates every CUDA graph capture on the device, on any thread and in any mode: name the
 * stream when there may be captures. */
VRAMBROKER_API int vrambroker_return_segment(vrambroker_client* client, void* pointer);
/* Returns a segment used only by work on `stream`, and waits only for `stream`. During a CUDA graph capture on
 * `stream`, the library keeps the segment, and returns it on a library thread afterwards. */
VRAMBROKER_API int vrambroker_return_segment_stream(vrambroker_client* client, void* pointer, void* stream);

/* For programs with a caching allocator of their own over whole segments. LEASED only (FAILED_PRECONDITION). */

/* Like vrambroker_lease_segment(), but from free memory only: asks no session to return memory, does not wait, and does
 * not count a refusal (RESOURCE_EXHAUSTED). For programs that then free their cache, and ask again. */
VRAMBROKER_API int vrambroker_try_lease_segment(vrambroker_client* client, uint64_t bytes, int device, void** pointer);

/* The program's current use of its segments on a device. The rest of the leased memory is freed, but still in use by a
 * stream. */
typedef struct vrambroker_segment_use {
  size_t struct_size;
  uint64_t allocated_bytes;      /* in blocks handed out */
  uint64_t requested_bytes;      /* part of allocated_bytes, as requested */
  uint64_t inactive_split_bytes; /* free, in segments with used blocks */
  uint64_t idle_bytes;           /* in segments without blocks: returnable */
  uint64_t allocated_bytes_peak; /* maximum of allocated_bytes so far; 0: the maximum reported */
} vrambroker_segment_use;

/* The daemon shows the figures, and asks for reclaimable memory when other sessions need memory. Without a report, all
 * leased memory counts as in use, as do later leases until the next report. */
VRAMBROKER_API int vrambroker_report_segment_use(vrambroker_client* client, int device,
                                                 const vrambroker_segment_use* use);

/* The daemon's request for the program's reclaimable memory. */
typedef struct vrambroker_trim {
  size_t struct_size;
  uint64_t number;
  uint64_t bytes;  /* wanted; UINT64_MAX: all reclaimable memory */
  int64_t time_ms; /* time until the daemon gets an answer */
  int device;      /* -1: any device */
} vrambroker_trim;

/* Sets whether the program answers trims, by vrambroker_wait_for_trim() on a dedicated thread. `on` 0: makes
 * vrambroker_wait_for_trim() return CANCELLED. */
VRAMBROKER_API int vrambroker_serve_trims(vrambroker_client* client, int on);
/* Waits for the daemon's request; DEADLINE_EXCEEDED after `timeout_ms`. The program returns unused segments, if any,
 * then calls vrambroker_end_trim(). The daemon gets an answer as soon as the requested bytes are back, and in any case
 * after `time_ms`: it never waits longer for the program. */
VRAMBROKER_API int vrambroker_wait_for_trim(vrambroker_client* client, int64_t timeout_ms, vrambroker_trim* out);
/* INVALID_ARGUMENT when no trim had this number. */
VRAMBROKER_API int vrambroker_end_trim(vrambroker_client* client, uint64_t number);

/* Copy between ordinary memory and [pointer + offset, pointer + offset + bytes), on any device; done at the return.
 * `pointer` must come from vrambroker_malloc() or vrambroker_lease_segment(). OUT_OF_RANGE outside the block. */
VRAMBROKER_API int vrambroker_write(vrambroker_client* client, void* pointer, uint64_t offset, const void* from,
                                    uint64_t bytes);
VRAMBROKER_API int vrambroker_read(vrambroker_client* client, const void* pointer, uint64_t offset, void* to,
                                   uint64_t bytes);

/* Returns wholly free segments to the daemon; `released_bytes` may be NULL. Waits for streams still using freed blocks.
 */
VRAMBROKER_API int vrambroker_empty_cache(vrambroker_client* client, uint64_t* released_bytes);

/* ---- Figures ---- */

/* Like cudaMemGetInfo(), for this session: `total_bytes` is the limit, `free_bytes` the limit minus allocated bytes.
 * Other sessions may reserve the memory first. */
VRAMBROKER_API int vrambroker_memory_info(vrambroker_client* client, int device, uint64_t* free_bytes,
                                          uint64_t* total_bytes);

/* The main figures of torch.cuda.memory_stats(), with PyTorch's meanings. */
typedef struct vrambroker_memory_stats {
  size_t struct_size;
  uint64_t allocated_bytes; /* in blocks handed out, rounded */
  uint64_t allocated_bytes_peak;
  uint64_t reserved_bytes; /* in segments held */
  uint64_t reserved_bytes_peak;
  uint64_t active_bytes; /* allocated, or freed and still in use by a stream */
  uint64_t active_bytes_peak;
  uint64_t requested_bytes; /* allocated, as requested */
  uint64_t requested_bytes_peak;
  uint64_t inactive_split_bytes; /* free in segments with used blocks */
  uint64_t allocations;          /* blocks handed out */
  uint64_t segments;
  uint64_t num_alloc_retries; /* requests needing a cache flush first */
  uint64_t num_ooms;
  uint64_t num_device_alloc; /* segments obtained, in total */
  uint64_t num_device_free;
} vrambroker_memory_stats;

VRAMBROKER_API int vrambroker_get_memory_stats(vrambroker_client* client, int device, vrambroker_memory_stats* out);
/* All keys of torch.cuda.memory_stats() as a JSON object, {"active.all.allocated": 12, ...}, with a terminating NUL.
 * Sets `needed` (may be NULL) to the required buffer size, about 5 KiB. OUT_OF_RANGE when `size` is smaller; `buffer`
 * may be NULL when `size` is 0. */
VRAMBROKER_API int vrambroker_memory_stats_json(vrambroker_client* client, int device, char* buffer, size_t size,
                                                size_t* needed);
VRAMBROKER_API int vrambroker_reset_peak_memory_stats(vrambroker_client* client, int device);
/* Resets peaks, and restarts the totals (allocated, freed, num_...) at 0. */
VRAMBROKER_API int vrambroker_reset_memory_stats(vrambroker_client* client, int device);
/* Resets only the totals, like torch.cuda.reset_accumulated_memory_stats(). LEASED only (FAILED_PRECONDITION). */
VRAMBROKER_API int vrambroker_reset_accumulated_memory_stats(vrambroker_client* client, int device);
/* The table of torch.cuda.memory_summary(), also shown by `vramctl summary`, with a terminating NUL, about 4 KiB.
 * `abbreviated` not 0: without the rows by pool. `buffer`, `size` and `needed` as in vrambroker_memory_stats_json(). */
VRAMBROKER_API int vrambroker_memory_summary(vrambroker_client* client, int device, int abbreviated, char* buffer,
                                             size_t size, size_t* needed);
/* Like torch.cuda.set_per_process_memory_fraction(): from now on this client reserves at most this fraction (0 to 1) of
 * the device's capacity, and never more than the session's limit; 1 removes the fraction. Held memory above the
 * fraction stays. The library refuses larger requests (RESOURCE_EXHAUSTED, cause LIMIT, with this limit) without
 * telling the daemon. INVALID_ARGUMENT: invalid fraction. LEASED only (FAILED_PRECONDITION). */
VRAMBROKER_API int vrambroker_set_memory_fraction(vrambroker_client* client, double fraction, int device);

/* ---- Recordings ---- */

/* From now on each device's heap keeps its last `max_events` events for snapshots, besides events kept so far; about 40
 * bytes per event. 0 restores the daemon's configuration (record_events). LEASED: events are in this process, without
 * need for the daemon. REMOTE: events are in the daemon; RESOURCE_EXHAUSTED when this user's remote sessions already
 * record the daemon's maximum. INVALID_ARGUMENT above 1000000. Times are exact when `max_events` exceeds record_events.
 * Segments of vrambroker_lease_segment() are not events. */
VRAMBROKER_API int vrambroker_set_recording(vrambroker_client* client, uint64_t max_events);
/* Writes all heaps with recorded events as a file in PyTorch's snapshot layout: a pickle, for `vramctl replay` and
 * pytorch.org/memory_viz, or JSON when `path` ends in ".json". Replaces the file atomically: a reader sees the old file
 * or the whole new file. Errors name the file, and leave the old file; RESOURCE_EXHAUSTED: the disk is full. LEASED:
 * works even after the daemon has gone. */
VRAMBROKER_API int vrambroker_dump_snapshot(vrambroker_client* client, const char* path);
/* Like vrambroker_dump_snapshot(), as a JSON object with a terminating NUL; `with_history` 0: only segments and blocks.
 * `buffer`, `size` and `needed` as in vrambroker_memory_stats_json(); when `size` was too small, `needed` leaves room
 * for events meanwhile. With history, up to about 250 bytes per event. */
VRAMBROKER_API int vrambroker_snapshot_json(vrambroker_client* client, int with_history, char* buffer, size_t size,
                                            size_t* needed);

/* ---- Scopes ---- */

/* Names the purpose of this thread's allocations, from now until vrambroker_scope_end(): the layers of a model, the
 * phases of a step. Snapshots, `vramctl map`, the daemon's page and reports of refusals then show held memory by scope.
 * Scopes nest: "layer3" within "forward" is "forward/layer3". Other threads are not affected. Applies to all clients of
 * the process. `file` and `line`: a frame of the thread's stack, with the function as `name`, shown only in snapshots;
 * NULL and 0 for a name. At most 4094 different names are kept, 128 bytes per name, 256 KiB in total; later names are
 * shown as one name. So a name should not contain a step number. Segments of vrambroker_lease_segment() are in no
 * scope. Scopes nest at most 64 deep, frames at most 48: a deeper scope changes nothing, and its allocations count for
 * the enclosing scope. Returns the thread's previous scope, for vrambroker_scope_end(): 0 for none. Does nothing when
 * `name` is NULL or empty. Never fails: without the library's core there are no scopes. */
VRAMBROKER_API uint32_t vrambroker_scope_begin(const char* name, const char* file, int line);
/* Makes `outer`, returned by vrambroker_scope_begin(), this thread's scope again; `outer` may come from another thread.
 */
VRAMBROKER_API void vrambroker_scope_end(uint32_t outer);

/* ---- PyTorch ---- */

/*
 * Building blocks of the Python package vrambroker.torch (client/python). `stream` is a cudaStream_t, `device` the
 * process's CUDA ordinal. All functions share a client of the process, never disconnected. All return NULL without
 * memory, or without a daemon: vrambroker_last_error_message() gives the reason, and so does a line on stderr, the
 * first time.
 */

/* Connects the shared client. FAILED_PRECONDITION when already connected. Without vrambroker_torch_connect() the first
 * use connects, from the environment alone: VRAMBROKER_SOCKET_DIR, VRAMBROKER_NAME, VRAMBROKER_LIMIT,
 * PYTORCH_CUDA_ALLOC_CONF. */
VRAMBROKER_API int vrambroker_torch_connect(const vrambroker_options* options);
/* The shared client, for its figures; connects at first use. Do not disconnect the client. */
VRAMBROKER_API int vrambroker_torch_client(vrambroker_client** client);
/* The daemon's ordinal of a CUDA device of this process, found by UUID. NOT_FOUND when the daemon does not serve the
 * device. */
VRAMBROKER_API int vrambroker_torch_device(int cuda_device, int* device);

/* Whole segments, for a caching allocator: torch.cuda.MemPool, or through vrambroker_torch_serve(). PyTorch passes both
 * functions the stream of the allocation: a segment returns when the stream's work is done. Do not use for a pool with
 * CUDA graphs: graphs run on other streams. */
VRAMBROKER_API void* vrambroker_torch_malloc(ssize_t size, int device, void* stream);
VRAMBROKER_API void vrambroker_torch_free(void* pointer, ssize_t size, int device, void* stream);

/* Blocks, for torch.cuda.memory.change_current_allocator(), called for every tensor. In a process with PyTorch a
 * refusal is not NULL, since PyTorch would take NULL for memory, but PyTorch's C++ exception:
 * torch.cuda.OutOfMemoryError. */
VRAMBROKER_API void* vrambroker_torch_cached_malloc(ssize_t size, int device, void* stream);
VRAMBROKER_API void vrambroker_torch_cached_free(void* pointer, ssize_t size, int device, void* stream);
/* Like vrambroker_record_stream() and vrambroker_empty_cache(). */
VRAMBROKER_API void vrambroker_torch_record_stream(void* pointer, void* stream);
VRAMBROKER_API void vrambroker_torch_empty_cache(void);
/* Maximum bytes, as requested, that vrambroker_torch_cached_malloc() hands out on a device; 0: up to the limit.
 * NOT_FOUND: no such device. */
VRAMBROKER_API int vrambroker_torch_set_cap(int device, uint64_t bytes);

/*
 * From now on vrambroker_torch_malloc() and vrambroker_torch_free() answer the calls of cudaMalloc(), cudaFree() and
 * cudaMemGetInfo() by a single library of this process, on every thread; other libraries are not affected. `library` is
 * the beginning of the library's file name; NULL: "libc10_cuda.so", PyTorch's caching allocator. Memory allocated
 * before stays as it is. A segment belongs to the current stream of the requesting thread, and returns when the
 * stream's work is done; when PyTorch has a pool in use, captures a CUDA graph, or does not tell the current stream, a
 * segment returns after all work on the device, like cudaFree(). cudaMemGetInfo() reports the session's limit, and the
 * rest of the limit. NOT_FOUND when the library is not loaded; UNIMPLEMENTED when its calls cannot be redirected: a
 * statically linked CUDA runtime. At most one library per process.
 */
VRAMBROKER_API int vrambroker_torch_serve(const char* library);
/* New memory comes from CUDA again; memory from the daemon returns to the daemon when freed. */
VRAMBROKER_API void vrambroker_torch_unserve(void);

/*
 * PyTorch calls cudaMalloc() for a request, frees its cache on failure, and calls again on the same thread. So the
 * first call is answered at once, from free memory. The second call, of the same size, asks other sessions for
 * reclaimable memory, and waits (wait_ms). While PyTorch captures a CUDA graph or has a pool in use, PyTorch calls only
 * once: call vrambroker_torch_count_captures() with 1 when a capture or a pool begins, with -1 at the end.
 */
VRAMBROKER_API void vrambroker_torch_count_captures(int change);
/* Number of threads now inside such calls of cudaMalloc(). */
VRAMBROKER_API int vrambroker_torch_calls_under_way(void);

/* A request refused by a function above, on any thread. */
typedef struct vrambroker_torch_refusal {
  size_t struct_size;
  uint64_t number; /* 1 for the first refusal in the process, then counting up */
  uint64_t requested_bytes;
  int device; /* CUDA's ordinal */
  int code;   /* enum vrambroker_code */
  char message[2048];
  vrambroker_out_of_memory out_of_memory; /* all zero unless for lack of memory */
} vrambroker_torch_refusal;

/* `index` 0: the last refusal, 1: the refusal before. NOT_FOUND, not remembered as an error: no such refusal, or more
 * than 15 back. */
VRAMBROKER_API int vrambroker_torch_last_refusal(size_t index, vrambroker_torch_refusal* out);
/* Tells more about refusal `number`. NOT_FOUND, not remembered as an error: no such refusal, or more than 15 back. */
typedef struct vrambroker_torch_refusal_origin {
  size_t struct_size;
  uint64_t thread;  /* the requesting thread: gettid() */
  int64_t age_ms;   /* since the refusal */
  int served_since; /* 1: the thread has requested as much again successfully */
} vrambroker_torch_refusal_origin;
VRAMBROKER_API int vrambroker_torch_get_refusal_origin(uint64_t number, vrambroker_torch_refusal_origin* out);
/* The whole report of refusal `number`, like vrambroker_last_out_of_memory_json(). NOT_FOUND when the refusal was not
 * for lack of memory, or is more than 15 back. */
VRAMBROKER_API int vrambroker_torch_out_of_memory_json(uint64_t number, char* buffer, size_t size, size_t* needed);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* VRAMBROKER_VRAMBROKER_H_ */
