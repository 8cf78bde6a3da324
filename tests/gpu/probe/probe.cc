// SPDX-License-Identifier: Apache-2.0
// probe.cc - the orchestrator: a child per experiment, timeouts, JSON.
#include "common.h"

static std::string slurpUntil(int fd, pid_t pg, double deadlineUs, bool& timedOut) {
  std::string out;
  char b[4096];
  timedOut = false;
  for (;;) {
    int left = (int)((deadlineUs - nowUs()) * 1e-3);
    if (left <= 0) {
      timedOut = true;
      kill(-pg, SIGKILL);
      return out;
    }
    pollfd p{fd, POLLIN, 0};
    int r = poll(&p, 1, left);
    if (r < 0 && errno == EINTR) continue;
    if (r <= 0) continue;
    ssize_t n = read(fd, b, sizeof b);
    if (n <= 0) return out;
    out.append(b, n);
  }
}
static std::string field(const std::string& s, const char* tag) {
  size_t i = s.find(tag);
  if (i == std::string::npos) return "";
  i += strlen(tag);
  size_t j = s.find('\n', i);
  return s.substr(i, j == std::string::npos ? j : j - i);
}

int main(int argc, char** argv) {
  if (argc >= 3 && !strcmp(argv[1], "agent")) return agentMain(atoi(argv[2]));
  if (argc >= 3 && !strcmp(argv[1], "exp")) return expMain(argv[2]);
  if (argc >= 2 && !strcmp(argv[1], "list")) {
    for (auto& e : experimentList()) printf("%s (limit %d s)\n", e.first.c_str(), e.second);
    return 0;
  }
  const char* json = "probe-results.json";
  int budget = 340;
  std::vector<std::string> only;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--json") && i + 1 < argc)
      json = argv[++i];
    else if (!strcmp(argv[i], "--budget") && i + 1 < argc)
      budget = atoi(argv[++i]);
    else if (!strcmp(argv[i], "--only") && i + 1 < argc) {
      std::string s = argv[++i];
      size_t p = 0;
      while (p != std::string::npos) {
        size_t c = s.find(',', p);
        only.push_back(s.substr(p, c == std::string::npos ? c : c - p));
        p = c == std::string::npos ? c : c + 1;
      }
    } else if (strcmp(argv[i], "run")) {
      fprintf(stderr, "usage: probe [run] [--only a,b] [--budget seconds] [--json file] | probe list\n");
      return 2;
    }
  }
  double start = nowUs();
  std::string all = "{\"experiments\":[";
  bool first = true;
  int done = 0, bad = 0;
  for (auto& e : experimentList()) {
    if (!only.empty() && std::find(only.begin(), only.end(), e.first) == only.end()) continue;
    double spent = (nowUs() - start) * 1e-6;
    std::string line, js;
    int limit = (int)std::min(e.second * patience(), budget - spent);
    if (limit < 3) {
      line = e.first + ": skipped (time budget)";
      js = "{\"name\":\"" + e.first + "\",\"outcome\":\"skipped\"}";
    } else {
      int pf[2];
      if (pipe(pf)) return 1;
      pid_t p = fork();
      if (p == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(pf[1], 1);
        close(pf[0]);
        close(pf[1]);
        execl("/proc/self/exe", "probe", "exp", e.first.c_str(), (char*)nullptr);
        _exit(127);
      }
      setpgid(p, p);
      close(pf[1]);
      bool to;
      std::string out = slurpUntil(pf[0], p, nowUs() + limit * 1e6, to);
      close(pf[0]);
      kill(-p, SIGKILL);  // ends all processes of this experiment
      int st = 0;
      waitpid(p, &st, 0);
      line = field(out, "@@LINE ");
      js = field(out, "@@JSON ");
      if (line.empty()) {
        char w[96];
        if (to)
          snprintf(w, sizeof w, "timeout after %d s", limit);
        else if (WIFSIGNALED(st))
          snprintf(w, sizeof w, "controller died, signal %d", WTERMSIG(st));
        else
          snprintf(w, sizeof w, "controller exit %d", WEXITSTATUS(st));
        std::string part;  // results before the cut-off
        for (size_t i = out.find("@@P "); i != std::string::npos; i = out.find("@@P ", i + 4))
          part += (part.empty() ? "" : ",") + field(out.substr(i), "@@P ");
        line = e.first + ": " + w + " (" + part + ")";
        js = "{\"name\":\"" + e.first + "\",\"outcome\":\"" + w + "\",\"figures\":{" + part + "}}";
        bad++;
      }
      done++;
    }
    printf("%s\n", line.c_str());
    fflush(stdout);
    all += (first ? "\n" : ",\n") + js;
    first = false;
    FILE* f = fopen(json, "w");  // a new file after each experiment: a cut-off run still leaves its results
    if (f) {
      fprintf(f, "%s\n]}\n", all.c_str());
      fclose(f);
    }
  }
  printf("-- %d experiments, %d without a result, %.0f s, JSON in %s\n", done, bad, (nowUs() - start) * 1e-6, json);
  return 0;
}
