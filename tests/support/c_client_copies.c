/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads several copies of libvrambroker.so in one program. Usage: c_client_copies LIBRARY...; c_client.c says how the
 * program finds the daemon. C_CLIENT_OTHER_CORE names another core, loaded first: the program then prints the first
 * copy's answer.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vrambroker/vrambroker.h>

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                        \
    }                                                                 \
  } while (0)

enum { kMostCopies = 8 };

struct copy {
  int (*connect)(const vrambroker_options* options, vrambroker_client** client);
  int (*disconnect)(vrambroker_client* client);
  int (*malloc)(vrambroker_client* client, uint64_t bytes, int device, void** pointer);
  int (*free)(vrambroker_client* client, void* pointer);
  int (*last_error_code)(void);
  const char* (*last_error_message)(void);
  int (*last_out_of_memory)(vrambroker_out_of_memory* out);
  vrambroker_client* client;
};

static pthread_barrier_t together;

static void* symbol(void* library, const char* name) {
  void* const found = dlsym(library, name);
  if (found == NULL) fprintf(stderr, "%s\n", dlerror());
  CHECK(found != NULL);
  return found;
}

static struct copy load(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) fprintf(stderr, "%s\n", dlerror());
  CHECK(library != NULL);
  struct copy copy = {.client = NULL};
  /* Some compilers refuse to convert a void* to a function pointer. */
  *(void**)&copy.connect = symbol(library, "vrambroker_connect");
  *(void**)&copy.disconnect = symbol(library, "vrambroker_disconnect");
  *(void**)&copy.malloc = symbol(library, "vrambroker_malloc");
  *(void**)&copy.free = symbol(library, "vrambroker_free");
  *(void**)&copy.last_error_code = symbol(library, "vrambroker_last_error_code");
  *(void**)&copy.last_error_message = symbol(library, "vrambroker_last_error_message");
  *(void**)&copy.last_out_of_memory = symbol(library, "vrambroker_last_out_of_memory");
  return copy;
}

static void* connect_together(void* argument) {
  struct copy* const copy = argument;
  pthread_barrier_wait(&together);
  if (copy->connect(NULL, &copy->client) != VRAMBROKER_OK) fprintf(stderr, "%s\n", copy->last_error_message());
  CHECK(copy->client != NULL);
  return NULL;
}

/* Checks that only the called copy knows an error, whichever copy made the client. */
static void errors_go_to_the_caller(const struct copy* one, const struct copy* other) {
  void* pointer = NULL;
  CHECK(one->free(one->client, &pointer) == VRAMBROKER_INVALID_ARGUMENT);
  CHECK(one->last_error_code() == VRAMBROKER_INVALID_ARGUMENT);
  CHECK(other->last_error_code() == VRAMBROKER_OK && other->last_error_message()[0] == '\0');
  CHECK(other->malloc(one->client, UINT64_C(1) << 40, 0, &pointer) == VRAMBROKER_RESOURCE_EXHAUSTED);
  CHECK(other->last_error_code() == VRAMBROKER_RESOURCE_EXHAUSTED);
  vrambroker_out_of_memory oom = {.struct_size = sizeof oom};
  CHECK(other->last_out_of_memory(&oom) == VRAMBROKER_OK && oom.requested_bytes == UINT64_C(1) << 40);
  CHECK(one->last_out_of_memory(&oom) == VRAMBROKER_NOT_FOUND);
  CHECK(one->last_error_code() == VRAMBROKER_INVALID_ARGUMENT);
}

int main(int argc, char** argv) {
  struct copy copies[kMostCopies];
  const int count = argc - 1;
  CHECK(count >= 1 && count <= kMostCopies);
  if (getenv("C_CLIENT_OTHER_CORE") != NULL) {
    CHECK(dlopen(getenv("C_CLIENT_OTHER_CORE"), RTLD_NOW | RTLD_LOCAL) != NULL);
    copies[0] = load(argv[1]);
    const int code = copies[0].connect(NULL, &copies[0].client);
    printf("%d: %s\n", code, copies[0].last_error_message());
    return 0;
  }
  pthread_t threads[kMostCopies];
  CHECK(pthread_barrier_init(&together, NULL, (unsigned)count) == 0);
  for (int i = 0; i < count; ++i) copies[i] = load(argv[1 + i]);
  for (int i = 0; i < count; ++i) CHECK(pthread_create(&threads[i], NULL, connect_together, &copies[i]) == 0);
  for (int i = 0; i < count; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 1; i < count; ++i) errors_go_to_the_caller(&copies[0], &copies[i]);
  for (int i = 0; i < count; ++i) {
    void* pointer = NULL;
    CHECK(copies[i].malloc(copies[i].client, 1000, 0, &pointer) == VRAMBROKER_OK);
    CHECK(copies[i].free(copies[i].client, pointer) == VRAMBROKER_OK);
    CHECK(copies[i].disconnect(copies[i].client) == VRAMBROKER_OK);
  }
  return 0;
}
