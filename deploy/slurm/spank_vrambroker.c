/* SPDX-License-Identifier: Apache-2.0
 *
 * Slurm's jobs and vrambroker: a plugin of slurmd (SPANK, slurm-spank(8)). A job that was given memory as a generic
 * resource, by `--gres=vram:8192` (MiB), has a claim with that limit on each of its nodes. All its steps and tasks are
 * told of the claim's sockets; what they may have is the daemon's to enforce. README.md shows how to set it up.
 *
 * As a job's prolog, root makes the claim "slurm-JOBID", which the job's user owns; "slurm-JOBID.2" when the job was
 * queued again twice, since processes may still hold memory of the earlier ones. As its epilog, root removes it. A file
 * for each job, kJobs/JOBID, says whose claim it has, so that no step has to ask the controller. Claims without such a
 * file are removed by the next hook: the daemon has not answered the epilog, or there was none, as with a reboot. Files
 * of jobs that have had no epilog are found by asking the controller: when slurmd starts, and every ten minutes after
 * that.
 *
 * Where a hook runs: prolog and epilog in a process of slurmd's that ends with them, several at a time; a step's in
 * slurmstepd, by one thread. kJobs/lock is held by who adds a file, and by who removes claims without one. */
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

/* ---- What plugstack.conf says ---- */

struct settings {
  const char* socket_dir;
  const char* vramctl;
  const char* device; /* NULL: all */
  int timeout_s;      /* how long a job waits for a daemon that is being started */
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

/* For making a claim, and for tidying up, which the next hook can do as well. */
static const char kPatience[] = "--timeout=20";
static const char kHaste[] = "--timeout=5";

static bool has_code(const char* output, const char* code) {
  const char* const at = strstr(output, "\"code\"");
  const char* const found = at == NULL ? NULL : strstr(at, code);
  return found != NULL && found - at < 12; /* "code": "NOT_FOUND" */
}

/* Writes what vramctl says of an error to slurmd's log: its JSON has {"error": {"code": ..., "message": ...}}. */
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

/* `output`, of kOutput bytes, is what it has written to stderr. Its environment is empty: it runs as root, and a job
 * has had a say in ours. */
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
    for (;;) { /* to its end, so that it can write all */
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

/* `vramctl claim VERB NAME ...`, the further arguments up to NULL. `output`, of kOutput bytes, is what it says of an
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
  return kTryAgain; /* no daemon, a silent one, one whose disk is full */
}

/* Ends the sessions of the claim and removes it. False: it may be there still. */
static bool remove_claim(const struct settings* settings, const char* name) {
  char output[kOutput];
  const enum answer answer = claim(settings, output, kHaste, "rm", name, "--revoke", NULL);
  if (answer == kDone || answer == kNotFound) return true;
  log_error(name, output);
  return false;
}

/* ---- The jobs that have a claim ---- */

struct job {
  uint32_t id;
  uint32_t restarts; /* how often it was queued again */
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

/* As when its prolog was run. */
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

/* As a whole: another hook, which may read it now, removes the claim of a job whose file says nothing. */
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

/* Until the descriptor is closed. -1: it is not locked; somebody else has it (unless `waits`), or what is said. */
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

/* Claims without a file. Stops at the first that the daemon does not remove: it may not answer at all. */
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
    if (strcmp(name, each->d_name) != 0) continue; /* not a name of ours */
    if (read_job(job.id, &known) && known.restarts == job.restarts) continue;
    if (!remove_claim(settings, name)) break;
  }
  closedir(claims);
}

/* ---- Slurm's side ---- */

/* Asks slurmctld for a job. Waits for a controller that is away, as all that Slurm does for a job: a prolog that fails
 * drains the node. Null, with errno: it knows no such job. To be freed by slurm_free_job_info_msg(). */
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

/* The job's record in an answer; null: it has none. */
static const job_info_t* find_job(const job_info_msg_t* answer, uint32_t id) {
  for (uint32_t i = 0; answer != NULL && i < answer->record_count; ++i) {
    if (answer->job_array[i].job_id == id) return &answer->job_array[i];
  }
  return NULL;
}

/* The place of this node among the job's; -1: it is not one of them. */
static int find_node(const job_info_t* info, const char* node) {
  if (info->nodes == NULL) return -1;
  __typeof__(slurm_hostlist_create("")) nodes = slurm_hostlist_create(info->nodes); /* another type in each Slurm */
  const int at = nodes == NULL ? -1 : slurm_hostlist_find(nodes, node);
  if (nodes != NULL) slurm_hostlist_destroy(nodes);
  return at;
}

/* `mib`: what the job has on this node; 0: nothing. Sets also how often it was queued again. */
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
    if (answer == kExists) { /* of another job of that number: once more when it is gone */
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

/* Forgets jobs that are not on this node any more. False: slurmctld is away. */
static bool forget_jobs_that_are_gone(void) {
  const char* const node = getenv("SLURMD_NODENAME"); /* null where slurmd starts */
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

/* Removes what other hooks could not. Leaves it to another hook that does so now: a daemon that does not answer holds
 * up one of them. The age of the lock's file says when slurmctld was asked last. */
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
  /* Said at once, where srun or slurmd starts. A step's tasks are refused by slurm_spank_task_init(). */
  if (spank_context() == S_CTX_REMOTE) return 0;
  if (!read_settings(argc, argv, &settings)) return -1;
  if (spank_context() == S_CTX_SLURMD) tidy_up(&settings, true);
  return 0;
}

/* A node where it fails is drained, and the job is queued again: as with every prolog. */
int slurm_spank_job_prolog(spank_t spank, int argc, char** argv) {
  struct settings settings;
  struct job job = {0}, former;
  uint64_t mib = 0;
  if (!read_settings(argc, argv, &settings) || spank_get_item(spank, S_JOB_ID, &job.id) != ESPANK_SUCCESS ||
      spank_get_item(spank, S_JOB_UID, &job.uid) != ESPANK_SUCCESS || !read_share(&job, &mib)) {
    return -1;
  }
  /* As when slurmd has lost its memory, and runs the prolog once more. Another user's was of another job of that
   * number. */
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
    if (!remove_claim(&settings, name)) return 0; /* the next hook does */
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
  /* It may have come along from a job that has submitted this one. */
  snprintf(path, sizeof path, "%s/claims/slurm-", settings.socket_dir);
  if (spank_getenv(spank, kSocketDirVariable, old, sizeof old) == ESPANK_SUCCESS &&
      strncmp(old, path, strlen(path)) == 0) {
    spank_unsetenv(spank, kSocketDirVariable);
  }
  return true;
}

static bool step_is_refused; /* each task is a fork of slurmstepd */

/* In slurmstepd, for each step of the job, before there is a task. A refusal here ends well for Slurm 22.05: srun has
 * exit code 0, and a batch job whose script never ran is COMPLETED. Yet its node is drained. So the tasks are refused.
 */
int slurm_spank_init_post_opt(spank_t spank, int argc, char** argv) {
  if (spank_context() == S_CTX_REMOTE) step_is_refused = !tell_step(spank, argc, argv);
  return 0;
}

/* In each task, whose stderr this reaches. */
int slurm_spank_task_init(spank_t spank, int argc, char** argv) {
  (void)spank;
  struct settings settings;
  if (!step_is_refused) return 0;
  if (read_settings(argc, argv, &settings)) slurm_error("vrambroker: cannot tell the step of its job's claim");
  return -1;
}
