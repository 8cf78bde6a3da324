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
 * By default the process has a caching allocator of its own, over whole segments leased from the daemon: a request that
 * the cache can serve makes no call. The daemon still owns, counts and limits every byte. A C++ program may use
 * vrambroker/client.h instead; a process can use one of the two libraries, not both.
 *
 * Units     All sizes are bytes, all times milliseconds.
 * Errors    Functions return VRAMBROKER_OK or the code of an error; vrambroker_last_error_message() says more. Nothing
 *           here ends or blocks the process, whatever happens to the daemon. A pointer that an error could not fill is
 *           set to NULL.
 * Threads   All functions may be called from any thread, at the same time too, except that nobody may use a client
 *           during or after its vrambroker_disconnect(). Not from signal handlers, and a thread must not be cancelled
 *           (pthread_cancel) inside.
 * fork()    In a child made by fork() after the parent's first vrambroker_connect() that found a daemon, every call
 *           fails with FAILED_PRECONDITION; the parent is not affected. Fork before that, or exec.
 * Copies    Several copies of the library in a process share the core of the first that connects. One of another
 *           version cannot, and fails with FAILED_PRECONDITION.
 * Structs   Set struct_size to sizeof: the library fills, or reads, no more than that.
 */
#ifndef VRAMBROKER_VRAMBROKER_H_
#define VRAMBROKER_VRAMBROKER_H_

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Changes when programs have to be compiled anew; libvrambroker.so.N has the number in its name. */
#define VRAMBROKER_ABI_VERSION 1

#define VRAMBROKER_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Errors ---- */

/* The codes of gRPC, of which these occur: */
enum vrambroker_code {
  VRAMBROKER_OK = 0,
  VRAMBROKER_CANCELLED = 1, /* the caller has given up waiting: see vrambroker_malloc_until() */
  VRAMBROKER_UNKNOWN = 2,
  VRAMBROKER_INVALID_ARGUMENT = 3,    /* of the caller: a wild pointer, freed twice, a limit that is no size */
  VRAMBROKER_DEADLINE_EXCEEDED = 4,   /* the daemon did not answer in time */
  VRAMBROKER_NOT_FOUND = 5,           /* no such device */
  VRAMBROKER_PERMISSION_DENIED = 7,   /* the sockets belong to another user */
  VRAMBROKER_RESOURCE_EXHAUSTED = 8,  /* no memory: see vrambroker_last_out_of_memory(). What is held stays usable. */
  VRAMBROKER_FAILED_PRECONDITION = 9, /* the wrong version of something; or a child made by fork() */
  VRAMBROKER_ABORTED = 10,            /* the session was ended by an operator */
  VRAMBROKER_OUT_OF_RANGE = 11,       /* outside of a block; a buffer is too small */
  VRAMBROKER_UNIMPLEMENTED = 12,
  VRAMBROKER_INTERNAL = 13,
  VRAMBROKER_UNAVAILABLE = 14 /* no daemon, or it went away. What is held stays usable. */
};

/* "UNAVAILABLE"; "UNKNOWN" for a number that is no code. */
VRAMBROKER_API const char* vrambroker_code_name(int code);

/* Of the last call on this thread that failed; successful calls do not change them. Never NULL; the text is valid until
 * the next call that fails on this thread. */
VRAMBROKER_API int vrambroker_last_error_code(void);
VRAMBROKER_API const char* vrambroker_last_error_message(void);

enum vrambroker_cause {
  VRAMBROKER_CAUSE_UNKNOWN = 0,
  VRAMBROKER_CAUSE_LIMIT = 1,             /* the session's limit */
  VRAMBROKER_CAUSE_CAPACITY = 2,          /* others hold the rest of the device */
  VRAMBROKER_CAUSE_FRAGMENTATION = 3,     /* without the holes between its blocks the session would have had it */
  VRAMBROKER_CAUSE_LARGER_THAN_DEVICE = 4 /* it will never fit */
};

/* Why a request was refused. */
typedef struct vrambroker_out_of_memory {
  size_t struct_size;
  int cause; /* enum vrambroker_cause */
  int device;
  uint64_t requested_bytes;
  uint64_t segment_bytes; /* what was asked of the daemon to serve the request */
  uint64_t limit_bytes;
  uint64_t reserved_bytes;  /* segments held by this session */
  uint64_t allocated_bytes; /* handed out of them */
  uint64_t idle_bytes;
  uint64_t largest_free_block_bytes;
  uint64_t device_capacity_bytes;
  uint64_t device_available_bytes; /* reserved by nobody */
  char advice[512];
  uint64_t guarantee_bytes;          /* of this session */
  uint64_t inactive_split_bytes;     /* of this session: free, in segments that also hold used blocks */
  uint64_t device_kept_free_bytes;   /* of device_available_bytes: kept for other sessions' guarantees */
  uint64_t device_idle_bytes;        /* held by the daemon for reuse, leased to nobody */
  uint64_t device_quarantined_bytes; /* of sessions that disconnected or were ended, and what ended processes left */
  uint64_t idle_elsewhere_bytes;     /* reserved by other sessions and not in use */
  uint64_t waited_ms;                /* milliseconds that the request waited for memory */
  uint64_t block_bytes;              /* requested_bytes, rounded */
  uint64_t room_bytes;               /* that this session could still reserve */
  uint64_t hole_bytes;               /* of this session: free memory between used blocks, which no trim returns */
  uint64_t holes;                    /* how many; 0 where only the application knows its holes */
  uint64_t hole_segments;            /* segments that have any */
  char explanation[1024];            /* the cause, with the figures that decide it */
} vrambroker_out_of_memory;

/* OK when the last error on this thread was for want of memory of a device; else NOT_FOUND, which is not remembered as
 * an error itself. */
VRAMBROKER_API int vrambroker_last_out_of_memory(vrambroker_out_of_memory* out);
/* The whole report as a JSON object, some KiB, with a NUL at its end: also which scope the request was in, which scopes
 * and which sessions hold most, what others hold idle and why, the segments with most holes, with the blocks that pin
 * them, and the number of the refusal, for `vramctl ooms --diagnose`. The fields are those of `vramctl ooms
 * --format=json`: client/JSON.md, "out of memory". `buffer`, `size` and `needed` as in vrambroker_memory_stats_json(),
 * but neither OUT_OF_RANGE nor NOT_FOUND (as above, or no memory was left to keep the report) is remembered as an
 * error: call it again with a larger buffer. */
VRAMBROKER_API int vrambroker_last_out_of_memory_json(char* buffer, size_t size, size_t* needed);
VRAMBROKER_API const char* vrambroker_cause_name(int cause); /* "LIMIT", ... */

/* ---- Versions ---- */

VRAMBROKER_API int vrambroker_abi_version(void);     /* of the library: its VRAMBROKER_ABI_VERSION */
VRAMBROKER_API const char* vrambroker_version(void); /* of the library: "0.1.0" */

/* ---- Amounts as people write them ---- */

/* "8G", "8GiB" (2^30), "24GB" (10^9), "512MiB", "1.5GiB", "2097152"; parts of a byte are dropped. INVALID_ARGUMENT: the
 * message names the accepted forms, and `*bytes` is not changed. */
VRAMBROKER_API int vrambroker_parse_bytes(const char* text, uint64_t* bytes);
/* "500ms", "30s", "10m", "10min", "2h", "1d", "1h30m", "0"; parts of a millisecond are rounded up. INVALID_ARGUMENT as
 * above, also for a number without a unit. */
VRAMBROKER_API int vrambroker_parse_duration(const char* text, int64_t* milliseconds);

/* ---- Sessions ---- */

typedef struct vrambroker_client vrambroker_client;

enum vrambroker_placement {
  VRAMBROKER_LEASED = 0, /* blocks are cut in this process: a request that the cache can serve makes no call */
  VRAMBROKER_REMOTE = 1  /* every request is a call to the daemon; for programs that allocate rarely */
};

/* All zero, but for the first two, means all defaults. */
typedef struct vrambroker_options {
  size_t struct_size;
  uint32_t abi_version;   /* VRAMBROKER_ABI_VERSION */
  uint32_t placement;     /* enum vrambroker_placement */
  const char* socket_dir; /* NULL: $VRAMBROKER_SOCKET_DIR, or else /run/vrambroker */
  /* What the session is called in metrics, logs and tools; up to 63 letters, digits and . _ - / : @ characters.
   * Others become _, the rest is cut, and the log says so. NULL: $VRAMBROKER_NAME, else the command name of this
   * process. */
  const char* name;
  /* An upper bound on reserved memory: a size as vrambroker_parse_bytes() reads it, or "0.5" or "50%" of each device's
   * capacity. A number below 1048576 without a unit is refused.
   * NULL: $VRAMBROKER_LIMIT, else what the daemon's policy allows. */
  const char* limit;
  /* How the session's allocator works, in PyTorch's syntax: "max_split_size_mb:128". NULL: the first that is set
   * of $PYTORCH_CUDA_ALLOC_CONF, $PYTORCH_HIP_ALLOC_CONF, $PYTORCH_ALLOC_CONF. "": the daemon's settings. */
  const char* alloc_conf;
  int64_t idle_decay_ms;      /* segments without blocks go back by themselves after so long; 0: never */
  int64_t connect_timeout_ms; /* 0: 5 s */
  int64_t call_timeout_ms;    /* 0: 30 s */
  /* Called on a thread of the library with `context`; must not block or disconnect. */
  void (*on_lost)(void* context, int code, const char* message); /* each time that the daemon is lost, or NULL */
  void (*log)(void* context, const char* line); /* the daemon lost, or reached again, or another name; NULL: stderr */
  void* context;
  /* What of each device is to be kept free for this session at all times; as `limit`. NULL: $VRAMBROKER_GUARANTEE,
   * else all that the daemon's policy grants. */
  const char* guarantee;
  /* A request without memory waits so long for others to give some back; at most an hour. 0: $VRAMBROKER_WAIT, else not
   * at all. */
  int64_t wait_ms;
  /* The daemon's devices that the session uses, between commas, each by its ordinal or its UUID: "0" or "GPU-...,1". It
   * has nothing of the others, and its guarantee is taken on these alone. NULL: $VRAMBROKER_DEVICES, else the GPUs that
   * this process sees (CUDA_VISIBLE_DEVICES), or all devices if it sees all of them, or none. */
  const char* devices;
} vrambroker_options;

#define VRAMBROKER_OPTIONS_INIT \
  { sizeof(vrambroker_options), VRAMBROKER_ABI_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* `options` NULL: all defaults. FAILED_PRECONDITION when the program was compiled for another abi_version. */
VRAMBROKER_API int vrambroker_connect(const vrambroker_options* options, vrambroker_client** client);
/* Ends the session. What has not been given back stays usable, and charged, until the process ends. NULL: nothing.
 * Waits for a callback that is under way; none comes when it has returned. A daemon that does not answer is waited for
 * for 2 s, and then told by a thread of the library as soon as it answers. */
VRAMBROKER_API int vrambroker_disconnect(vrambroker_client* client);
/* For programs that give many things back before that: from now on, what gives something back (vrambroker_free(),
 * vrambroker_return_segment(), vrambroker_empty_cache()) waits for 2 s at most for a daemon that does not answer, and
 * not again before it has answered. What it could not be told, a thread of the library tells it later. */
VRAMBROKER_API int vrambroker_begin_disconnect(vrambroker_client* client);

/* OK while the session lives; else why it does not. LEASED: OK again when the daemon, or a new one, has been reached;
 * memory of an old one stays usable until it is freed. */
VRAMBROKER_API int vrambroker_status(vrambroker_client* client);

typedef struct vrambroker_session {
  size_t struct_size;
  uint64_t session_id;
  uint64_t calls; /* made to the daemon so far; for benchmarks */
  char name[128]; /* as the daemon made it unique */
} vrambroker_session;

VRAMBROKER_API int vrambroker_get_session(vrambroker_client* client, vrambroker_session* out);
/* What connecting found worth saying: a sentence for each setting of the allocator that has no effect. NULL past the
 * last one. Valid until the client is disconnected. */
VRAMBROKER_API const char* vrambroker_warning(vrambroker_client* client, size_t index);

/* ---- Devices ---- */

typedef struct vrambroker_device {
  size_t struct_size;
  int ordinal; /* place among the daemon's devices, from 0 */
  uint64_t total_bytes;
  uint64_t capacity_bytes; /* what the daemon hands out of it */
  uint64_t limit_bytes;    /* now: the session's, which an operator may change, or vrambroker_set_memory_fraction()'s */
  char kind[16];           /* "host" or "cuda" */
  char uuid[64];
  char name[128];
} vrambroker_device;

VRAMBROKER_API int vrambroker_device_count(vrambroker_client* client, int* count);
VRAMBROKER_API int vrambroker_get_device(vrambroker_client* client, int device, vrambroker_device* out);

/* ---- Memory ---- */

/* At least 1 byte. `stream` is the queue of GPU work that the memory is for, a cudaStream_t: memory that was freed
 * serves its own stream only, and goes back to the daemon when the work on that is done. Without one: the default
 * stream. Call vrambroker_empty_cache() before you destroy a stream: once it is gone, the library can only wait for all
 * devices, which makes every capture of a CUDA graph invalid. */
VRAMBROKER_API int vrambroker_malloc(vrambroker_client* client, uint64_t bytes, int device, void** pointer);
VRAMBROKER_API int vrambroker_malloc_stream(vrambroker_client* client, uint64_t bytes, int device, void* stream,
                                            void** pointer);
/* The same, without waiting for memory (wait_ms) once `*give_up` is not 0: CANCELLED, soon after another thread has set
 * it, where there is no memory without waiting. It is read without a lock; NULL: never. REMOTE: a request that may have
 * to wait is not made at all when it is set already. */
VRAMBROKER_API int vrambroker_malloc_until(vrambroker_client* client, uint64_t bytes, int device, void* stream,
                                           const int* give_up, void** pointer);
/* INVALID_ARGUMENT when `pointer` is not from vrambroker_malloc() of this client, or was freed: then nothing happens.
 * NULL: nothing to do. Work on the block's own stream may still be under way. */
VRAMBROKER_API int vrambroker_free(vrambroker_client* client, void* pointer);
/* Frees memory that `stream` used last, as vrambroker_record_stream() and vrambroker_free() do. REMOTE: waits
 * for what was queued on `stream` until then. FAILED_PRECONDITION when it cannot, as while a CUDA graph is captured on
 * `stream`: then nothing happens. */
VRAMBROKER_API int vrambroker_free_stream(vrambroker_client* client, void* pointer, void* stream);
/* `stream` uses the memory, too: after it is freed it is not reused before the work that was queued on `stream` until
 * then is done. Destroy `stream` after that only; if a CUDA graph was captured on it then, when its work is done, since
 * CUDA gives its handle to new streams. LEASED only (FAILED_PRECONDITION). */
VRAMBROKER_API int vrambroker_record_stream(vrambroker_client* client, void* pointer, void* stream);

/* A whole segment, for programs with an allocator of their own; rounded up to 2 MiB. Not cached: a round trip to the
 * daemon, both ways. LEASED only (FAILED_PRECONDITION). */
VRAMBROKER_API int vrambroker_lease_segment(vrambroker_client* client, uint64_t bytes, int device, void** pointer);
/* The same, with `give_up` as in vrambroker_malloc_until(). */
VRAMBROKER_API int vrambroker_lease_segment_until(vrambroker_client* client, uint64_t bytes, int device,
                                                  const int* give_up, void** pointer);
/* When it returns, no work on the GPU uses the segment any more, and the daemon has it back. UNAVAILABLE: the daemon is
 * gone, or gets it when it is reached again; the memory is not yours in any case. Waits for the whole device, as
 * cudaFree() does. That makes every capture of a CUDA graph on the device invalid, on whatever thread and in whatever
 * mode: where there are captures, name the stream. */
VRAMBROKER_API int vrambroker_return_segment(vrambroker_client* client, void* pointer);
/* The same for a segment that only work on `stream` may still use, which is all that it waits for. While a CUDA graph
 * is captured on `stream`, the segment is kept, and a thread of the library gives it back afterwards. */
VRAMBROKER_API int vrambroker_return_segment_stream(vrambroker_client* client, void* pointer, void* stream);

/*
 * For programs with an allocator of their own over whole segments, which caches some. LEASED only
 * (FAILED_PRECONDITION).
 */

/* As vrambroker_lease_segment(), of what is free now: nobody is asked to give memory back, nothing is waited for, and a
 * refusal (RESOURCE_EXHAUSTED) is not counted as one. For programs that then free what they cache, and ask again. */
VRAMBROKER_API int vrambroker_try_lease_segment(vrambroker_client* client, uint64_t bytes, int device, void** pointer);

/* What the program makes of the segments that it holds on a device, at this moment. The rest of what it has leased is
 * freed, but still in use by a stream. */
typedef struct vrambroker_segment_use {
  size_t struct_size;
  uint64_t allocated_bytes;      /* in blocks handed out */
  uint64_t requested_bytes;      /* of these, as asked for */
  uint64_t inactive_split_bytes; /* free, in segments that also hold used blocks */
  uint64_t idle_bytes;           /* of segments that hold no block: what it could give back */
  uint64_t allocated_bytes_peak; /* the most of allocated_bytes so far; 0: the most that was reported */
} vrambroker_segment_use;

/* The daemon shows it, and asks for what is reclaimable when others need it. Without it, all that is leased counts as
 * in use, as what is leased from now on does until the next report. */
VRAMBROKER_API int vrambroker_report_segment_use(vrambroker_client* client, int device,
                                                 const vrambroker_segment_use* use);

/* The daemon asks for memory that is reclaimable in the program. */
typedef struct vrambroker_trim {
  size_t struct_size;
  uint64_t number;
  uint64_t bytes;  /* wanted; UINT64_MAX: all that is reclaimable */
  int64_t time_ms; /* until the daemon gets its answer */
  int device;      /* -1: of any */
} vrambroker_trim;

/* Whether the program answers, by vrambroker_wait_for_trim() on a thread of its own. `on` 0: that returns CANCELLED. */
VRAMBROKER_API int vrambroker_serve_trims(vrambroker_client* client, int on);
/* Waits until the daemon asks; DEADLINE_EXCEEDED after `timeout_ms`. The program returns segments that it does not use,
 * and calls vrambroker_end_trim() then, also when there are none. The daemon hears as soon as it has what it asked for,
 * and after `time_ms` in any case: it never waits longer for the program. */
VRAMBROKER_API int vrambroker_wait_for_trim(vrambroker_client* client, int64_t timeout_ms, vrambroker_trim* out);
/* INVALID_ARGUMENT when no trim had this number. */
VRAMBROKER_API int vrambroker_end_trim(vrambroker_client* client, uint64_t number);

/* Copies between ordinary memory and [pointer + offset, pointer + offset + bytes), on any device; done when it returns.
 * `pointer` as vrambroker_malloc() or vrambroker_lease_segment() gave it. OUT_OF_RANGE outside of the block. */
VRAMBROKER_API int vrambroker_write(vrambroker_client* client, void* pointer, uint64_t offset, const void* from,
                                    uint64_t bytes);
VRAMBROKER_API int vrambroker_read(vrambroker_client* client, const void* pointer, uint64_t offset, void* to,
                                   uint64_t bytes);

/* Gives wholly free segments back to the daemon; `released_bytes` may be NULL. Waits for streams that still use freed
 * blocks. */
VRAMBROKER_API int vrambroker_empty_cache(vrambroker_client* client, uint64_t* released_bytes);

/* ---- Figures ---- */

/* As cudaMemGetInfo(), for this session: `total_bytes` is its limit, `free_bytes` the limit less what is allocated.
 * Others may have reserved the memory first. */
VRAMBROKER_API int vrambroker_memory_info(vrambroker_client* client, int device, uint64_t* free_bytes,
                                          uint64_t* total_bytes);

/* The main ones of torch.cuda.memory_stats(), with its meanings. */
typedef struct vrambroker_memory_stats {
  size_t struct_size;
  uint64_t allocated_bytes; /* in blocks handed out, rounded */
  uint64_t allocated_bytes_peak;
  uint64_t reserved_bytes; /* in segments held */
  uint64_t reserved_bytes_peak;
  uint64_t active_bytes; /* allocated, or freed and still in use by a stream */
  uint64_t active_bytes_peak;
  uint64_t requested_bytes; /* allocated, as asked for */
  uint64_t requested_bytes_peak;
  uint64_t inactive_split_bytes; /* free in segments that also hold used blocks */
  uint64_t allocations;          /* blocks handed out */
  uint64_t segments;
  uint64_t num_alloc_retries; /* requests that needed the cache flushed first */
  uint64_t num_ooms;
  uint64_t num_device_alloc; /* segments obtained, in all */
  uint64_t num_device_free;
} vrambroker_memory_stats;

VRAMBROKER_API int vrambroker_get_memory_stats(vrambroker_client* client, int device, vrambroker_memory_stats* out);
/* All keys of torch.cuda.memory_stats() as a JSON object, {"active.all.allocated": 12, ...}, with a NUL at its end.
 * `needed` (may be NULL) is set to the size of buffer that it takes, about 5 KiB. OUT_OF_RANGE when `size` is less;
 * `buffer` may be NULL when `size` is 0. */
VRAMBROKER_API int vrambroker_memory_stats_json(vrambroker_client* client, int device, char* buffer, size_t size,
                                                size_t* needed);
VRAMBROKER_API int vrambroker_reset_peak_memory_stats(vrambroker_client* client, int device);
/* The same, and the totals (allocated, freed, num_...) start again at 0. */
VRAMBROKER_API int vrambroker_reset_memory_stats(vrambroker_client* client, int device);
/* The totals alone, as torch.cuda.reset_accumulated_memory_stats(). LEASED only (FAILED_PRECONDITION). */
VRAMBROKER_API int vrambroker_reset_accumulated_memory_stats(vrambroker_client* client, int device);
/* The table of torch.cuda.memory_summary(), also of `vramctl summary`, with a NUL at its end, about 4 KiB.
 * `abbreviated` not 0: without its rows by pool. `buffer`, `size` and `needed` as in vrambroker_memory_stats_json(). */
VRAMBROKER_API int vrambroker_memory_summary(vrambroker_client* client, int device, int abbreviated, char* buffer,
                                             size_t size, size_t* needed);
/* As torch.cuda.set_per_process_memory_fraction(): from now on this client reserves at most this fraction (0 to 1) of
 * the device's capacity, and never more than the session's limit; 1 ends that. What is held beyond it stays. A request
 * that does not fit is refused here (RESOURCE_EXHAUSTED, cause LIMIT, with this limit), and the daemon does not hear of
 * it. INVALID_ARGUMENT: no such fraction. LEASED only (FAILED_PRECONDITION). */
VRAMBROKER_API int vrambroker_set_memory_fraction(vrambroker_client* client, double fraction, int device);

/* ---- Recordings ---- */

/* From now on each device's heap keeps its last `max_events` events for snapshots, beside those that it has kept so
 * far, about 40 bytes each. 0 ends that: it keeps again what the daemon's configuration says (record_events). LEASED:
 * they are in this process, and the daemon is not needed. REMOTE: they are in the daemon; RESOURCE_EXHAUSTED when the
 * remote sessions of this user record as many events as it allows. INVALID_ARGUMENT above 1000000. Their times are
 * exact where that is more than record_events. Segments of vrambroker_lease_segment() are no events. */
VRAMBROKER_API int vrambroker_set_recording(vrambroker_client* client, uint64_t max_events);
/* Writes all heaps with their recorded events as a file in PyTorch's snapshot layout: a pickle, for `vramctl replay`
 * and pytorch.org/memory_viz, or JSON when `path` ends in ".json". Replaces the file in one step: a reader sees the old
 * file or the whole new one. Errors name the file, and the old one stays; RESOURCE_EXHAUSTED: its disk is full. LEASED:
 * also after the daemon has gone. */
VRAMBROKER_API int vrambroker_dump_snapshot(vrambroker_client* client, const char* path);
/* The same as a JSON object, with a NUL at its end; `with_history` 0: of the segments and blocks alone. `buffer`,
 * `size` and `needed` as in vrambroker_memory_stats_json(); where `size` was too small, `needed` has room for what the
 * application does meanwhile. With history, up to about 250 bytes an event. */
VRAMBROKER_API int vrambroker_snapshot_json(vrambroker_client* client, int with_history, char* buffer, size_t size,
                                            size_t* needed);

/* ---- Scopes ---- */

/* Names what this thread allocates for, from now until vrambroker_scope_end(): the layers of a model, the phases of a
 * step. Snapshots, `vramctl map`, the daemon's page and reports of refusals then say what holds the memory, by scope.
 * They nest: "layer3" within "forward" is "forward/layer3". Other threads are not in it. Of all clients of the process.
 * `file` and `line`: a frame of the thread's stack, with the function as its `name`, which only snapshots show; NULL
 * and 0 for a name. At most 4094 different names are kept, of 128 bytes each, 256 KiB in all; what comes later is shown
 * as one. So a name should not have the number of a step in it. Segments of vrambroker_lease_segment() are in no scope.
 * Scopes nest at most 64 deep, frames at most 48: a deeper one changes nothing, and what is allocated in it counts for
 * the one around it.
 * Returns the scope that the thread was in, for vrambroker_scope_end(): 0 for none. With a `name` that is NULL or empty
 * it changes nothing. Never fails: without the library's core there are no scopes. */
VRAMBROKER_API uint32_t vrambroker_scope_begin(const char* name, const char* file, int line);
/* This thread is in the scope `outer` of vrambroker_scope_begin() again, which may have been another thread's, too. */
VRAMBROKER_API void vrambroker_scope_end(uint32_t outer);

/* ---- PyTorch ---- */

/*
 * What the Python package vrambroker.torch is made of (client/python). `stream` is a cudaStream_t, `device` the
 * process's CUDA ordinal. All share one client of the process, which is never disconnected. NULL when there is no
 * memory, or no daemon: then vrambroker_last_error_message() says why, and so does a line on stderr, the first time.
 */

/* Connects that client. FAILED_PRECONDITION when it is connected already. Without it the first use connects, from the
 * environment alone: VRAMBROKER_SOCKET_DIR, VRAMBROKER_NAME, VRAMBROKER_LIMIT, PYTORCH_CUDA_ALLOC_CONF. */
VRAMBROKER_API int vrambroker_torch_connect(const vrambroker_options* options);
/* That client, for its figures; connects at first use. Do not disconnect it. */
VRAMBROKER_API int vrambroker_torch_client(vrambroker_client** client);
/* The daemon's ordinal of a CUDA device of this process, found by UUID. NOT_FOUND when the daemon does not serve it. */
VRAMBROKER_API int vrambroker_torch_device(int cuda_device, int* device);

/* Whole segments, for a caching allocator: torch.cuda.MemPool, or as vrambroker_torch_serve() does it. `stream` as
 * PyTorch names it to both, the one that it allocated for: a segment goes back when the work on that is done. A pool
 * that CUDA graphs take memory from is not to be of these: they run on other streams. */
VRAMBROKER_API void* vrambroker_torch_malloc(ssize_t size, int device, void* stream);
VRAMBROKER_API void vrambroker_torch_free(void* pointer, ssize_t size, int device, void* stream);

/* Blocks, for torch.cuda.memory.change_current_allocator(), which asks for every tensor. In a process with PyTorch a
 * refusal is not NULL, which PyTorch would take for memory, but its C++ exception: torch.cuda.OutOfMemoryError. */
VRAMBROKER_API void* vrambroker_torch_cached_malloc(ssize_t size, int device, void* stream);
VRAMBROKER_API void vrambroker_torch_cached_free(void* pointer, ssize_t size, int device, void* stream);
/* As vrambroker_record_stream() and vrambroker_empty_cache(). */
VRAMBROKER_API void vrambroker_torch_record_stream(void* pointer, void* stream);
VRAMBROKER_API void vrambroker_torch_empty_cache(void);
/* What vrambroker_torch_cached_malloc() hands out on a device at most, in bytes as asked for; 0: what the limit allows.
 * NOT_FOUND for no device of a process. */
VRAMBROKER_API int vrambroker_torch_set_cap(int device, uint64_t bytes);

/*
 * From now on the calls of cudaMalloc(), cudaFree() and cudaMemGetInfo() that one library of this process makes are
 * answered with vrambroker_torch_malloc() and vrambroker_torch_free(), on every thread; other libraries' are not.
 * `library` is the beginning of its file name; NULL: "libc10_cuda.so", PyTorch's caching allocator. What it got before
 * stays as it is. A segment is for the current stream of the thread that asked for it, and goes back when the work on
 * that is done; where PyTorch has a pool in use, captures a CUDA graph, or does not say which stream is current, when
 * all work on the device is, as with cudaFree(). cudaMemGetInfo() tells the session's limit, and what it leaves.
 * NOT_FOUND when the library is not loaded; UNIMPLEMENTED when its calls cannot be had: a CUDA runtime linked into it.
 * One library in a process.
 */
VRAMBROKER_API int vrambroker_torch_serve(const char* library);
/* New memory comes from CUDA again; what came from the daemon goes back to it when it is freed. */
VRAMBROKER_API void vrambroker_torch_unserve(void);

/*
 * PyTorch calls cudaMalloc() for a request, frees what it caches when that fails, and calls it again on the same
 * thread. So the first call is answered at once, with what is free. The second one, of the same size, has others asked
 * for reclaimable memory, and waits for it (wait_ms). While PyTorch captures a CUDA graph or has a pool in use, it
 * calls once only: call this with 1 when one of these begins, with -1 when it ends.
 */
VRAMBROKER_API void vrambroker_torch_count_captures(int change);
/* How many threads are in one of those calls of cudaMalloc() now. */
VRAMBROKER_API int vrambroker_torch_calls_under_way(void);

/* A request that one of the functions above refused, on whatever thread. */
typedef struct vrambroker_torch_refusal {
  size_t struct_size;
  uint64_t number; /* 1 for the first of the process, then counted up */
  uint64_t requested_bytes;
  int device; /* CUDA's */
  int code;   /* enum vrambroker_code */
  char message[2048];
  vrambroker_out_of_memory out_of_memory; /* all zero when it was not for want of memory */
} vrambroker_torch_refusal;

/* `index` 0: the last one, 1: the one before. NOT_FOUND when there was none, or it is more than 15 back; that is not
 * remembered as an error. */
VRAMBROKER_API int vrambroker_torch_last_refusal(size_t index, vrambroker_torch_refusal* out);
/* Says more of the refusal with this `number`. NOT_FOUND when there was none, or it is more than 15 back; that is not
 * remembered as an error. */
typedef struct vrambroker_torch_refusal_origin {
  size_t struct_size;
  uint64_t thread;  /* that asked: gettid() */
  int64_t age_ms;   /* since it was refused */
  int served_since; /* 1: that thread has asked for as much again, and got it */
} vrambroker_torch_refusal_origin;
VRAMBROKER_API int vrambroker_torch_get_refusal_origin(uint64_t number, vrambroker_torch_refusal_origin* out);
/* The whole report of the refusal with this `number`, as vrambroker_last_out_of_memory_json() has it. NOT_FOUND when it
 * was not for want of memory, or is more than 15 back. */
VRAMBROKER_API int vrambroker_torch_out_of_memory_json(uint64_t number, char* buffer, size_t size, size_t* needed);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* VRAMBROKER_VRAMBROKER_H_ */
