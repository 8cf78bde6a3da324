// SPDX-License-Identifier: Apache-2.0
//
// HttpApi: pages of the daemon's HTTP port: the web page, its data as JSON, snapshots, metrics and health.
// server/HTTP.md lists the paths.
#ifndef VRAMBROKER_SERVER_HTTP_HTTP_API_H_
#define VRAMBROKER_SERVER_HTTP_HTTP_API_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/core/broker.h"
#include "server/http/http_router.h"
#include "server/http/memory_map.h"
#include "server/http/timeline.h"

namespace vrambroker {

enum class DaemonState { kStarting, kServing, kDraining, kStopping };
const char* DaemonStateName(DaemonState state);  // "starting", "serving", "draining" or "stopping"

struct HttpSources {
  std::function<std::string()> metrics;  // text exposition format 0.0.4
  std::function<absl::Status()> health;  // /healthz: 200, or 503 with the message
  std::function<DaemonState()> state;
  std::string socket_dir;  // of the daemon's sockets
};

// Safe to call from any thread.
class HttpApi {
 public:
  // All arguments outlive this object.
  HttpApi(Broker* broker, const Timeline* timeline, HttpSources sources);

  // The pages may be called only while this object lives.
  std::vector<HttpPage> Pages();

 private:
  HttpResponse State() const;
  HttpResponse Sessions() const;
  HttpResponse Ooms(const HttpParameters& parameters) const;
  HttpResponse TimelineOf(const HttpParameters& parameters) const;
  HttpResponse TimelineOfSession(const SessionRef& wanted, int device) const;
  HttpResponse Map(const HttpParameters& parameters);
  HttpResponse Snapshot(const HttpParameters& parameters);
  // Returns the parameter `device`; `otherwise` when the parameter is absent. InvalidArgument names the devices.
  absl::StatusOr<int> DeviceOf(const HttpParameters& parameters, int otherwise) const;

  Broker& broker_;
  const Timeline& timeline_;
  const HttpSources sources_;
  MemoryMap map_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_HTTP_API_H_
