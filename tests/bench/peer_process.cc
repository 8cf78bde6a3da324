// SPDX-License-Identifier: Apache-2.0
//
// The peer's standard input is a socket. The peer reads names of workloads, and sends an Answer after its start, and an
// Answer for each name.
#include "tests/bench/peer_process.h"

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace vrambroker::bench {
namespace {

struct Answer {
  bool installed = true;
  Cost cost;
};

bool MallocIsIn(absl::string_view library) {
  Dl_info info;
  return dladdr(dlsym(RTLD_DEFAULT, "malloc"), &info) != 0 && absl::StrContains(info.dli_fname, library);
}

absl::StatusOr<Answer> Receive(int socket) {
  Answer answer;
  if (recv(socket, &answer, sizeof answer, 0) != sizeof answer) return absl::UnavailableError("the process has ended");
  return answer;
}

[[noreturn]] void Become(const Peer& peer, const std::vector<std::string>& arguments, int socket) {
  dup2(socket, STDIN_FILENO);
  if (*peer.library != '\0') setenv("LD_PRELOAD", peer.library, /*overwrite=*/1);
  const std::string environment = peer.environment;
  if (const size_t equals = environment.find('='); equals != std::string::npos) {
    setenv(environment.substr(0, equals).c_str(), environment.c_str() + equals + 1, /*overwrite=*/1);
  }
  std::vector<char*> argv = {const_cast<char*>("allocator_bench")};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv("/proc/self/exe", argv.data());
  _exit(127);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerProcess>> PeerProcess::Start(const Peer& peer,
                                                                const std::vector<std::string>& arguments) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair failed");
  }
  UniqueFd ours(sockets[0]);
  const UniqueFd theirs(sockets[1]);
  const pid_t pid = fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "fork failed");
  if (pid == 0) Become(peer, arguments, theirs.get());
  std::unique_ptr<PeerProcess> process(new PeerProcess(pid, std::move(ours)));
  const absl::StatusOr<Answer> answer = Receive(process->socket_.get());
  if (!answer.ok()) return answer.status();
  if (!answer->installed) return absl::NotFoundError(absl::StrCat(peer.library, " is not installed"));
  return process;
}

PeerProcess::~PeerProcess() {
  socket_ = UniqueFd();  // hangs up
  waitpid(pid_, nullptr, 0);
}

absl::StatusOr<Cost> PeerProcess::Measure(const std::string& workload) {
  send(socket_.get(), workload.data(), workload.size(), MSG_NOSIGNAL);
  const absl::StatusOr<Answer> answer = Receive(socket_.get());
  if (!answer.ok()) return answer.status();
  return answer->cost;
}

absl::Status ServePeer(const Peer& peer, const std::string& golden_dir, size_t ops) {
  Answer answer{.installed = *peer.library == '\0' || MallocIsIn(peer.library)};
  Workload workload;
  std::string loaded;
  while (send(STDIN_FILENO, &answer, sizeof answer, MSG_NOSIGNAL) == sizeof answer) {
    char buffer[256];
    const ssize_t length = recv(STDIN_FILENO, buffer, sizeof buffer, 0);
    if (length <= 0) break;
    if (const std::string name(buffer, static_cast<size_t>(length)); name != loaded) {
      absl::StatusOr<Workload> made = MakeWorkload(name, golden_dir, ops);
      if (!made.ok()) return made.status();
      workload = *std::move(made);
      loaded = name;
    }
    answer.cost = Perform(workload, peer.subject);
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::bench
