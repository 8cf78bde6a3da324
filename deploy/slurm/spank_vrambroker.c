/* SPDX-License-Identifier: Apache-2.0
 *
 * Slurm's jobs and vrambroker: a plugin of slurmd (SPANK, slurm-spank(8)). A job with memory as a generic resource, by
 * `--gres=vram:8192` (MiB), has a claim with that limit on each of its nodes. All steps and tasks of the job are told
 * of the claim's sockets; the daemon enforces the limit. README.md explains the setup.
 *
 * As a job's prolog, root makes the claim "slurm-JOBID", owned by the job's user; "slurm-JOBID.2" when the job was
 * queued again twice, since processes may still hold memory of the earlier claims. As the epilog, root removes the
 * claim. A file per job, kJobs/JOBID, names the claim's owner, so that steps need not ask the controller. The next hook
 * removes claims without a file: the daemon did not answer the epilog, or no epilog ran, as after a reboot. Files of
 * jobs without an epilog are found by asking the controller: when slurmd starts, and every ten minutes afterwards.
 *
 * Hooks run in different places: prolog and epilog in a process of slurmd that ends with the hook, several at a time; a
 * step's hooks in slurmstepd, on a single thread. Hooks hold kJobs/lock while adding a file, and while removing claims
 * without a file. */
#define _GNU_SOURCE /* pipe2 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "deploy/slurm/gres_share.h"

SPANK_PLUGIN(vrambroker, 1)

static const char kJobs[] = "/run/vrambroker-slurm";
static const char kGres[] = "vram";
static const char kSocketDirVariable[] = "VRAMBROKER_SOCKET_DIR";

enum { kName = 32, kPath = 512, kOutput = 4096 };

/* ---- Settings from plugstack.conf ---- */

struct settings {
  const char* socket_dir;
  const char* vramctl;
  const char* device; /* NULL: all */
  int timeout_s;      /* maximum wait of a job for a starting daemon */
};

static bool read_settings(int argc, char** argv, struct settings* settings) {
  *settings = (struct settings){.socket_dir = "/run/vrambroker", .vramctl = "/usr/bin/vramctl", .timeout_s = 30};
  for (int i = 0; i < argc; ++i) {
    const char* const value = strchr(argv[i], '=') == NULL ? "" : strchr(argv[i], '=') + 1;
    const size_t name = (size_t)(value - argv[i]);
    char* end = NULL;
    if (*value == '\0') {
      slurm_error("vrambroker: '%s' in plugstack.conf is not NAME=VALUE", argv[i]);
      return false;
    }
    if (strncmp(argv[i], "socket_dir=", name) == 0) {
      settings->socket_dir = value;
    } else if (strncmp(argv[i], "vramctl=", name) == 0) {
      settings->vramctl = value;
    } else if (strncmp(argv[i], "device=", name) == 0) {
      settings->device = value;
    } else if (strncmp(argv[i], "timeout=", name) == 0) {
      const long seconds = strtol(value, &end, 10);
      if (*end != '\0' || seconds < 0 || seconds > 3600) {
        slurm_error("vrambroker: timeout=%s in plugstack.conf is not a number of seconds, up to 3600", value);
        return false;
      }
      settings->timeout_s = (int)seconds;
    } else {
      slurm_error("vrambroker: plugstack.conf may have socket_dir=, vramctl=, device= and timeout=, not '%s'", argv[i]);
      return false;
    }
  }
  return true;
}

/* ---- Asking the daemon, by vramctl ---- */

enum answer { kDone, kTryAgain, kExists, kNotFound, kRefused };

/* For making a claim, and for tidying up, also possible in the next hook. */
static const char kPatience[] = "--timeout=20";
static const char kHaste[] = "--timeout=5";

static bool has_code(const char* output, const char* code) {
  const char* const at = strstr(output, "\"code\"");
  const char* const found = at == NULL ? NULL : strstr(at, code);
  return found != NULL && found - at < 12; /* "code": "NOT_FOUND" */
}

/* Writes vramctl's error to slurmd's log: vramctl's JSON has {"error": {"code": ..., "message": ...}}. */
static void log_error(const char* name, const char* output) {
  const char* message = strstr(output, "\"message\"");
  message = message == NULL ? NULL : strchr(message + strlen("\"message\""), '"');
  if (message == NULL) {
    slurm_error("vrambroker: claim %s: %s", name, output);
    return;
  }
  const char* end = ++message;
  while (*end != '\0' && *end != '"') end += end[0] == '\\' && end[1] != '\0' ? 2 : 1;
  slurm_error("vrambroker: claim %s: %.*s", name, (int)(end - message), message);
}

/* `output`, of kOutput bytes, receives the program's stderr. Passes an empty environment: the program runs as root, and
 * a job may have changed our environment. */
static int run(char* const* argv, char* output) {
  int ends[2];
  output[0] = '\0';
  if (pipe2(ends, O_CLOEXEC) != 0) {
    snprintf(output, kOutput, "pipe: %s", strerror(errno));
    return -1;
  }
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&files, ends[1], STDERR_FILENO);
  char* const environment[] = {"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", NULL};
  pid_t child = 0;
  const int error = posix_spawn(&child, argv[0], &files, &attributes, argv, environment);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  close(ends[1]);
  int status = -1;
  if (error != 0) {
    snprintf(output, kOutput, "cannot run %s: %s", argv[0], strerror(error));
  } else {
    size_t size = 0;
    char rest[256];
    for (;;) { /* read to the end, so that the program can write everything */
      const size_t room = kOutput - 1 - size;
      const ssize_t got = room > 0 ? read(ends[0], output + size, room) : read(ends[0], rest, sizeof rest);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) break;
      if (room > 0) size += (size_t)got;
    }
    output[size] = '\0';
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  }
  close(ends[0]);
  return status;
}

/* Runs `vramctl claim VERB NAME ...`, with further arguments up to NULL. `output`, of kOutput bytes, receives vramctl's
 * error. */
static enum answer claim(const struct settings* settings, char* output, const char* timeout, const char* verb,
                         const char* name, ...) {
  enum { kMaxArguments = 32 };
  char* argv[kMaxArguments] = {(char*)settings->vramctl,
                               "--socket-dir",
                               (char*)settings->socket_dir,
                               "--format=json",
                               (char*)timeout,
                               "claim",
                               (char*)verb,
                               (char*)name};
  int count = 8;
  va_list more;
  va_start(more, name);
  for (char* argument = NULL; count < kMaxArguments - 1 && (argument = va_arg(more, char*)) != NULL;) {
    argv[count++] = argument;
  }
  va_end(more);
  if (run(argv, output) == 0) return kDone;
  if (has_code(output, "ALREADY_EXISTS")) return kExists;
  if (has_code(output, "NOT_FOUND")) return kNotFound;
  if (has_code(output, "INVALID_ARGUMENT") || has_code(output, "PERMISSION_DENIED")) return kRefused;
  return kTryAgain; /* no daemon, a silent daemon, or a daemon with a full disk */
}

/* Ends the sessions of the claim and removes the claim. False: the claim may still exist. */
static bool remove_claim(const struct settings* settings, const char* name) {
  char output[kOutput];
  const enum answer answer = claim(settings, output, kHaste, "rm", name, "--revoke", NULL);
  if (answer == kDone || answer == kNotFound) return true;
  log_error(name, output);
  return false;
}

/* ---- Jobs with a claim ---- */

struct job {
  uint32_t id;
  uint32_t restarts; /* number of times the job was queued again */
  uid_t uid;
};

static void claim_name(const struct job* job, char* name) {
  if (job->restarts == 0) {
    snprintf(name, kName, "slurm-%u", job->id);
  } else {
    snprintf(name, kName, "slurm-%u.%u", job->id, job->restarts);
  }
}

static void job_file(uint32_t id, char* path) {
  snprintf(path, kPath, "%s/%u", kJobs, id);
}

/* Reads the job as recorded by its prolog. */
static bool read_job(uint32_t id, struct job* job) {
  char path[kPath], text[64] = "";
  job_file(id, path);
  FILE* const file = fopen(path, "re");
  if (file == NULL) return false;
  const bool is_read = fgets(text, sizeof text, file) != NULL;
  fclose(file);
  char *after_uid = text, *end = text;
  *job = (struct job){.id = id};
  job->uid = (uid_t)strtoul(text, &after_uid, 10);
  job->restarts = (uint32_t)strtoul(after_uid, &end, 10);
  return is_read && end != after_uid;
}

/* Writes the file atomically: another hook, possibly reading the file now, removes the claim of a job with an empty
 * file. */
static bool add_job(const struct job* job) {
  char path[kPath], next[kPath + 4];
  job_file(job->id, path);
  snprintf(next, sizeof next, "%s.new", path);
  FILE* const file = fopen(next, "we");
  const bool is_written = file != NULL && fprintf(file, "%u %u\n", job->uid, job->restarts) > 0;
  if (file != NULL && fclose(file) == 0 && is_written && rename(next, path) == 0) return true;
  slurm_error("vrambroker: cannot write %s: %s", path, strerror(errno));
  unlink(next);
  return false;
}

static void forget_job(uint32_t id) {
  char path[kPath];
  job_file(id, path);
  if (unlink(path) != 0 && errno != ENOENT) slurm_error("vrambroker: cannot remove %s: %s", path, strerror(errno));
}

/* Locks until the descriptor is closed. -1: not locked; another hook holds the lock (unless `waits`), or an error is
 * logged. */
static int lock_jobs(bool waits) {
  char path[kPath];
  snprintf(path, sizeof path, "%s/lock", kJobs);
  if (mkdir(kJobs, 0755) != 0 && errno != EEXIST)
    slurm_error("vrambroker: cannot create %s: %s", kJobs, strerror(errno));
  const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) {
    slurm_error("vrambroker: cannot open %s: %s", path, strerror(errno));
    return -1;
  }
  while (flock(file, LOCK_EX | (waits ? 0 : LOCK_NB)) != 0) {
    if (errno == EINTR) continue;
    close(file);
    return -1;
  }
  return file;
}

/* Removes claims without a file. Stops at the first claim not removed: the daemon may not answer at all. */
static void remove_unknown(const struct settings* settings) {
  static const char kPrefix[] = "slurm-";
  char path[kPath];
  snprintf(path, sizeof path, "%s/claims", settings->socket_dir);
  DIR* const claims = opendir(path);
  if (claims == NULL) return;
  for (const struct dirent* each = NULL; (each = readdir(claims)) != NULL;) {
    char name[kName];
    struct job job = {0}, known = {0};
    char* end = NULL;
    if (strncmp(each->d_name, kPrefix, sizeof kPrefix - 1) != 0) continue;
    job.id = (uint32_t)strtoul(each->d_name + sizeof kPrefix - 1, &end, 10);
    if (*end == '.') job.restarts = (uint32_t)strtoul(end + 1, NULL, 10);
    claim_name(&job, name);
    if (strcmp(name, each->d_name) != 0) continue; /* not our name */
    if (read_job(job.id, &known) && known.restarts == job.restarts) continue;
    if (!remove_claim(settings, name)) break;
  }
  closedir(claims);
}

/* ---- Slurm's side ---- */

/* Asks slurmctld for a job. Waits for an absent controller, like everything Slurm does for a job: a failing prolog
 * drains the node. Null, with errno: unknown job. Free the answer with slurm_free_job_info_msg(). */
static job_info_msg_t* load_job(uint32_t job, bool waits) {
  for (bool is_said = false;; is_said = true) {
    job_info_msg_t* answer = NULL;
    if (slurm_load_job(&answer, job, SHOW_DETAIL | SHOW_ALL | SHOW_LOCAL) == SLURM_SUCCESS) return answer;
    if (errno == ESLURM_INVALID_JOB_ID || !waits) return NULL;
    if (!is_said)
      slurm_error("vrambroker: waits for slurmctld, to ask what job %u may have: %s", job, slurm_strerror(errno));
    sleep(1);
  }
}

/* The job's record in an answer; null: no record. */
static const job_info_t* find_job(const job_info_msg_t* answer, uint32_t id) {
  for (uint32_t i = 0; answer != NULL && i < answer->record_count; ++i) {
    if (answer->job_array[i].job_id == id) return &answer->job_array[i];
  }
  return NULL;
}

/* The index of this node among the job's nodes; -1: not a node of the job. */
static int find_node(const job_info_t* info, const char* node) {
  if (info->nodes == NULL) return -1;
  __typeof__(slurm_hostlist_create("")) nodes = slurm_hostlist_create(info->nodes); /* the type differs between Slurm
                                                                                     * versions */
  const int at = nodes == NULL ? -1 : slurm_hostlist_find(nodes, node);
  if (nodes != NULL) slurm_hostlist_destroy(nodes);
  return at;
}

/* `mib`: the job's share on this node; 0: no share. Also sets the number of times the job was queued again. */
static bool read_share(struct job* job, uint64_t* mib) {
  *mib = 0;
  job_info_msg_t* const answer = load_job(job->id, true);
  const job_info_t* const info = find_job(answer, job->id);
  bool is_read = false;
  if (info != NULL) job->restarts = info->restart_cnt;
  if (info == NULL) {
    slurm_error("vrambroker: slurmctld does not know job %u: %s", job->id, slurm_strerror(errno));
  } else if (info->gres_detail_cnt == 0) {
    is_read = true;
  } else {
    const char* const node = getenv("SLURMD_NODENAME");
    const int at = node == NULL ? -1 : find_node(info, node);
    const char* const detail = at >= 0 && (uint32_t)at < info->gres_detail_cnt ? info->gres_detail_str[at] : NULL;
    is_read = at >= 0 && vrambroker_gres_count(detail, kGres, mib);
    if (!is_read) {
      slurm_error("vrambroker: cannot read what job %u may have of %s on node %s, of its nodes %s: '%s'", job->id,
                  kGres, node == NULL ? "?" : node, info->nodes, detail == NULL ? "" : detail);
    }
  }
  if (answer != NULL) slurm_free_job_info_msg(answer);
  return is_read;
}

static bool make_claim(const struct settings* settings, const struct job* job, uint64_t mib, bool may_exist) {
  char name[kName], owner[32], limit[32], label[32], device[32], output[kOutput];
  claim_name(job, name);
  snprintf(owner, sizeof owner, "--owner=%u", job->uid);
  snprintf(limit, sizeof limit, "--limit=%lluMiB", (unsigned long long)mib);
  snprintf(label, sizeof label, "--label=job=%u", job->id);
  snprintf(device, sizeof device, "--device=%s", settings->device == NULL ? "" : settings->device);
  const struct timespec pause = {.tv_nsec = 200000000};
  struct timespec begin, now;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (bool is_said = false;; is_said = true) {
    enum answer answer = claim(settings, output, kPatience, "create", name, owner, limit, label,
                               settings->device == NULL ? NULL : device, NULL);
    if (answer == kExists && may_exist) answer = claim(settings, output, kPatience, "set", name, limit, NULL);
    if (answer == kExists) { /* of another job with that number: try again after the removal */
      answer = claim(settings, output, kPatience, "rm", name, "--revoke", "--wait", NULL);
      if (answer == kDone || answer == kNotFound) continue;
    }
    if (answer == kDone) return true;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const bool gives_up = answer == kRefused || now.tv_sec - begin.tv_sec >= settings->timeout_s;
    if (!is_said || gives_up) log_error(name, output);
    if (gives_up) return false;
    if (!is_said) {
      slurm_error("vrambroker: job %u waits for the daemon at %s (socket_dir= in plugstack.conf), for up to %d s",
                  job->id, settings->socket_dir, settings->timeout_s);
    }
    nanosleep(&pause, NULL);
  }
}

/* Forgets jobs no longer on this node. False: slurmctld is away. */
static bool forget_jobs_that_are_gone(void) {
  const char* const node = getenv("SLURMD_NODENAME"); /* null when slurmd starts */
  DIR* const jobs = opendir(kJobs);
  bool is_answered = true;
  if (jobs == NULL) return true;
  for (const struct dirent* file = NULL; is_answered && (file = readdir(jobs)) != NULL;) {
    char* rest = NULL;
    const uint32_t id = (uint32_t)strtoul(file->d_name, &rest, 10);
    if (rest == file->d_name || *rest != '\0') continue;
    job_info_msg_t* const answer = load_job(id, false);
    is_answered = answer != NULL || errno == ESLURM_INVALID_JOB_ID;
    const job_info_t* const info = find_job(answer, id);
    const uint32_t state = info == NULL ? JOB_END : info->job_state & JOB_STATE_BASE;
    const bool is_here =
        (state == JOB_RUNNING || state == JOB_SUSPENDED) && (node == NULL || find_node(info, node) >= 0);
    if (is_answered && !is_here) forget_job(id);
    if (answer != NULL) slurm_free_job_info_msg(answer);
  }
  closedir(jobs);
  return is_answered;
}

/* Removes leftovers of other hooks. Skips the work while another hook does it: a silent daemon then delays only a
 * single hook. The age of the lock file tells when slurmctld was last asked. */
static void tidy_up(const struct settings* settings, bool is_start) {
  enum { kAskAgain_s = 600 };
  struct stat last;
  const int lock = lock_jobs(false);
  if (lock < 0) return;
  const bool is_due = is_start || fstat(lock, &last) != 0 || llabs(time(NULL) - last.st_mtime) >= kAskAgain_s;
  if (is_due && forget_jobs_that_are_gone()) futimens(lock, NULL);
  remove_unknown(settings);
  close(lock);
}

int slurm_spank_init(spank_t spank, int argc, char** argv) {
  (void)spank;
  struct settings settings;
  /* Reports errors at once, when srun or slurmd starts. slurm_spank_task_init() refuses a step's tasks. */
  if (spank_context() == S_CTX_REMOTE) return 0;
  if (!read_settings(argc, argv, &settings)) return -1;
  if (spank_context() == S_CTX_SLURMD) tidy_up(&settings, true);
  return 0;
}

/* A failure drains the node, and the job is queued again: as with every prolog. */
int slurm_spank_job_prolog(spank_t spank, int argc, char** argv) {
  struct settings settings;
  struct job job = {0}, former;
  uint64_t mib = 0;
  if (!read_settings(argc, argv, &settings) || spank_get_item(spank, S_JOB_ID, &job.id) != ESPANK_SUCCESS ||
      spank_get_item(spank, S_JOB_UID, &job.uid) != ESPANK_SUCCESS || !read_share(&job, &mib)) {
    return -1;
  }
  /* May exist when slurmd has lost its memory, and repeats the prolog. A claim of another user belonged to another job
   * with that number. */
  const bool may_exist = read_job(job.id, &former) && former.uid == job.uid;
  bool is_known = true;
  if (mib > 0) {
    const int lock = lock_jobs(true);
    is_known = lock >= 0 && add_job(&job);
    if (lock >= 0) close(lock);
  } else {
    forget_job(job.id);
  }
  tidy_up(&settings, false);
  return is_known && (mib == 0 || make_claim(&settings, &job, mib, may_exist)) ? 0 : -1;
}

int slurm_spank_job_epilog(spank_t spank, int argc, char** argv) {
  struct settings settings;
  struct job job;
  uint32_t id = 0;
  char name[kName];
  if (!read_settings(argc, argv, &settings) || spank_get_item(spank, S_JOB_ID, &id) != ESPANK_SUCCESS) return -1;
  if (read_job(id, &job)) {
    forget_job(id);
    claim_name(&job, name);
    if (!remove_claim(&settings, name)) return 0; /* the next hook will */
  }
  tidy_up(&settings, false);
  return 0;
}

/* Tells a step of its job's claim. */
static bool tell_step(spank_t spank, int argc, char** argv) {
  struct settings settings;
  struct job job;
  uint32_t id = 0;
  if (!read_settings(argc, argv, &settings) || spank_get_item(spank, S_JOB_ID, &id) != ESPANK_SUCCESS) return false;
  char name[kName], path[kPath], old[kPath];
  if (read_job(id, &job)) {
    claim_name(&job, name);
    snprintf(path, sizeof path, "%s/claims/%s", settings.socket_dir, name);
    return spank_setenv(spank, kSocketDirVariable, path, 1) == ESPANK_SUCCESS;
  }
  /* The variable may come from a job that submitted this job. */
  snprintf(path, sizeof path, "%s/claims/slurm-", settings.socket_dir);
  if (spank_getenv(spank, kSocketDirVariable, old, sizeof old) == ESPANK_SUCCESS &&
      strncmp(old, path, strlen(path)) == 0) {
    spank_unsetenv(spank, kSocketDirVariable);
  }
  return true;
}

static bool step_is_refused; /* each task is a fork of slurmstepd */

/* Runs in slurmstepd, for each step of the job, before any task. Slurm 22.05 treats a refusal here as success: srun has
 * exit code 0, and a batch job whose script never ran is COMPLETED. Yet the node is drained. So the tasks are refused.
 */
int slurm_spank_init_post_opt(spank_t spank, int argc, char** argv) {
  if (spank_context() == S_CTX_REMOTE) step_is_refused = !tell_step(spank, argc, argv);
  return 0;
}

/* Runs in each task; errors reach the task's stderr. */
int slurm_spank_task_init(spank_t spank, int argc, char** argv) {
  (void)spank;
  struct settings settings;
  if (!step_is_refused) return 0;
  if (read_settings(argc, argv, &settings)) slurm_error("vrambroker: cannot tell the step of its job's claim");
  return -1;
}
