/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/session.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "client/preload/connection.h"
#include "client/preload/ledger.h"
#include "client/preload/lock.h"
#include "client/preload/runtime.h"

enum { LEAST_ANSWER_MS = 1000, MOST_ANSWER_MS = 10000, AGAIN_MS = 100, LOOK_MS = 1000, IDLE_MS = 2000 };

static struct {
  struct lock line;
  struct connection connection;
  enum { NEVER, OPEN, LOST, UNCOUNTED } state;
  pid_t process;    /* owner of the session */
  int has_given_up; /* no longer waits for the first daemon */
  uint64_t generation;
  uint8_t token[16]; /* of the session, or of the lost session */
  int has_keeper;
} session;

/* --- fork --- */

static pid_t this_process(void) {
  return (pid_t)syscall(SYS_getpid); /* older C libraries cache the number, even in a child of clone() */
}

/* Resets a child: the parent's connections and charges are not the child's, and threads holding locks are not here. */
static void forget_parent(void) {
  connections_forget();
  memset(&session, 0, sizeof session);
  ledger_forget();
}

static void after_fork(void) {
  forget_parent();
  session.process = this_process();
}

static void adopt_process(void) {
  const pid_t process = this_process();
  if (__atomic_load_n(&session.process, __ATOMIC_RELAXED) == process) return;
  if (session.process != 0) forget_parent(); /* a child of clone(), which calls no handlers */
  session.process = process;
  static int has_handler;
  if (!__atomic_exchange_n(&has_handler, 1, __ATOMIC_RELAXED)) pthread_atfork(NULL, NULL, after_fork);
}

/* --- beginning --- */

/* Returns how long a running daemon may take to answer, in ms. */
static uint64_t answer_ms(void) {
  const uint64_t patience = settings()->reconnect_ms;
  if (patience < LEAST_ANSWER_MS) return LEAST_ANSWER_MS;
  return patience < MOST_ANSWER_MS ? patience : MOST_ANSWER_MS;
}

enum opening {
  OPENED,
  ABSENT,      /* no daemon */
  STARTS,      /* the daemon has ended, leaving its socket or a claim for the next daemon */
  UNREACHABLE, /* a daemon exists and does not answer */
  AGAIN,       /* the daemon says: later */
  REFUSED      /* the daemon refuses, or the settings are wrong */
};

/* Returns whether an error of connection_open() means: no listener. */
static int is_absent(int error) {
  return error == ENOENT || error == ENOTDIR || error == ECONNREFUSED;
}

/* A claim's directory exists only after a daemon, and stays for the next daemon. So do the sockets there, wherever a
 * container mounts them, and the sockets of a killed daemon. */
static enum opening why_absent(const char* path, int error, char* message) {
  char folder[sizeof settings()->socket_path];
  char daemons[sizeof folder + sizeof VRAMBROKER_COUNT_SOCKET];
  snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(path, '/') - path), path);
  const char* const claims = strstr(folder, "/claims/");
  if (claims == NULL) return error == ECONNREFUSED && !settings()->if_available ? STARTS : ABSENT;
  if (access(folder, F_OK) == 0) return STARTS;
  struct connection connection;
  snprintf(daemons, sizeof daemons, "%.*s/%s", (int)(claims - folder), folder, VRAMBROKER_COUNT_SOCKET);
  const int daemons_error = connection_open(&connection, daemons);
  connection_close(&connection);
  if (is_absent(daemons_error)) return ABSENT;
  snprintf(message, MESSAGE_BYTES,
           "the claim of this program, %s, is no more: vramctl claim ls shows the ones that there are", folder);
  return REFUSED;
}

static int call(uint32_t what, uint32_t device, uint64_t bytes, struct vrambroker_count_answer* answer) {
  const struct vrambroker_count_request request = {
      .version = VRAMBROKER_COUNT_VERSION, .call = what, .device = device, .bytes = bytes};
  return connection_call(&session.connection, &request, answer_ms(), A_LOCK, answer);
}

/* Returns whether the daemon declines now, but may accept a later attempt. */
static int says_later(const struct vrambroker_count_answer* answer) {
  return answer->code == CODE_UNAVAILABLE || answer->code == CODE_ABORTED;
}

/* Reports all memory held by the process to the daemon; otherwise the session does not begin. */
static enum opening tell_ledger(uint32_t devices, struct vrambroker_count_answer* answer) {
  ledger_session_begins();
  for (uint32_t device = 0; device < devices && device < LEDGER_DEVICES; device++) {
    if (call(VRAMBROKER_COUNT_INFO, device, 0, answer) != 0) return UNREACHABLE;
    if (says_later(answer)) return AGAIN;
    if (answer->code != CODE_OK) continue;
    const uint64_t held = ledger_device(device, answer);
    uint64_t charged = answer->charged_bytes; /* nonzero in a continued session */
    if (charged > held) {
      /* The answer to a charge was lost with the connection. */
      if (call(VRAMBROKER_COUNT_UNCHARGE, device, charged - held, answer) != 0) return UNREACHABLE;
      if (answer->code == CODE_OK) charged = held;
    } else if (charged == 0 && (held > 0 || session.state == LOST)) { /* zero, too: other sessions wait for it */
      if (call(VRAMBROKER_COUNT_HOLD, device, held, answer) != 0) return UNREACHABLE;
      if (says_later(answer)) return AGAIN;
      if (answer->code == CODE_OK) charged = answer->charged_bytes;
    }
    ledger_held(device, charged);
  }
  ledger_session_is_open();
  return OPENED;
}

static enum opening begin(char* message) {
  const struct settings* settings_now = settings();
  if (settings_now->error[0] != '\0') {
    snprintf(message, MESSAGE_BYTES, "%s", settings_now->error);
    return REFUSED;
  }
  connection_close(&session.connection);
  const int error = connection_open(&session.connection, settings_now->socket_path);
  if (error != 0) {
    snprintf(message, MESSAGE_BYTES, "cannot reach the daemon at %s (%s): is vrambrokerd running?",
             settings_now->socket_path, strerror(error));
    if (error == EAGAIN) return AGAIN;
    return is_absent(error) ? why_absent(settings_now->socket_path, error, message) : UNREACHABLE;
  }
  struct vrambroker_count_request hello = {.version = VRAMBROKER_COUNT_VERSION,
                                           .call = VRAMBROKER_COUNT_HELLO,
                                           .limit_kind = settings_now->limit.kind,
                                           .limit_bytes = settings_now->limit.bytes,
                                           .limit_fraction = settings_now->limit.fraction,
                                           .guarantee_kind = settings_now->guarantee.kind,
                                           .guarantee_bytes = settings_now->guarantee.bytes,
                                           .guarantee_fraction = settings_now->guarantee.fraction};
  memcpy(hello.name, settings_now->name, sizeof hello.name);
  memcpy(hello.devices, settings_now->devices, sizeof hello.devices);
  memcpy(hello.token, session.token, sizeof hello.token);
  struct vrambroker_count_answer answer;
  enum opening result = UNREACHABLE;
  if (connection_call(&session.connection, &hello, answer_ms(), A_LOCK, &answer) == 0) {
    if (answer.code != CODE_OK) {
      result = answer.code == CODE_UNAVAILABLE ? AGAIN : REFUSED;
    } else {
      memcpy(session.token, answer.token, sizeof session.token);
      result = tell_ledger(answer.devices, &answer);
    }
  }
  if (result == OPENED) return OPENED;
  connection_close(&session.connection);
  if (result == UNREACHABLE) {
    snprintf(message, MESSAGE_BYTES,
             "the daemon at %s does not answer as it should: is it of this version, and not stopped?",
             settings_now->socket_path);
  } else {
    snprintf(message, MESSAGE_BYTES, "%s", answer.message);
  }
  return result;
}

/* Begins the session, or begins it again. Caller holds the line. */
static enum opening begin_session(char* message) {
  const enum opening result = begin(message);
  if (result == OPENED) {
    if (session.state == LOST) say("the daemon is back: this program's GPU memory is counted again");
    session.state = OPEN;
  }
  return result;
}

static void lost(void) {
  connection_close(&session.connection);
  session.state = LOST;
}

/* --- the line --- */

enum line line_enter(int patient, char* message) {
  adopt_process();
  const uint64_t until = now_ms() + settings()->reconnect_ms;
  int has_said = 0;
  for (;;) {
    lock(&session.line);
    if (session.state == OPEN && connection_is_ours(&session.connection)) return LINE_OPEN;
    if (session.state == OPEN) lost();
    if (session.state == UNCOUNTED) {
      unlock(&session.line);
      return LINE_UNCOUNTED;
    }
    const enum opening result = begin_session(message);
    if (result == OPENED) return LINE_OPEN;
    if (session.state == NEVER && result == ABSENT && settings()->if_available) {
      session.state = UNCOUNTED;
      unlock(&session.line);
      say("%s This program runs without it, and its GPU memory is not counted: VRAMBROKER_IF_AVAILABLE is set",
          message);
      return LINE_UNCOUNTED;
    }
    const int may_change = result == AGAIN || result == STARTS || (session.state == LOST && result != REFUSED);
    const int is_first = session.state == NEVER && result == STARTS;
    const int goes_on =
        patient && may_change && !(is_first && session.has_given_up) && now_ms() < until && !was_interrupted();
    if (is_first && patient && !goes_on) session.has_given_up = 1; /* only once: a program may ask for many figures */
    unlock(&session.line);
    if (!goes_on) return LINE_REFUSED;
    if (is_first && !has_said) say("%s It is waited for", message);
    has_said |= is_first;
    if (wait_calmly(-1, AGAIN_MS, NO_LOCK) == INTERRUPTED) return LINE_REFUSED;
  }
}

int line_try_enter(void) {
  adopt_process();
  if (!try_lock(&session.line)) return 0;
  if (session.state == OPEN && connection_is_ours(&session.connection)) return 1;
  unlock(&session.line);
  return 0;
}

void line_leave(void) {
  unlock(&session.line);
}

int line_call(uint32_t what, uint32_t device, uint64_t bytes, struct vrambroker_count_answer* answer) {
  if (call(what, device, bytes, answer) != 0) {
    lost();
    return -1;
  }
  if (answer->code == CODE_ABORTED) lost(); /* the daemon ended the session: the next call begins a new session */
  return 0;
}

uint64_t session_generation(void) {
  return __atomic_load_n(&session.generation, __ATOMIC_RELAXED);
}

int session_wait(uint32_t device, uint64_t bytes, uint64_t wait_ms, uint64_t* generation,
                 struct vrambroker_count_answer* answer) {
  char message[MESSAGE_BYTES];
  struct vrambroker_count_request request = {.version = VRAMBROKER_COUNT_VERSION, .call = VRAMBROKER_COUNT_JOIN};
  if (line_enter(0, message) != LINE_OPEN) return -1;
  memcpy(request.token, session.token, sizeof request.token);
  *generation = ledger_generation();
  line_leave();
  /* Thread-local: a handler jumping out of a wait leaves the connection to the thread's next wait. */
  static __thread __attribute__((tls_model("initial-exec"))) struct connection connection;
  connection_close(&connection);
  if (connection_open(&connection, settings()->socket_path) != 0) return NO_CONNECTION;
  int failed = connection_call(&connection, &request, answer_ms(), NO_LOCK, answer);
  if (failed != 0) return failed;
  if (answer->code == CODE_OK) {
    request.call = VRAMBROKER_COUNT_WAIT;
    request.device = device;
    request.bytes = bytes;
    request.wait_ms = wait_ms;
    memset(request.token, 0, sizeof request.token);
    failed = connection_call(&connection, &request, wait_ms + answer_ms(), NO_LOCK, answer);
  } else if (answer->code == CODE_NOT_FOUND) {
    failed = -1; /* the session has continued with another daemon or token */
  }
  connection_close(&connection);
  return failed;
}

/* --- the keeper --- */

static void* keep(void* nothing) {
  char message[MESSAGE_BYTES];
  prctl(PR_SET_NAME, "vrambroker");
  do {
    /* Waits only for the peer's close. The number may be another file's by now, which is harmless. */
    struct pollfd gone = {session.connection.is_open ? session.connection.descriptor : -1, 0, 0};
    poll(&gone, 1, session.state != OPEN || ledger_has_slack() ? LOOK_MS : IDLE_MS);
    if (!try_lock(&session.line)) {
      sleep_ms(AGAIN_MS);
      continue;
    }
    if (session.state == OPEN && (!connection_is_ours(&session.connection) || gone.revents != 0)) {
      lost();
      say("the daemon has gone: what this program holds stays, and new GPU memory waits for it");
    }
    const int is_broken = session.state == LOST && begin_session(message) != OPENED; /* retried when poll() returns */
    unlock(&session.line);
    if (!is_broken) ledger_tidy();
  } while (!is_last_thread());
  unblock_signals();
  return nothing;
}

void session_keep(void) {
  if (__atomic_exchange_n(&session.has_keeper, 1, __ATOMIC_RELAXED)) return;
  const struct calm calm = calm_begin();
  /* Retries at the next charge if no thread can be started. */
  if (start_thread(keep) != 0) __atomic_store_n(&session.has_keeper, 0, __ATOMIC_RELAXED);
  calm_end(calm);
}
