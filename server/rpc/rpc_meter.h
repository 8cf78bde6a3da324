// SPDX-License-Identifier: Apache-2.0
//
// RpcMeter: counts and times the calls of clients and operators, by method.
#ifndef VRAMBROKER_SERVER_RPC_RPC_METER_H_
#define VRAMBROKER_SERVER_RPC_RPC_METER_H_

#include <grpcpp/support/server_interceptor.h>
#include <prometheus/collectable.h>
#include <prometheus/family.h>
#include <prometheus/registry.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace vrambroker {

// Thread-safe. Counts every method of the services Broker and Admin by name, and the calls on session streams
// ("Session.Allocate"). Does not count methods of other services.
class RpcMeter : public prometheus::Collectable {
 public:
  struct Method;
  // A call counted as begun. Call Done() once.
  class Call {
   public:
    void Done(absl::StatusCode code) const;

   private:
    friend class RpcMeter;
    Method* method_ = nullptr;
    std::chrono::steady_clock::time_point start_;
  };

  RpcMeter();
  ~RpcMeter() override;

  // nullptr when the method does not exist.
  Method* Find(absl::string_view method) const;
  static Call Start(Method* method);

  // vrambroker_rpc_...
  std::vector<prometheus::MetricFamily> Collect() const override;

  // For the server's builder: measures every call except session streams, which SessionReactor measures. The meter
  // outlives the server.
  std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeInterceptors() const;

 private:
  void Add(const std::string& method);

  prometheus::Registry registry_;
  prometheus::Family<prometheus::Counter>& requests_;
  prometheus::Family<prometheus::Gauge>& in_flight_;
  prometheus::Family<prometheus::Histogram>& durations_;
  std::vector<std::unique_ptr<Method>> methods_;
  absl::flat_hash_map<std::string, Method*> by_name_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_RPC_METER_H_
