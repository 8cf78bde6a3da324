/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/ledger.h"

#include <stdio.h>
#include <string.h>

#include "client/preload/arrays.h"
#include "client/preload/connection.h"
#include "client/preload/contexts.h"
#include "client/preload/driver.h"
#include "client/preload/grant.h"
#include "client/preload/graphs.h"
#include "client/preload/handles.h"
#include "client/preload/lock.h"
#include "client/preload/pools.h"
#include "client/preload/runtime.h"
#include "client/preload/session.h"

enum { PAUSE_MS = 50, MINUTE_MS = 60000, KEPT_UNITS = 1 };
static const uint64_t most_units = UINT64_C(1) << 40; /* fits into 64 bits in bytes */

enum {
  NOT_SERVED = -1, /* not served by the daemon: the device is not counted */
  UNKNOWN = -2     /* no word from the daemon yet: units are taken only through the daemon */
};

struct account {
  cu_uuid uuid;
  int ordinal; /* the daemon's number, or a constant above */
  uint64_t used;
  uint64_t charged;
  uint64_t takes;     /* counts takes of units */
  uint64_t tidied_at; /* `takes` at the last ledger_tidy() */
  unsigned waiters;   /* threads waiting for memory */
  uint64_t limit_bytes;
  uint64_t free_bytes; /* both figures from the daemon's last answer */
};

/* Held for moments: never during calls of the daemon or the driver. */
static struct lock books;
static struct account accounts[LEDGER_DEVICES];
static int account_count;
static uint64_t generation;

static struct account not_served;
static struct account* by_device[LEDGER_DEVICES]; /* per driver device; NULL: not looked up yet */

uint64_t units_of(uint64_t bytes) {
  return bytes / VRAMBROKER_COUNT_UNIT_BYTES + (bytes % VRAMBROKER_COUNT_UNIT_BYTES != 0);
}

/* --- devices --- */

/* Reads the 32 hexadecimal digits of "GPU-12345678-..." or "MIG-...". */
static int read_uuid(const char* text, cu_uuid* uuid) {
  int digits = 0;
  const char* at = strchr(text, '-');
  memset(uuid, 0, sizeof *uuid);
  for (at = at == NULL ? text : at; *at != '\0'; at++) {
    int digit;
    if (*at == '-') continue;
    if (*at >= '0' && *at <= '9') {
      digit = *at - '0';
    } else if (*at >= 'a' && *at <= 'f') {
      digit = *at - 'a' + 10;
    } else if (*at >= 'A' && *at <= 'F') {
      digit = *at - 'A' + 10;
    } else {
      return -1;
    }
    if (digits == 32) return -1;
    uuid->bytes[digits / 2] |= (unsigned char)(digits % 2 == 0 ? digit << 4 : digit);
    digits++;
  }
  return digits == 32 ? 0 : -1;
}

static struct account* with_uuid(const cu_uuid* uuid) {
  for (int i = 0; i < account_count; i++) {
    if (memcmp(&accounts[i].uuid, uuid, sizeof *uuid) == 0) return &accounts[i];
  }
  return NULL;
}

static struct account* with_ordinal(uint32_t ordinal) {
  for (int i = 0; i < account_count; i++) {
    if (accounts[i].ordinal == (int)ordinal) return &accounts[i];
  }
  return NULL;
}

static void note_figures(struct account* account, const struct vrambroker_count_answer* answer) {
  account->limit_bytes = answer->limit_bytes;
  account->free_bytes = answer->free_bytes;
}

void ledger_session_begins(void) {
  lock(&books);
  generation++;
  for (int i = 0; i < account_count; i++) {
    accounts[i].ordinal = UNKNOWN;
    accounts[i].charged = 0;
  }
  for (int i = 0; i < LEDGER_DEVICES; i++) {
    if (by_device[i] == &not_served) by_device[i] = NULL; /* the new daemon may serve the device */
  }
  unlock(&books);
}

void ledger_session_is_open(void) {
  lock(&books);
  for (int i = 0; i < account_count; i++) {
    if (accounts[i].ordinal == UNKNOWN) accounts[i].ordinal = NOT_SERVED;
  }
  unlock(&books);
}

uint64_t ledger_device(uint32_t ordinal, const struct vrambroker_count_answer* answer) {
  cu_uuid uuid;
  uint64_t used = 0;
  if (read_uuid(answer->uuid, &uuid) != 0) return 0;
  lock(&books);
  struct account* account = with_uuid(&uuid);
  if (account == NULL && account_count < LEDGER_DEVICES) {
    account = &accounts[account_count];
    account->uuid = uuid;
    account_count++;
  }
  if (account != NULL) {
    account->ordinal = (int)ordinal;
    note_figures(account, answer);
    used = account->used;
  }
  unlock(&books);
  return used * VRAMBROKER_COUNT_UNIT_BYTES;
}

void ledger_held(uint32_t ordinal, uint64_t charged_bytes) {
  lock(&books);
  struct account* account = with_ordinal(ordinal);
  if (account != NULL) account->charged = charged_bytes / VRAMBROKER_COUNT_UNIT_BYTES;
  unlock(&books);
}

uint64_t ledger_generation(void) {
  return __atomic_load_n(&generation, __ATOMIC_RELAXED);
}

int account_of(cu_device device, int quiet, struct account** account) {
  *account = NULL;
  if (device < 0 || device >= LEDGER_DEVICES) return CU_OK;
  struct account* found = __atomic_load_n(&by_device[device], __ATOMIC_ACQUIRE);
  if (found == NULL) {
    char message[MESSAGE_BYTES];
    const struct driver* driver = real_driver();
    int (*get_uuid)(cu_uuid*, cu_device) =
        driver->cuDeviceGetUuid_v2 != NULL ? driver->cuDeviceGetUuid_v2 : driver->cuDeviceGetUuid;
    cu_uuid uuid;
    const int has_uuid = get_uuid != NULL && get_uuid(&uuid, device) == CU_OK;
    int is_new = 0;
    const struct calm calm = calm_begin();
    const enum line line = line_enter(!quiet, message);
    if (line == LINE_OPEN && has_uuid) {
      /* Holding the line: the session has fully begun, and all devices of its daemon are known. */
      lock(&books);
      found = with_uuid(&uuid);
      if (found == NULL || found->ordinal < 0) found = &not_served;
      is_new = by_device[device] == NULL;
      __atomic_store_n(&by_device[device], found, __ATOMIC_RELEASE);
      unlock(&books);
    }
    if (line == LINE_OPEN) line_leave();
    calm_end(calm);
    if (line == LINE_UNCOUNTED) {
      __atomic_store_n(&by_device[device], &not_served, __ATOMIC_RELEASE);
      return CU_OK;
    }
    if (line == LINE_REFUSED) return quiet ? CU_OUT_OF_MEMORY : refuse(message);
    if (!has_uuid) return CU_OK;
    if (found == &not_served && is_new) say("the daemon does not serve GPU %d: memory there is not counted", device);
  }
  *account = found == &not_served ? NULL : found;
  return CU_OK;
}

int current_account(struct account** account, cu_context* context) {
  return account_of(current_device(context), 0, account);
}

cu_device device_of_location(const cu_location* location, int type) {
  const int is_host = location->type == CU_LOCATION_HOST || location->type == CU_LOCATION_HOST_NUMA ||
                      location->type == CU_LOCATION_HOST_NUMA_CURRENT;
  if (is_host && type != CU_MANAGED) return -1;
  if (location->type == CU_LOCATION_DEVICE) return location->id;
  if (location->type == CU_LOCATION_DOMAIN) return location->local.device;
  const cu_device current = current_device(NULL);
  return current < 0 ? 0 : current;
}

int account_of_location(const cu_location* location, int type, int quiet, struct account** account) {
  return account_of(device_of_location(location, type), quiet, account);
}

/* --- giving back --- */

/* Returns the slack above the kept units. Caller holds `books`. */
static uint64_t excess(const struct account* account) {
  const uint64_t slack = account->charged > account->used ? account->charged - account->used : 0;
  const uint64_t kept = account->waiters != 0 ? 0 : KEPT_UNITS;
  return account->ordinal >= 0 && slack > kept ? slack - kept : 0;
}

/* Reports slack above the kept units, or `all` slack, to the daemon. Returns 0 on failure. Caller holds the line. */
static int uncharge(struct account* account, int all) {
  lock(&books);
  uint64_t units = excess(account);
  if (all && account->ordinal >= 0 && account->charged > account->used) units = account->charged - account->used;
  const uint32_t ordinal = (uint32_t)account->ordinal;
  account->charged -= units; /* no thread can take the units now */
  unlock(&books);
  struct vrambroker_count_answer answer;
  if (units == 0) return 1;
  if (line_call(VRAMBROKER_COUNT_UNCHARGE, ordinal, units * VRAMBROKER_COUNT_UNIT_BYTES, &answer) != 0) return 0;
  lock(&books);
  if (answer.code == CODE_OK) note_figures(account, &answer);
  if (answer.code == CODE_UNAVAILABLE) account->charged += units;
  unlock(&books);
  return answer.code != CODE_UNAVAILABLE;
}

static struct account* with_excess(void) {
  struct account* found = NULL;
  lock(&books);
  for (int i = 0; i < account_count && found == NULL; i++) {
    if (excess(&accounts[i]) != 0) found = &accounts[i];
  }
  unlock(&books);
  return found;
}

/* Settles all devices. Never waits for the line: the line's holder settles, too, when leaving. */
static void settle(void) {
  for (int done = 1; done;) {
    struct account* const account = with_excess();
    if (account == NULL) return;
    const struct calm calm = calm_begin();
    done = line_try_enter();
    if (done) {
      done = uncharge(account, 0);
      line_leave();
    }
    calm_end(calm);
  }
}

void ledger_give(struct account* account, uint64_t units) {
  if (units == 0) return;
  lock(&books);
  account->used -= units < account->used ? units : account->used;
  const int is_too_much = excess(account) != 0;
  unlock(&books);
  if (is_too_much) settle();
}

void ledger_owe(struct account* account, uint64_t units) {
  lock(&books);
  account->used += units;
  unlock(&books);
}

int ledger_has_slack(void) {
  int has = 0;
  lock(&books);
  for (int i = 0; i < account_count; i++) has |= accounts[i].charged > accounts[i].used;
  unlock(&books);
  return has;
}

void ledger_tidy(void) {
  for (int i = 0; i < account_count; i++) {
    struct account* account = &accounts[i];
    lock(&books);
    const int is_idle = account->takes == account->tidied_at;
    account->tidied_at = account->takes;
    unlock(&books);
    if (!line_try_enter()) return;
    uncharge(account, is_idle);
    line_leave();
  }
}

/* --- taking --- */

enum asked { TAKEN, NO_MEMORY, LATER, NEVER_MORE };

/* Takes units from slack, if enough. Caller holds `books`. */
static int take_slack(struct account* account, uint64_t units) {
  if (account->ordinal != NOT_SERVED && account->used + units > account->charged) return 0;
  account->used += units;
  account->takes++;
  return 1;
}

/* Charges units at the daemon. Caller holds the line. */
static enum asked charge(struct account* account, uint64_t units, char* message) {
  lock(&books);
  if (take_slack(account, units)) {
    unlock(&books);
    return TAKEN;
  }
  account->used += units; /* reserves the slack against other threads */
  const uint64_t asked = account->used - account->charged;
  const uint32_t ordinal = (uint32_t)account->ordinal;
  unlock(&books);
  struct vrambroker_count_answer answer = {.code = CODE_UNAVAILABLE};
  const int failed = line_call(VRAMBROKER_COUNT_CHARGE, ordinal, asked * VRAMBROKER_COUNT_UNIT_BYTES, &answer);
  lock(&books);
  if (failed || answer.code != CODE_OK) {
    account->used -= units;
  } else {
    account->charged += asked;
    account->takes++;
  }
  if (!failed && (answer.code == CODE_OK || answer.code == CODE_NO_MEMORY)) note_figures(account, &answer);
  unlock(&books);
  if (!failed && answer.code == CODE_OK) return TAKEN;
  snprintf(message, MESSAGE_BYTES, "%s", failed ? "the daemon was lost, and has not come back" : answer.message);
  if (failed || answer.code == CODE_UNAVAILABLE || answer.code == CODE_ABORTED) return LATER;
  return answer.code == CODE_NO_MEMORY ? NO_MEMORY : NEVER_MORE;
}

static enum asked ask(struct account* account, uint64_t units, enum patience patience, char* message) {
  switch (line_enter(patience == MAY_WAIT, message)) {
    case LINE_UNCOUNTED:
      ledger_owe(account, units);
      return TAKEN;
    case LINE_REFUSED:
      return NEVER_MORE;
    case LINE_OPEN:
      break;
  }
  const enum asked result = charge(account, units, message);
  line_leave();
  settle();
  return result;
}

static const char interrupted[] = "a signal has ended the wait";

/* Account awaited by the thread. A signal handler jumping out of the wait leaves the value set. */
static __thread __attribute__((tls_model("initial-exec"))) struct account* awaited;

static void set_awaited(struct account* account) {
  lock(&books);
  if (awaited != NULL && awaited->waiters != 0) awaited->waiters--;
  if (account != NULL) account->waiters++;
  unlock(&books);
  awaited = account;
}

/* Waits until other programs have given memory back. */
static enum asked wait_for(struct account* account, uint64_t units, uint64_t wait_ms, char* message) {
  set_awaited(account);
  settle();
  lock(&books);
  const uint64_t owed = account->used > account->charged ? account->used - account->charged : 0;
  const uint64_t asked = units + owed;
  const int ordinal = account->ordinal;
  unlock(&books);
  struct vrambroker_count_answer answer = {.code = CODE_UNAVAILABLE};
  uint64_t of = 0;
  const int failed =
      ordinal < 0 ? -1 : session_wait((uint32_t)ordinal, asked * VRAMBROKER_COUNT_UNIT_BYTES, wait_ms, &of, &answer);
  enum asked result = NEVER_MORE;
  set_awaited(NULL);
  if (failed == INTERRUPTED) {
    snprintf(message, MESSAGE_BYTES, "%s", interrupted);
    return NEVER_MORE;
  }
  lock(&books);
  if (failed != 0 || answer.code == CODE_UNAVAILABLE || answer.code == CODE_ABORTED || of != generation) {
    result = LATER;
  } else if (answer.code == CODE_OK) {
    account->charged += asked;
    account->used += units;
    account->takes++;
    result = TAKEN;
  } else if (answer.code == CODE_NO_MEMORY) {
    result = NO_MEMORY;
  }
  /* No descriptor for a second connection: keep the first refusal's message. */
  const int is_final = failed == NO_CONNECTION && wait_ms == 0;
  if (is_final) result = NO_MEMORY;
  unlock(&books);
  if (result != TAKEN && !is_final)
    snprintf(message, MESSAGE_BYTES, "%s", failed ? "the daemon was lost while this waited" : answer.message);
  return result;
}

static int take_slowly(struct account* account, uint64_t units, enum patience patience, int* waited, char* message) {
  session_keep();
  const uint64_t start = now_ms();
  const uint64_t wait_ms = patience == MAY_WAIT ? settings()->wait_ms : 0;
  for (;;) {
    enum asked result = ask(account, units, patience, message);
    const uint64_t spent = now_ms() - start;
    /* Also with no time to wait: only the wait asks other programs for merely cached memory. */
    if (result == NO_MEMORY && patience != NOW && !was_interrupted()) {
      result = wait_for(account, units, spent < wait_ms ? wait_ms - spent : 0, message);
      *waited |= result != LATER; /* else no program has been asked */
    }
    if (result == TAKEN) return 0;
    if (result != LATER || patience != MAY_WAIT || now_ms() - start >= settings()->reconnect_ms + wait_ms) return -1;
    if (was_interrupted() || wait_calmly(-1, PAUSE_MS, NO_LOCK) == INTERRUPTED) {
      snprintf(message, MESSAGE_BYTES, "%s", interrupted);
      return -1;
    }
  }
}

int ledger_take(struct account* account, uint64_t units, enum patience patience, int* waited, char* message) {
  *waited = 0;
  lock(&books);
  const int taken = take_slack(account, units);
  unlock(&books);
  if (taken) return 0;
  if (patience == FROM_SLACK) return -1;
  if (units > most_units) {
    snprintf(message, MESSAGE_BYTES, "no GPU has so much");
    return -1;
  }
  const struct calm calm = calm_begin();
  const int result = take_slowly(account, units, patience, waited, message);
  calm_end(calm);
  return result;
}

int refuse(const char* message) {
  static uint64_t said_at;
  const uint64_t now = now_ms();
  uint64_t last = __atomic_load_n(&said_at, __ATOMIC_RELAXED);
  if ((last == 0 || now - last >= MINUTE_MS) &&
      __atomic_compare_exchange_n(&said_at, &last, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    say("%s", message);
  }
  return CU_OUT_OF_MEMORY;
}

int refuse_managed(void) {
  if (!settings()->refuse_managed) return CU_OK;
  return refuse(
      "managed memory is refused, as VRAMBROKER_MANAGED=refuse says: it may take more of the GPU than is counted");
}

/* --- figures --- */

int ledger_figures(struct account* account, uint64_t* limit, uint64_t* left) {
  char message[MESSAGE_BYTES];
  struct vrambroker_count_answer answer;
  const struct calm calm = calm_begin();
  if (line_enter(0, message) == LINE_OPEN) {
    lock(&books);
    const int ordinal = account->ordinal;
    unlock(&books);
    if (ordinal >= 0 && line_call(VRAMBROKER_COUNT_INFO, (uint32_t)ordinal, 0, &answer) == 0 &&
        answer.code == CODE_OK) {
      lock(&books);
      note_figures(account, &answer);
      unlock(&books);
    }
    line_leave();
    settle();
  }
  calm_end(calm);
  /* Uses the last known figures if the daemon is missing. */
  lock(&books);
  const uint64_t slack = account->charged > account->used ? account->charged - account->used : 0;
  const uint64_t owed =
      account->ordinal >= 0 && account->used > account->charged ? account->used - account->charged : 0;
  const int is_served = account->ordinal >= 0 || account->limit_bytes != 0;
  *limit = account->limit_bytes;
  *left = account->free_bytes + slack * VRAMBROKER_COUNT_UNIT_BYTES;
  unlock(&books);
  *left -= owed < *left / VRAMBROKER_COUNT_UNIT_BYTES ? owed * VRAMBROKER_COUNT_UNIT_BYTES : *left;
  return is_served ? 0 : -1;
}

int ledger_figures_by_uuid(const char* text, uint64_t* limit, uint64_t* left) {
  char message[MESSAGE_BYTES];
  cu_uuid uuid;
  if (read_uuid(text, &uuid) != 0) return -1;
  const struct calm calm = calm_begin();
  const int is_open = line_enter(0, message) == LINE_OPEN;
  if (is_open) line_leave();
  calm_end(calm);
  if (!is_open) return -1;
  lock(&books);
  struct account* account = with_uuid(&uuid);
  unlock(&books);
  return account == NULL ? -1 : ledger_figures(account, limit, left);
}

void ledger_forget(void) {
  memset(&books, 0, sizeof books);
  memset(accounts, 0, sizeof accounts);
  memset(by_device, 0, sizeof by_device);
  account_count = 0;
  generation = 0;
  contexts_forget_all();
  grant_forget_all();
  arrays_forget_all();
  handles_forget_all();
  pools_forget_all();
  graphs_forget_all();
}
