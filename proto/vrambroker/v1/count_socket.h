/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages of the count socket, `vram-count.sock` (SOCK_SEQPACKET): a program keeps its own memory of the driver, and
 * has the daemon count the memory first. Plain C, because libvrambroker-preload.so has nothing but the C library.
 * README.md, two folders up, describes the exchange. All numbers are in the machine's byte order.
 */
#ifndef VRAMBROKER_PROTO_COUNT_SOCKET_H_
#define VRAMBROKER_PROTO_COUNT_SOCKET_H_

#include <stdint.h>

#define VRAMBROKER_COUNT_SOCKET "vram-count.sock" /* in the socket directory, and in a claim's */
#define VRAMBROKER_COUNT_VERSION 1
/* Unit of charges: a block of the driver. Every charge is a multiple of the unit. */
#define VRAMBROKER_COUNT_UNIT_BYTES (UINT64_C(2) << 20)

enum vrambroker_count_call {
  /* Opens a session of the calling process; `name`, `limit_*`, `guarantee_*`, `devices`. With the `token` of a session
     with a lost connection, the session goes on, with its charges. */
  VRAMBROKER_COUNT_HELLO = 1,
  VRAMBROKER_COUNT_JOIN = 2,     /* another connection of the process to its session `token` */
  VRAMBROKER_COUNT_HOLD = 3,     /* `bytes` on `device` held by the session before this daemon knew it */
  VRAMBROKER_COUNT_CHARGE = 4,   /* charge `bytes` on `device`, before asking the driver; answered at once */
  VRAMBROKER_COUNT_WAIT = 5,     /* CHARGE after waiting for up to `wait_ms`; closing the connection gives up */
  VRAMBROKER_COUNT_UNCHARGE = 6, /* the driver has `bytes` of `device` back */
  VRAMBROKER_COUNT_INFO = 7      /* the session's limit on `device`, and the rest of the limit */
};

enum vrambroker_count_limit {
  VRAMBROKER_COUNT_LIMIT_NONE = 0, /* the daemon's default limit; no guarantee */
  VRAMBROKER_COUNT_LIMIT_BYTES = 1,
  VRAMBROKER_COUNT_LIMIT_FRACTION = 2 /* share of the device's capacity, 0 to 1 */
};

/* A client's packet. Fields not named by the call are 0. */
struct vrambroker_count_request {
  uint32_t version; /* VRAMBROKER_COUNT_VERSION */
  uint32_t call;    /* enum vrambroker_count_call */
  uint32_t device;  /* the daemon's ordinal */
  uint32_t limit_kind;
  uint64_t bytes; /* a multiple of VRAMBROKER_COUNT_UNIT_BYTES */
  uint64_t wait_ms;
  uint64_t limit_bytes;
  double limit_fraction;
  uint8_t token[16];
  char name[128]; /* UTF-8, ends with a NUL; empty: the command name of the process */
  /* A packet of an older program ends here, and a packet without a guarantee and devices may end here. */
  uint32_t guarantee_kind; /* enum vrambroker_count_limit: memory kept free for the session on each device */
  uint32_t padding;        /* 0 */
  uint64_t guarantee_bytes;
  double guarantee_fraction;
  /* A packet of an older program may end here, and so may a packet without devices. */
  char devices[512]; /* devices of the session, as "0,GPU-...": ordinals or UUIDs; ends with a NUL; empty: all */
};

#define VRAMBROKER_COUNT_SHORT_REQUEST_BYTES 192      /* without the guarantee and `devices` */
#define VRAMBROKER_COUNT_NO_DEVICES_REQUEST_BYTES 216 /* without `devices` */

/* The daemon's answer. `code` is a gRPC status code; 0: OK. */
struct vrambroker_count_answer {
  uint32_t version;
  uint32_t call; /* as in the request */
  uint32_t code;
  uint32_t devices;       /* HELLO, JOIN: number of the daemon's devices */
  uint64_t session;       /* HELLO, JOIN: the session's id */
  uint64_t limit_bytes;   /* all other calls: the session's limit on the device */
  uint64_t free_bytes;    /*   room for more charges, whatever other sessions hold */
  uint64_t charged_bytes; /*   charged to the session now */
  uint64_t waited_ms;     /* WAIT */
  uint8_t token[16];      /* HELLO: for JOIN, and for the next HELLO */
  char uuid[64];          /* INFO: the device's UUID, as printed by nvidia-smi */
  char message[888];      /* for people: the fault, and its remedy; UTF-8, ends with a NUL; empty when OK */
};

#endif /* VRAMBROKER_PROTO_COUNT_SOCKET_H_ */
