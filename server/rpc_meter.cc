// SPDX-License-Identifier: Apache-2.0
#include "server/rpc_meter.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <utility>

#include "absl/strings/strip.h"
#include "vrambroker/v1/admin.pb.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker {
namespace {

constexpr std::array<double, 11> kRpcSeconds = {50e-6, 100e-6, 250e-6, 500e-6, 0.001, 0.0025,
                                                0.005, 0.01,   0.05,   0.25,   1};
constexpr char kStream[] = "Session";

}  // namespace

struct RpcMeter::Method {
  explicit Method(std::string method) : name(std::move(method)), durations(kRpcSeconds) {}

  const std::string name;
  std::array<std::atomic<uint64_t>, kStatusCodes> done{};
  std::atomic<uint64_t> in_flight{0};
  DurationHistogram durations;
};

void RpcMeter::Call::Done(absl::StatusCode code) const {
  method_->in_flight.fetch_sub(1, std::memory_order_relaxed);
  const size_t index = std::min(static_cast<size_t>(code), kStatusCodes - 1);
  method_->done[index].fetch_add(1, std::memory_order_relaxed);
  if (method_->name != kStream) method_->durations.Observe(std::chrono::steady_clock::now() - start_);
}

RpcMeter::RpcMeter() {
  for (const google::protobuf::FileDescriptor* file :
       {v1::AllocateRequest::descriptor()->file(), v1::ListSessionsRequest::descriptor()->file()}) {
    for (int i = 0; i < file->service_count(); ++i) {
      for (int k = 0; k < file->service(i)->method_count(); ++k) Add(file->service(i)->method(k)->name());
    }
  }
  for (const char* call : {"Allocate", "Free", "LeaseSegments", "ReturnSegments", "Explain"}) {
    Add(std::string(kStream) + "." + call);
  }
}

RpcMeter::~RpcMeter() = default;

void RpcMeter::Add(const std::string& method) {
  by_name_[method] = methods_.emplace_back(std::make_unique<Method>(method)).get();
}

RpcMeter::Method* RpcMeter::Find(absl::string_view method) const {
  const auto it = by_name_.find(method);
  return it == by_name_.end() ? nullptr : it->second;
}

RpcMeter::Call RpcMeter::Start(Method* method) {
  Call call;
  call.method_ = method;
  call.start_ = std::chrono::steady_clock::now();
  method->in_flight.fetch_add(1, std::memory_order_relaxed);
  return call;
}

std::vector<RpcFigures> RpcMeter::GetFigures() const {
  std::vector<RpcFigures> all;
  all.reserve(methods_.size());
  for (const std::unique_ptr<Method>& counted : methods_) {
    const Method& method = *counted;
    RpcFigures& figures = all.emplace_back();
    figures.method = method.name;
    for (size_t i = 0; i < kStatusCodes; ++i) figures.done[i] = method.done[i].load(std::memory_order_relaxed);
    figures.in_flight = method.in_flight.load(std::memory_order_relaxed);
    if (method.name != kStream) figures.durations = method.durations.Get();
  }
  return all;
}

namespace {

// Of one call. gRPC destroys it when the call is over.
class RpcInterceptor : public grpc::experimental::Interceptor {
 public:
  explicit RpcInterceptor(RpcMeter::Method* method) : call_(RpcMeter::Start(method)) {}
  ~RpcInterceptor() override {
    if (!done_) call_.Done(absl::StatusCode::kCancelled);
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    // The hook point first: others may be under way at the same time.
    if (methods->QueryInterceptionHookPoint(grpc::experimental::InterceptionHookPoints::PRE_SEND_STATUS) && !done_) {
      done_ = true;
      call_.Done(static_cast<absl::StatusCode>(methods->GetSendStatus().error_code()));
    }
    methods->Proceed();
  }

 private:
  const RpcMeter::Call call_;
  bool done_ = false;
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
    return method == nullptr ? nullptr : new RpcInterceptor(method);
  }

 private:
  const RpcMeter& meter_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> RpcMeter::MakeInterceptors() const {
  return std::make_unique<RpcInterceptors>(this);
}

}  // namespace vrambroker
