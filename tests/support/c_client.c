/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A C program that uses libvrambroker.so. Usage: c_client SCENARIO; VRAMBROKER_SOCKET_DIR names the daemon's directory.
 * The program exits with 0 when all checks of the scenario hold. c_api_test.cc runs the scenarios.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <vrambroker/vrambroker.h>

#include "c_client.h"

static vrambroker_client* connect_as(const char* name, const char* limit) {
  vrambroker_options options = VRAMBROKER_OPTIONS_INIT;
  options.name = name;
  options.limit = limit;
  options.connect_timeout_ms = options.call_timeout_ms = 60000;
  vrambroker_client* client = NULL;
  CHECK_OK(vrambroker_connect(&options, &client));
  CHECK(client != NULL);
  return client;
}

/* Tells whether the test device is a GPU. Programs touch memory of the host device directly, and copy memory of a
 * GPU. */
static int on_cuda(void) {
  const char* const device = getenv("VRAMBROKER_TEST_DEVICE");
  return device != NULL && strcmp(device, "host") != 0;
}

static void fill(vrambroker_client* client, void* memory, int byte, size_t bytes) {
  if (!on_cuda()) {
    memset(memory, byte, bytes);
    return;
  }
  void* const content = malloc(bytes);
  CHECK(content != NULL);
  memset(content, byte, bytes);
  CHECK_OK(vrambroker_write(client, memory, 0, content, bytes));
  free(content);
}

static unsigned char byte_at(vrambroker_client* client, const void* memory, size_t offset) {
  unsigned char byte = 0;
  if (!on_cuda()) return ((const unsigned char*)memory)[offset];
  CHECK_OK(vrambroker_read(client, memory, offset, &byte, 1));
  return byte;
}

static void sleep_ms(long ms) {
  const struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
  nanosleep(&time, NULL);
}

static void wait_for_status(vrambroker_client* client, int code) {
  for (int i = 0; i < 6000 && vrambroker_status(client) != code; ++i) sleep_ms(10);
  CHECK(vrambroker_status(client) == code);
}

static void wait_for_line(void) {
  char line[64];
  CHECK(fgets(line, sizeof line, stdin) != NULL);
}

static void say(const char* line) {
  puts(line);
  fflush(stdout);
}

/* ---- Scenarios ---- */

struct worker {
  vrambroker_client* client;
  unsigned seed;
};

static void* work(void* argument) {
  const struct worker* worker = argument;
  void* held[16] = {NULL};
  for (unsigned i = 0; i < 400; ++i) {
    const unsigned slot = (i * 7 + worker->seed) % 16;
    const size_t bytes = 1000 + (size_t)((i * 2654435761u + worker->seed) % 100000);
    const int byte = (int)((slot + worker->seed) % 251);
    if (held[slot] != NULL) {
      CHECK(byte_at(worker->client, held[slot], 0) == byte);
      CHECK_OK(vrambroker_free(worker->client, held[slot]));
    }
    CHECK_OK(vrambroker_malloc_stream(worker->client, bytes, 0, i % 3 ? NULL : (void*)0x1, &held[slot]));
    fill(worker->client, held[slot], byte, bytes);
  }
  for (unsigned slot = 0; slot < 16; ++slot) {
    CHECK_FAILS(vrambroker_free(worker->client, (char*)held[slot] + 1), VRAMBROKER_INVALID_ARGUMENT,
                "not from this client's Malloc");
    CHECK_OK(vrambroker_free(worker->client, held[slot]));
  }
  return NULL;
}

static void memory(vrambroker_client* client) {
  void* pointer = NULL;
  CHECK_OK(vrambroker_malloc(client, 3 * MIB, 0, &pointer));
  unsigned char* const content = malloc(3 * MIB);
  CHECK(content != NULL);
  for (uint64_t i = 0; i < 3 * MIB; ++i) content[i] = (unsigned char)(i % 253);
  CHECK_OK(vrambroker_write(client, pointer, 0, content, 3 * MIB));
  free(content);
  unsigned char bytes[1000];
  CHECK_OK(vrambroker_read(client, pointer, 2 * MIB, bytes, sizeof bytes));
  for (uint64_t i = 0; i < sizeof bytes; ++i) CHECK(bytes[i] == (2 * MIB + i) % 253);
  memset(bytes, 77, sizeof bytes);
  CHECK_OK(vrambroker_write(client, pointer, 3 * MIB - sizeof bytes, bytes, sizeof bytes));
  CHECK(byte_at(client, pointer, 3 * MIB - 1) == 77);
  CHECK_FAILS(vrambroker_write(client, pointer, 3 * MIB, bytes, 1), VRAMBROKER_OUT_OF_RANGE, "");
  CHECK_FAILS(vrambroker_read(client, pointer, UINT64_MAX, bytes, 2), VRAMBROKER_OUT_OF_RANGE, "");
  CHECK_FAILS(vrambroker_read(client, bytes, 0, bytes, 1), VRAMBROKER_INVALID_ARGUMENT, "pointer");
  CHECK_FAILS(vrambroker_read(client, pointer, 0, NULL, 1), VRAMBROKER_INVALID_ARGUMENT, "vrambroker_read: to is NULL");
  CHECK_OK(vrambroker_read(client, pointer, 0, NULL, 0));

  CHECK_OK(vrambroker_record_stream(client, pointer, (void*)0x2));
  CHECK_FAILS(vrambroker_record_stream(client, bytes, (void*)0x2), VRAMBROKER_INVALID_ARGUMENT, "pointer");
  CHECK_OK(vrambroker_free_stream(client, pointer, (void*)0x3));
  CHECK_FAILS(vrambroker_free(client, pointer), VRAMBROKER_INVALID_ARGUMENT, "already freed");
  CHECK_FAILS(vrambroker_free_stream(client, pointer, (void*)0x3), VRAMBROKER_INVALID_ARGUMENT, "already freed");
  CHECK_FAILS(vrambroker_free(client, bytes), VRAMBROKER_INVALID_ARGUMENT, "not from this client's Malloc");
  CHECK_FAILS(vrambroker_free(client, (void*)UINTPTR_MAX), VRAMBROKER_INVALID_ARGUMENT,
              "not from this client's Malloc");
  CHECK_OK(vrambroker_free(client, NULL));

  pointer = bytes;
  CHECK_FAILS(vrambroker_malloc(client, 0, 0, &pointer), VRAMBROKER_INVALID_ARGUMENT, "bytes");
  CHECK(pointer == NULL);
  CHECK_FAILS(vrambroker_malloc(client, 1, 7, &pointer), VRAMBROKER_NOT_FOUND, "no device 7");
  CHECK_FAILS(vrambroker_malloc(client, 1, -1, &pointer), VRAMBROKER_NOT_FOUND, "no device -1");
  CHECK_FAILS(vrambroker_malloc(NULL, 1, 0, &pointer), VRAMBROKER_INVALID_ARGUMENT, "client is NULL");
  CHECK_FAILS(vrambroker_malloc(client, 1, 0, NULL), VRAMBROKER_INVALID_ARGUMENT, "pointer is NULL");

  CHECK_OK(vrambroker_lease_segment(client, 1, 0, &pointer));
  CHECK_OK(vrambroker_write(client, pointer, 2 * MIB - 1, bytes, 1));
  CHECK(byte_at(client, pointer, 2 * MIB - 1) == 77);
  CHECK_FAILS(vrambroker_write(client, pointer, 2 * MIB, bytes, 1), VRAMBROKER_OUT_OF_RANGE, "");
  CHECK_FAILS(vrambroker_free(client, pointer), VRAMBROKER_INVALID_ARGUMENT, "not from this client's Malloc");
  CHECK_OK(vrambroker_return_segment(client, pointer));
  CHECK_FAILS(vrambroker_return_segment(client, pointer), VRAMBROKER_INVALID_ARGUMENT, "already returned");
  CHECK_OK(vrambroker_return_segment(client, NULL));

  CHECK_OK(vrambroker_lease_segment(client, 2 * MIB, 0, &pointer));
  CHECK_OK(vrambroker_return_segment_stream(client, pointer, NULL));
  CHECK_FAILS(vrambroker_return_segment_stream(client, pointer, NULL), VRAMBROKER_INVALID_ARGUMENT, "already returned");
  CHECK_OK(vrambroker_return_segment_stream(client, NULL, NULL));
}

static void figures(vrambroker_client* client) {
  int count = 0;
  CHECK_OK(vrambroker_device_count(client, &count));
  CHECK(count == 1);
  struct {
    vrambroker_device known;
    char later[32]; /* stand for fields of a newer header */
  } device;
  memset(&device, 1, sizeof device);
  device.known.struct_size = sizeof device;
  CHECK_OK(vrambroker_get_device(client, 0, &device.known));
  CHECK(strcmp(device.known.kind, on_cuda() ? "cuda" : "host") == 0 && device.known.capacity_bytes == 256 * MIB);
  CHECK(device.known.limit_bytes == 128 * MIB && device.known.uuid[0] != '\0' && device.known.name[0] != '\0');
  CHECK(device.later[0] == 0 && device.later[31] == 0);
  CHECK_FAILS(vrambroker_get_device(client, 1, &device.known), VRAMBROKER_NOT_FOUND, "no device 1");
  device.known.struct_size = 4;
  CHECK_FAILS(vrambroker_get_device(client, 0, &device.known), VRAMBROKER_INVALID_ARGUMENT, "struct_size is 4");

  vrambroker_session session = {.struct_size = sizeof session};
  CHECK_OK(vrambroker_get_session(client, &session));
  CHECK(session.session_id > 0 && strcmp(session.name, "from-c") == 0 && session.calls > 0);
  CHECK(vrambroker_warning(client, 1000) == NULL);
  CHECK_OK(vrambroker_status(client));

  void* pointer = NULL;
  CHECK_OK(vrambroker_malloc(client, MIB, 0, &pointer));
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
  CHECK_OK(vrambroker_memory_info(client, 0, &free_bytes, &total_bytes));
  CHECK(total_bytes == 128 * MIB && free_bytes == 127 * MIB);
  vrambroker_memory_stats stats = {.struct_size = sizeof stats};
  CHECK_OK(vrambroker_get_memory_stats(client, 0, &stats));
  CHECK(stats.allocated_bytes == MIB && stats.allocations == 1 && stats.reserved_bytes >= 2 * MIB);
  CHECK(stats.allocated_bytes_peak > MIB && stats.num_device_alloc > 0 && stats.segments > 0);
  CHECK_OK(vrambroker_reset_peak_memory_stats(client, 0));
  CHECK_OK(vrambroker_get_memory_stats(client, 0, &stats));
  CHECK(stats.allocated_bytes_peak == MIB);
  CHECK_OK(vrambroker_reset_accumulated_memory_stats(client, 0));
  CHECK_OK(vrambroker_get_memory_stats(client, 0, &stats));
  CHECK(stats.num_device_alloc == 0 && stats.allocated_bytes_peak == MIB);
  CHECK_FAILS(vrambroker_reset_accumulated_memory_stats(client, 7), VRAMBROKER_NOT_FOUND, "no device 7");
  CHECK_OK(vrambroker_reset_memory_stats(client, 0));
  CHECK_OK(vrambroker_get_memory_stats(client, 0, &stats));
  CHECK(stats.num_device_alloc == 0);

  size_t needed = 0;
  CHECK_FAILS(vrambroker_memory_stats_json(client, 0, NULL, 0, &needed), VRAMBROKER_OUT_OF_RANGE, "needs");
  char* const json = malloc(needed);
  CHECK_FAILS(vrambroker_memory_stats_json(client, 0, json, needed - 1, NULL), VRAMBROKER_OUT_OF_RANGE, "needs");
  CHECK_OK(vrambroker_memory_stats_json(client, 0, json, needed, &needed));
  CHECK(strlen(json) + 1 == needed && json[0] == '{' && json[needed - 2] == '}');
  CHECK(strstr(json, "\"allocated_bytes.all.current\": 1048576,") != NULL);
  free(json);

  CHECK_FAILS(vrambroker_memory_summary(client, 0, 0, NULL, 0, &needed), VRAMBROKER_OUT_OF_RANGE, "needs");
  char* const table = malloc(needed);
  CHECK_FAILS(vrambroker_memory_summary(client, 0, 0, table, needed - 1, NULL), VRAMBROKER_OUT_OF_RANGE, "needs");
  CHECK_OK(vrambroker_memory_summary(client, 0, 0, table, needed, &needed));
  CHECK(strlen(table) + 1 == needed && strstr(table, "| Allocated memory      |   1024 KiB |") != NULL);
  CHECK(strstr(table, "device ID 0, session from-c") != NULL && strstr(table, "from large pool") != NULL);
  CHECK_OK(vrambroker_memory_summary(client, 0, 1, table, needed, NULL));
  CHECK(strlen(table) + 1 < needed && strstr(table, "from large pool") == NULL);
  CHECK_FAILS(vrambroker_memory_summary(client, 7, 0, table, needed, NULL), VRAMBROKER_NOT_FOUND, "no device 7");
  CHECK_FAILS(vrambroker_memory_summary(client, 0, 0, NULL, 1, NULL), VRAMBROKER_INVALID_ARGUMENT, "buffer is NULL");
  free(table);

  CHECK_OK(vrambroker_free(client, pointer));
  uint64_t released = 0;
  CHECK_OK(vrambroker_empty_cache(client, &released));
  CHECK(released >= 2 * MIB);
  CHECK_OK(vrambroker_empty_cache(client, NULL));
}

static void run_basic(void) {
  CHECK(vrambroker_abi_version() == VRAMBROKER_ABI_VERSION);
  CHECK(strchr(vrambroker_version(), '.') != NULL);
  CHECK(vrambroker_last_error_code() == VRAMBROKER_OK && vrambroker_last_error_message()[0] == '\0');
  vrambroker_client* client = connect_as("from-c", "0.5");
  memory(client);
  struct worker workers[2] = {{client, 1}, {client, 2}};
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
  for (int i = 0; i < 2; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
  figures(client);
  CHECK_OK(vrambroker_disconnect(client));
  CHECK_OK(vrambroker_disconnect(NULL));
}

static void run_remote(void) {
  vrambroker_options options = VRAMBROKER_OPTIONS_INIT;
  options.placement = VRAMBROKER_REMOTE;
  vrambroker_client* client = NULL;
  CHECK_OK(vrambroker_connect(&options, &client));
  void* pointer = NULL;
  CHECK_OK(vrambroker_malloc(client, 1000, 0, &pointer));
  char bytes[1000] = "x";
  CHECK_OK(vrambroker_write(client, pointer, 0, bytes, sizeof bytes));
  CHECK_FAILS(vrambroker_write(client, pointer, 1, bytes, sizeof bytes), VRAMBROKER_OUT_OF_RANGE, "");
  CHECK(byte_at(client, pointer, 0) == 'x');
  CHECK_OK(vrambroker_free(client, pointer));
  CHECK_FAILS(vrambroker_free(client, pointer), VRAMBROKER_INVALID_ARGUMENT, "already freed");
  CHECK_FAILS(vrambroker_lease_segment(client, 1, 0, &pointer), VRAMBROKER_FAILED_PRECONDITION, "kLeased");
  CHECK_FAILS(vrambroker_set_memory_fraction(client, 0.5, 0), VRAMBROKER_FAILED_PRECONDITION, "lease segments instead");
  CHECK_FAILS(vrambroker_reset_accumulated_memory_stats(client, 0), VRAMBROKER_FAILED_PRECONDITION,
              "lease segments instead");
  CHECK_OK(vrambroker_disconnect(client));
}

static void run_options(void) {
  vrambroker_client* client = NULL;
  struct {
    vrambroker_options known;
    void* later;
  } options = {VRAMBROKER_OPTIONS_INIT, NULL};
  options.known.abi_version = 99;
  CHECK_FAILS(vrambroker_connect(&options.known, &client), VRAMBROKER_FAILED_PRECONDITION,
              "the program was compiled for ABI version 99");
  CHECK(strstr(vrambroker_last_error_message(), "libvrambroker.so") != NULL);
  options.known.abi_version = VRAMBROKER_ABI_VERSION;
  options.known.struct_size = 0;
  CHECK_FAILS(vrambroker_connect(&options.known, &client), VRAMBROKER_INVALID_ARGUMENT, "struct_size is 0");
  options.known.struct_size = sizeof options;
  options.later = &options;
  CHECK_FAILS(vrambroker_connect(&options.known, &client), VRAMBROKER_FAILED_PRECONDITION, "does not have");
  options.later = NULL;
  CHECK_OK(vrambroker_connect(&options.known, &client));
  CHECK_OK(vrambroker_disconnect(client));
  uint64_t bytes = 1;
  int64_t milliseconds = 1;
  CHECK_FAILS(vrambroker_parse_bytes("8X", &bytes), VRAMBROKER_INVALID_ARGUMENT, "its unit is unknown");
  CHECK_FAILS(vrambroker_parse_duration("30", &milliseconds), VRAMBROKER_INVALID_ARGUMENT, "write 30s");
  CHECK_FAILS(vrambroker_parse_bytes(NULL, &bytes), VRAMBROKER_INVALID_ARGUMENT, "text is NULL");
  CHECK(bytes == 1 && milliseconds == 1);
  CHECK_OK(vrambroker_parse_bytes("8g", &bytes));
  CHECK_OK(vrambroker_parse_duration("1m30s", &milliseconds));
  CHECK(bytes == UINT64_C(8) << 30 && milliseconds == 90000);
  options.known.limit = "many";
  CHECK_FAILS(vrambroker_connect(&options.known, &client), VRAMBROKER_INVALID_ARGUMENT, "limit: 'many'");
  CHECK(client == NULL);
  options.known.limit = NULL;
  options.known.devices = "0,7";
  CHECK_FAILS(vrambroker_connect(&options.known, &client), VRAMBROKER_NOT_FOUND,
              "devices: no device 7; the daemon has 0 (");
  options.known.devices = "";
  CHECK_FAILS(vrambroker_connect(&options.known, &client), VRAMBROKER_INVALID_ARGUMENT, "devices: '' is neither");
  options.known.devices = " 0 ";
  CHECK_OK(vrambroker_connect(&options.known, &client));
  CHECK_OK(vrambroker_disconnect(client));
  client = NULL;
  options.known.devices = NULL;
  options.known.alloc_conf = "max_split_size_mb:none";
  CHECK_FAILS(vrambroker_connect(&options.known, &client), VRAMBROKER_INVALID_ARGUMENT, "max_split_size_mb");
  options.known.alloc_conf = "";
  options.known.idle_decay_ms = -1;
  CHECK_FAILS(vrambroker_connect(&options.known, &client), VRAMBROKER_INVALID_ARGUMENT, "idle_decay_ms");
  options.known.idle_decay_ms = 0;
  options.known.placement = 2;
  CHECK_FAILS(vrambroker_connect(&options.known, &client), VRAMBROKER_INVALID_ARGUMENT, "placement");
  options.known.placement = VRAMBROKER_LEASED;
  options.known.socket_dir = "/nowhere";
  CHECK_FAILS(vrambroker_connect(&options.known, &client), VRAMBROKER_UNAVAILABLE, "/nowhere/vrambroker.sock");
  CHECK_FAILS(vrambroker_connect(&options.known, NULL), VRAMBROKER_INVALID_ARGUMENT, "client is NULL");
}

static void run_oom(void) {
  vrambroker_client* client = connect_as("limited", "64MiB");
  vrambroker_out_of_memory oom = {.struct_size = sizeof oom};
  void* held = NULL;
  void* pointer = NULL;
  CHECK_OK(vrambroker_malloc(client, 40 * MIB, 0, &held));
  fill(client, held, 5, 40 * MIB);
  CHECK(vrambroker_last_out_of_memory(&oom) == VRAMBROKER_NOT_FOUND);
  CHECK_FAILS(vrambroker_malloc(client, 30 * MIB, 0, &pointer), VRAMBROKER_RESOURCE_EXHAUSTED, "limit");
  CHECK(pointer == NULL);
  CHECK_OK(vrambroker_last_out_of_memory(&oom));
  CHECK(oom.cause == VRAMBROKER_CAUSE_LIMIT && strcmp(vrambroker_cause_name(oom.cause), "LIMIT") == 0);
  CHECK(oom.requested_bytes == 30 * MIB && oom.limit_bytes == 64 * MIB && oom.reserved_bytes == 40 * MIB);
  CHECK(oom.advice[0] != '\0');
  CHECK(oom.block_bytes >= oom.requested_bytes && oom.explanation[0] != '\0');
  CHECK(strstr(vrambroker_last_error_message(), oom.explanation) != NULL);
  CHECK(oom.waited_ms == 0 && oom.idle_elsewhere_bytes == 0 && oom.device_quarantined_bytes == 0);
  /* A program with an older header gets the fields that the header knows, and no byte beyond. */
  vrambroker_out_of_memory older;
  memset(&older, 0xab, sizeof older);
  older.struct_size = offsetof(vrambroker_out_of_memory, guarantee_bytes);
  CHECK_OK(vrambroker_last_out_of_memory(&older));
  CHECK(older.requested_bytes == 30 * MIB && older.advice[0] != '\0');
  CHECK(older.guarantee_bytes == UINT64_C(0xabababababababab));
  CHECK_FAILS(vrambroker_malloc(client, UINT64_C(1) << 40, 0, &pointer), VRAMBROKER_RESOURCE_EXHAUSTED, "");
  CHECK_OK(vrambroker_last_out_of_memory(&oom));
  CHECK(oom.cause == VRAMBROKER_CAUSE_LARGER_THAN_DEVICE);
  CHECK_FAILS(vrambroker_lease_segment(client, 30 * MIB, 0, &pointer), VRAMBROKER_RESOURCE_EXHAUSTED, "limit");
  CHECK_FAILS(vrambroker_free(client, &oom), VRAMBROKER_INVALID_ARGUMENT, "");
  CHECK(vrambroker_last_out_of_memory(&oom) == VRAMBROKER_NOT_FOUND);
  /* Sets a fraction of the 256 MiB device, below the session's limit. */
  CHECK_OK(vrambroker_set_memory_fraction(client, 0.1875, 0));
  CHECK_FAILS(vrambroker_malloc(client, 10 * MIB, 0, &pointer), VRAMBROKER_RESOURCE_EXHAUSTED, "memory fraction");
  CHECK_OK(vrambroker_last_out_of_memory(&oom));
  CHECK(oom.cause == VRAMBROKER_CAUSE_LIMIT && oom.limit_bytes == 48 * MIB && oom.room_bytes == 8 * MIB);
  CHECK(strstr(vrambroker_last_error_message(), oom.explanation) != NULL);
  CHECK_FAILS(vrambroker_set_memory_fraction(client, 1.5, 0), VRAMBROKER_INVALID_ARGUMENT, "fraction: 1.5");
  CHECK_FAILS(vrambroker_set_memory_fraction(client, 0.5, 9), VRAMBROKER_NOT_FOUND, "no device 9");
  CHECK_OK(vrambroker_set_memory_fraction(client, 1, 0));
  /* Memory that is held stays usable, and there is room for a smaller request. */
  CHECK(byte_at(client, held, 40 * MIB - 1) == 5);
  CHECK_OK(vrambroker_malloc(client, 20 * MIB, 0, &pointer));
  CHECK_OK(vrambroker_free(client, pointer));
  CHECK_OK(vrambroker_free(client, held));
  CHECK_OK(vrambroker_disconnect(client));
}

static int exists(const char* path) {
  return access(path, F_OK) == 0;
}

/* Tells whether the snapshot has an allocation event and a requested size of `bytes`. */
static int has_allocation(const char* json, unsigned bytes) {
  char text[64];
  snprintf(text, sizeof text, "\"size\":%u,", bytes);
  return strstr(json, "\"alloc\"") != NULL && strstr(json, text) != NULL;
}

static void recording(vrambroker_client* client, const char* folder) {
  char path[4096];
  void* pointer = NULL;
  CHECK_OK(vrambroker_set_recording(client, 1000));
  CHECK_OK(vrambroker_malloc(client, 54321, 0, &pointer));

  size_t needed = 0;
  CHECK_FAILS(vrambroker_snapshot_json(client, 1, NULL, 0, &needed), VRAMBROKER_OUT_OF_RANGE, "needs");
  char* const json = malloc(needed);
  CHECK(json != NULL);
  size_t written = 0;
  CHECK_OK(vrambroker_snapshot_json(client, 1, json, needed, &written));
  CHECK(strlen(json) + 1 == written && json[0] == '{' && has_allocation(json, 54321));
  CHECK_OK(vrambroker_snapshot_json(client, 0, json, needed, NULL));
  CHECK(strlen(json) + 1 < written && strstr(json, "\"segments\"") != NULL && strstr(json, "\"alloc\"") == NULL);
  CHECK_FAILS(vrambroker_snapshot_json(client, 0, NULL, 1, &needed), VRAMBROKER_INVALID_ARGUMENT, "buffer is NULL");
  free(json);

  snprintf(path, sizeof path, "%s/of-c.pickle", folder);
  CHECK(!exists(path));
  CHECK_OK(vrambroker_dump_snapshot(client, path));
  CHECK(exists(path));
  snprintf(path, sizeof path, "%s/no/of-c.pickle", folder);
  CHECK_FAILS(vrambroker_dump_snapshot(client, path), VRAMBROKER_NOT_FOUND, path);
  CHECK_FAILS(vrambroker_dump_snapshot(client, folder), VRAMBROKER_INVALID_ARGUMENT, "not a file");
  CHECK_FAILS(vrambroker_dump_snapshot(client, NULL), VRAMBROKER_INVALID_ARGUMENT, "path is NULL");

  uint32_t outer = vrambroker_scope_begin("forward", NULL, 0);
  CHECK(outer == 0);
  uint32_t inner = vrambroker_scope_begin("step", "train.c", 12);
  CHECK(inner != 0 && vrambroker_scope_begin(NULL, NULL, 0) == vrambroker_scope_begin("", NULL, 0));
  void* scoped = NULL;
  CHECK_OK(vrambroker_malloc(client, 65432, 0, &scoped));
  vrambroker_scope_end(inner);
  CHECK(vrambroker_scope_begin(NULL, NULL, 0) == inner);
  vrambroker_scope_end(outer);
  CHECK(vrambroker_scope_begin(NULL, NULL, 0) == 0);
  vrambroker_scope_end(4000000000u); /* names no scope */
  CHECK(vrambroker_scope_begin(NULL, NULL, 0) == 0);
  char* const with_scopes = malloc(2 * needed);
  CHECK_OK(vrambroker_snapshot_json(client, 0, with_scopes, 2 * needed, NULL));
  CHECK(strstr(with_scopes,
               "\"frames\":[{\"filename\":\"train.c\",\"line\":12,\"name\":\"step\"},"
               "{\"filename\":\"\",\"line\":0,\"name\":\"forward\"}]") != NULL);
  free(with_scopes);
  CHECK_OK(vrambroker_free(client, scoped));

  CHECK_OK(vrambroker_set_recording(client, 1000000));
  CHECK_FAILS(vrambroker_set_recording(client, 1000001), VRAMBROKER_INVALID_ARGUMENT, "1000001 is above 1000000");
  CHECK_FAILS(vrambroker_set_recording(client, UINT64_MAX), VRAMBROKER_INVALID_ARGUMENT, "max_events");
  CHECK_FAILS(vrambroker_set_recording(NULL, 1), VRAMBROKER_INVALID_ARGUMENT, "client is NULL");
  CHECK_OK(vrambroker_set_recording(client, 0));
  CHECK_OK(vrambroker_free(client, pointer));
}

static void run_recording(vrambroker_client* client) {
  const char* const folder = getenv("C_CLIENT_FOLDER");
  CHECK(folder != NULL);
  recording(client, folder);
  CHECK_OK(vrambroker_disconnect(client));
}

static void run_recording_leased(void) {
  run_recording(connect_as("recorded", NULL));
}

static void run_recording_remote(void) {
  vrambroker_options options = VRAMBROKER_OPTIONS_INIT;
  options.placement = VRAMBROKER_REMOTE;
  vrambroker_client* client = NULL;
  CHECK_OK(vrambroker_connect(&options, &client));
  run_recording(client);
}

static int lost_code;
static int lines_logged;
static pthread_mutex_t told = PTHREAD_MUTEX_INITIALIZER;

static void on_lost(void* context, int code, const char* message) {
  pthread_mutex_lock(&told);
  CHECK(context == &told && message[0] != '\0');
  lost_code = code;
  pthread_mutex_unlock(&told);
}

static void on_log(void* context, const char* line) {
  pthread_mutex_lock(&told);
  CHECK(context == &told && line[0] != '\0');
  ++lines_logged;
  pthread_mutex_unlock(&told);
}

static void run_lost(void) {
  vrambroker_options options = VRAMBROKER_OPTIONS_INIT;
  options.name = "survivor";
  options.on_lost = on_lost;
  options.log = on_log;
  options.context = &told;
  vrambroker_client* client = NULL;
  CHECK_OK(vrambroker_connect(&options, &client));
  void* held = NULL;
  CHECK_OK(vrambroker_malloc(client, 8 * MIB, 0, &held));
  fill(client, held, 9, 8 * MIB);
  say("ready");
  wait_for_line();
  wait_for_status(client, VRAMBROKER_UNAVAILABLE);
  CHECK_FAILS(vrambroker_status(client), VRAMBROKER_UNAVAILABLE, "");
  void* pointer = NULL;
  CHECK_FAILS(vrambroker_malloc(client, 100 * MIB, 0, &pointer), VRAMBROKER_UNAVAILABLE, "");
  CHECK_FAILS(vrambroker_lease_segment(client, 1, 0, &pointer), VRAMBROKER_UNAVAILABLE, "");
  unsigned char byte = 0;
  CHECK_OK(vrambroker_read(client, held, 8 * MIB - 1, &byte, 1));
  CHECK(byte == 9 && byte_at(client, held, 0) == 9);
  fill(client, held, 10, 8 * MIB);
  say("lost");
  wait_for_line();
  wait_for_status(client, VRAMBROKER_OK);
  CHECK_OK(vrambroker_malloc(client, 100 * MIB, 0, &pointer));
  fill(client, pointer, 1, 4096);
  CHECK(byte_at(client, held, 8 * MIB - 1) == 10);
  CHECK_OK(vrambroker_free(client, held));
  CHECK_OK(vrambroker_free(client, pointer));
  CHECK_OK(vrambroker_disconnect(client));
  CHECK(lost_code == VRAMBROKER_UNAVAILABLE && lines_logged > 0);
}

/* Runs in a child of `client`'s process, and expects every call to be refused. */
static void refused_in_child(vrambroker_client* client, void* held) {
  void* pointer = NULL;
  vrambroker_client* own = NULL;
  uint64_t bytes = 0;
  vrambroker_session session = {.struct_size = sizeof session};
  vrambroker_memory_stats stats = {.struct_size = sizeof stats};
  CHECK_FAILS(vrambroker_malloc(client, 1, 0, &pointer), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_free(client, held), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_record_stream(client, held, NULL), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_lease_segment(client, 1, 0, &pointer), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_status(client), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_get_session(client, &session), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_get_memory_stats(client, 0, &stats), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_empty_cache(client, &bytes), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_set_memory_fraction(client, 0.5, 0), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_set_recording(client, 10), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_dump_snapshot(client, "/tmp/never"), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_connect(NULL, &own), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK_FAILS(vrambroker_disconnect(client), VRAMBROKER_FAILED_PRECONDITION, "fork()");
  CHECK(vrambroker_torch_malloc(1, 0, NULL) == NULL);
  CHECK(vrambroker_last_error_code() == VRAMBROKER_FAILED_PRECONDITION);
}

static void wait_for_child(pid_t child) {
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void run_fork(void) {
  /* A child may still connect: the parent has not reached a daemon yet. */
  vrambroker_options nowhere = VRAMBROKER_OPTIONS_INIT;
  nowhere.socket_dir = "/nowhere";
  vrambroker_client* none = NULL;
  CHECK_FAILS(vrambroker_connect(&nowhere, &none), VRAMBROKER_UNAVAILABLE, "/nowhere");
  pid_t child = fork();
  if (child == 0) {
    vrambroker_client* own = connect_as("child", NULL);
    void* memory = NULL;
    CHECK_OK(vrambroker_malloc(own, MIB, 0, &memory));
    fill(own, memory, 4, MIB);
    CHECK_OK(vrambroker_free(own, memory));
    CHECK_OK(vrambroker_disconnect(own));
    _exit(0);
  }
  wait_for_child(child);
  vrambroker_client* client = connect_as("parent", NULL);
  void* held = NULL;
  CHECK_OK(vrambroker_malloc(client, MIB, 0, &held));
  fill(client, held, 3, MIB);
  child = fork();
  if (child == 0) {
    refused_in_child(client, held);
    _exit(0);
  }
  wait_for_child(child);
  CHECK(byte_at(client, held, 0) == 3);
  CHECK_OK(vrambroker_free(client, held));
  CHECK_OK(vrambroker_disconnect(client));
}

struct request {
  vrambroker_client* client;
  int whole; /* requests a segment, not a block */
  int given_up;
  void* pointer;
  int code;
};

static int request_memory(struct request* request) {
  if (request->whole) {
    return vrambroker_lease_segment_until(request->client, 250 * MIB, 0, &request->given_up, &request->pointer);
  }
  return vrambroker_malloc_until(request->client, 250 * MIB, 0, NULL, &request->given_up, &request->pointer);
}

static void* wait_for_memory(void* argument) {
  struct request* const request = argument;
  request->code = request_memory(request);
  return NULL;
}

static uint64_t calls_of(vrambroker_client* client) {
  vrambroker_session session = {.struct_size = sizeof session};
  CHECK_OK(vrambroker_get_session(client, &session));
  return session.calls;
}

/* Waits for memory that `held` occupies, and gives up while the test keeps the daemon stopped. */
static void give_up(const char* name, uint32_t placement, int whole) {
  vrambroker_client* holder = connect_as("holder", NULL);
  void* held = NULL;
  CHECK_OK(vrambroker_malloc(holder, 250 * MIB, 0, &held));
  vrambroker_options options = VRAMBROKER_OPTIONS_INIT;
  options.wait_ms = 3600000;
  options.placement = placement;
  options.connect_timeout_ms = options.call_timeout_ms = 60000;
  struct request request = {.whole = whole, .given_up = 1};
  CHECK_OK(vrambroker_connect(&options, &request.client));
  CHECK_FAILS(request_memory(&request), VRAMBROKER_CANCELLED, "there is no memory now");
  request.given_up = 0;
  const uint64_t before = calls_of(request.client);
  const uint64_t made = placement == VRAMBROKER_REMOTE ? 1 : 2; /* the second call waits */
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, wait_for_memory, &request) == 0);
  while (calls_of(request.client) < before + made) sleep_ms(1);
  say(name);
  wait_for_line();
  __atomic_store_n(&request.given_up, 1, __ATOMIC_RELAXED);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(request.code == VRAMBROKER_CANCELLED && request.pointer == NULL);
  say("given up");
  wait_for_line();
  vrambroker_memory_stats stats = {.struct_size = sizeof stats};
  CHECK_OK(vrambroker_get_memory_stats(request.client, 0, &stats));
  CHECK(stats.num_ooms == 0 && stats.reserved_bytes == 0);
  /* The whole memory is free again: no byte is lost. The daemon may have granted the request before reading that the
   * client gives up. The granted memory then goes back. */
  CHECK_OK(vrambroker_free(holder, held));
  CHECK_OK(vrambroker_disconnect(holder));
  request.given_up = placement == VRAMBROKER_REMOTE ? 0 : 1;
  while ((request.code = request_memory(&request)) == VRAMBROKER_CANCELLED) sleep_ms(1);
  CHECK_OK(request.code);
  if (whole) {
    CHECK_OK(vrambroker_return_segment(request.client, request.pointer));
  } else {
    CHECK_OK(vrambroker_free(request.client, request.pointer));
  }
  CHECK_OK(vrambroker_disconnect(request.client));
}

static void run_give_up(void) {
  give_up("leased", VRAMBROKER_LEASED, 0);
  give_up("whole", VRAMBROKER_LEASED, 1);
  give_up("remote", VRAMBROKER_REMOTE, 0);
}

static void run_symbols(void) {
  static const char* const kNames[] = {
      "grpc_init",
      "grpc_shutdown",
      "gpr_malloc",
      "vrambroker_core_v1",
      "_ZN6google8protobuf8internal13VerifyVersionEiiPKc",
      "_ZN6google8protobuf7MessageD2Ev",
      "_ZN4grpc13ServerBuilderC1Ev",
      "_ZN4absl12lts_202206236StatusC1ENS0_10StatusCodeENS0_11string_viewE",
      "_ZN10vrambroker6Client7ConnectERKNS_13ClientOptionsE",
      "SSL_new",
      "deflate",
      "ares_init",
      "cuMemAlloc_v2",
      "_ZSt4cout",
  };
  enum { kCount = sizeof kNames / sizeof *kNames };
  int present[kCount]; /* looks before the core is loaded: a sanitizer brings libstdc++ */
  for (size_t i = 0; i < kCount; ++i) present[i] = dlsym(RTLD_DEFAULT, kNames[i]) != NULL;
  CHECK(!present[0]);
  vrambroker_client* client = connect_as("symbols", NULL);
  void* pointer = NULL;
  CHECK_OK(vrambroker_malloc(client, 1, 0, &pointer));
  CHECK(dlsym(RTLD_DEFAULT, "vrambroker_malloc") != NULL);
  for (size_t i = 0; i < kCount; ++i) {
    if (present[i] || dlsym(RTLD_DEFAULT, kNames[i]) == NULL) continue;
    fprintf(stderr, "%s is visible\n", kNames[i]);
    _exit(1);
  }
  CHECK_OK(vrambroker_free(client, pointer));
  CHECK_OK(vrambroker_disconnect(client));
}

static void* torch_held;

static void free_late(void) {
  vrambroker_torch_free(torch_held, 4 << 20, 0, NULL);
}

static void* torch_work(void* argument) {
  unsigned char* const pointer = vrambroker_torch_malloc(3 << 20, 0, argument);
  CHECK(pointer != NULL);
  if (!on_cuda()) memset(pointer, 8, 4 << 20); /* the allocator gives whole segments */
  vrambroker_torch_free(pointer, 3 << 20, 0, argument);
  return NULL;
}

static void run_torch(void) {
  atexit(free_late); /* frees late, like a static object of the host program */
  pthread_t threads[4];
  for (int i = 0; i < 4; ++i) CHECK(pthread_create(&threads[i], NULL, torch_work, NULL) == 0);
  for (int i = 0; i < 4; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
  torch_held = vrambroker_torch_malloc(4 << 20, 0, NULL);
  CHECK(torch_held != NULL);
  void* const block = vrambroker_torch_cached_malloc(1000, 0, NULL);
  CHECK(block != NULL);
  if (!on_cuda()) memset(block, 1, 1000);
  vrambroker_torch_cached_free(block, 1000, 0, NULL);
  CHECK(vrambroker_torch_cached_malloc(1000, 0, NULL) == block);     /* the cache serves the request */
  CHECK(vrambroker_torch_malloc((ssize_t)1 << 40, 0, NULL) == NULL); /* prints a line on stderr */
  vrambroker_out_of_memory oom = {.struct_size = sizeof oom};
  CHECK_OK(vrambroker_last_out_of_memory(&oom));
  CHECK(vrambroker_torch_malloc(100 << 20, 0, NULL) == NULL); /* exceeds VRAMBROKER_LIMIT */
  CHECK_OK(vrambroker_last_out_of_memory(&oom));
  CHECK(oom.cause == VRAMBROKER_CAUSE_LIMIT && oom.limit_bytes == 64 * MIB);
  CHECK(vrambroker_torch_malloc(-1, 0, NULL) == NULL);
  say("held");
  wait_for_line();
}

static void run_torch_without_daemon(void) {
  CHECK(vrambroker_torch_malloc(1, 0, NULL) == NULL);
  CHECK(vrambroker_last_error_code() == VRAMBROKER_UNAVAILABLE);
  CHECK(vrambroker_torch_malloc(1, 0, NULL) == NULL);
}

static void run_connect(void) {
  vrambroker_client* client = NULL;
  const int code = vrambroker_connect(NULL, &client);
  puts(code == VRAMBROKER_OK ? "connected" : vrambroker_last_error_message());
}

int main(int argc, char** argv) {
  static const struct {
    const char* name;
    void (*run)(void);
  } kScenarios[] = {
      {"basic", run_basic},
      {"remote", run_remote},
      {"options", run_options},
      {"oom", run_oom},
      {"oom_report_leased", run_oom_report_leased},
      {"oom_report_remote", run_oom_report_remote},
      {"lost", run_lost},
      {"fork", run_fork},
      {"recording_leased", run_recording_leased},
      {"recording_remote", run_recording_remote},
      {"symbols", run_symbols},
      {"torch", run_torch},
      {"torch_without_daemon", run_torch_without_daemon},
      {"connect", run_connect},
      {"give_up", run_give_up},
  };
  for (size_t i = 0; argc == 2 && i < sizeof kScenarios / sizeof *kScenarios; ++i) {
    if (strcmp(kScenarios[i].name, argv[1]) != 0) continue;
    kScenarios[i].run();
    return 0;
  }
  fprintf(stderr, "usage: c_client SCENARIO\n");
  return 2;
}
