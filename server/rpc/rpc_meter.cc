// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/rpc_meter.h"

#include <google/protobuf/descriptor.h>
#include <grpcpp/server_context.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>

#include <atomic>
#include <new>

#include "absl/strings/strip.h"
#include "vrambroker/v1/admin.pb.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker {
namespace {

constexpr char kStream[] = "Session";

}  // namespace

struct RpcMeter::Method {
  std::string name;
  prometheus::Family<prometheus::Counter>* requests;
  prometheus::Counter* succeeded;
  prometheus::Gauge* in_flight;
  prometheus::Histogram* seconds;  // nullptr for a session stream, which lasts as long as its session
};

void RpcMeter::Call::Done(absl::StatusCode code) const {
  method_->in_flight->Decrement();
  if (method_->seconds != nullptr) {
    method_->seconds->Observe(std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count());
  }
  if (code == absl::StatusCode::kOk) {
    method_->succeeded->Increment();
    return;
  }
  try {
    method_->requests->Add({{"method", method_->name}, {"code", absl::StatusCodeToString(code)}}).Increment();
    // Called by destructors: an uncounted call is better than a terminated daemon.
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
  }
}

RpcMeter::RpcMeter()
    : requests_(prometheus::BuildCounter()
                    .Name("vrambroker_rpc_requests_total")
                    .Help("Calls finished, by method and status code.")
                    .Register(registry_)),
      in_flight_(prometheus::BuildGauge()
                     .Name("vrambroker_rpc_in_flight")
                     .Help("Calls in progress, by method.")
                     .Register(registry_)),
      durations_(prometheus::BuildHistogram()
                     .Name("vrambroker_rpc_duration_seconds")
                     .Help("Time from the request of a call to its answer, by method.")
                     .Register(registry_)) {
  for (const google::protobuf::FileDescriptor* file :
       {v1::AllocateRequest::descriptor()->file(), v1::ListSessionsRequest::descriptor()->file()}) {
    for (int i = 0; i < file->service_count(); ++i) {
      for (int k = 0; k < file->service(i)->method_count(); ++k) Add(file->service(i)->method(k)->name());
    }
  }
  for (const char* call : {"Allocate", "Free", "LeaseSegments", "ReturnSegments", "Explain"}) {
    Add(std::string(kStream) + "." + call);
  }
  for (const char* call : {"Hello", "Join", "Hold", "Charge", "Wait", "Uncharge", "Info"}) {
    Add(std::string("Count.") + call);
  }
}

RpcMeter::~RpcMeter() = default;

void RpcMeter::Add(const std::string& method) {
  const prometheus::Labels labels = {{"method", method}};
  const prometheus::Histogram::BucketBoundaries seconds = {50e-6, 100e-6, 250e-6, 500e-6, 0.001, 0.0025,
                                                           0.005, 0.01,   0.05,   0.25,   1};
  by_name_[method] =
      methods_
          .emplace_back(new Method{.name = method,
                                   .requests = &requests_,
                                   .succeeded = &requests_.Add({{"method", method}, {"code", "OK"}}),
                                   .in_flight = &in_flight_.Add(labels),
                                   .seconds = method == kStream ? nullptr : &durations_.Add(labels, seconds)})
          .get();
}

RpcMeter::Method* RpcMeter::Find(absl::string_view method) const {
  const auto it = by_name_.find(method);
  return it == by_name_.end() ? nullptr : it->second;
}

RpcMeter::Call RpcMeter::Start(Method* method) {
  Call call;
  call.method_ = method;
  call.start_ = std::chrono::steady_clock::now();
  method->in_flight->Increment();
  return call;
}

std::vector<prometheus::MetricFamily> RpcMeter::Collect() const {
  return registry_.Collect();
}

namespace {

// Intercepts a single call. gRPC destroys the interceptor when the call is over.
class RpcInterceptor : public grpc::experimental::Interceptor {
 public:
  RpcInterceptor(RpcMeter::Method* method, const grpc::ServerContextBase* context)
      : call_(RpcMeter::Start(method)), context_(*context) {}
  ~RpcInterceptor() override {
    if (!done_) call_.Done(cancelled_ ? absl::StatusCode::kCancelled : code_.load());
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using Point = grpc::experimental::InterceptionHookPoints;
    // Checks the hook point first: other hook points may be in progress concurrently.
    if (methods->QueryInterceptionHookPoint(Point::PRE_SEND_STATUS) && !done_) {
      const auto code = static_cast<absl::StatusCode>(methods->GetSendStatus().error_code());
      if (MayBeOfNobody(code)) {
        code_ = code;
      } else {
        done_ = true;
        call_.Done(code);
      }
    }
    if (methods->QueryInterceptionHookPoint(Point::POST_RECV_CLOSE)) cancelled_ = context_.IsCancelled();
    methods->Proceed();
  }

 private:
  // The connection may have vanished before its message arrived, which gRPC reports with this code, or before the
  // caller was looked up. Whether it vanished is known only when the call is over.
  static bool MayBeOfNobody(absl::StatusCode code) {
    return code == absl::StatusCode::kUnimplemented || code == absl::StatusCode::kUnauthenticated;
  }

  const RpcMeter::Call call_;
  const grpc::ServerContextBase& context_;  // lives until POST_RECV_CLOSE
  bool done_ = false;
  std::atomic<absl::StatusCode> code_{absl::StatusCode::kCancelled};
  std::atomic<bool> cancelled_{false};
};

class RpcInterceptors : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit RpcInterceptors(const RpcMeter* meter) : meter_(*meter) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override {
    absl::string_view name(info->method());
    if (!absl::ConsumePrefix(&name, "/vrambroker.v1.Broker/") && !absl::ConsumePrefix(&name, "/vrambroker.v1.Admin/")) {
      return nullptr;
    }
    RpcMeter::Method* const method = name == kStream ? nullptr : meter_.Find(name);
    return method == nullptr ? nullptr : new RpcInterceptor(method, info->server_context());
  }

 private:
  const RpcMeter& meter_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> RpcMeter::MakeInterceptors() const {
  return std::make_unique<RpcInterceptors>(this);
}

}  // namespace vrambroker
