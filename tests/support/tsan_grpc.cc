// SPDX-License-Identifier: Apache-2.0
//
// Tells ThreadSanitizer about gRPC's promises: actions before the start of an operation happen before the report of the
// operation's completion. The file also tells about the promises of absl::Mutex, which gRPC uses. The distribution's
// gRPC and Abseil are built without TSan's hooks: without this file every message would look like a race. The file adds
// these edges and no further edge: TSan still reports a race between two handlers. Only programs of a TSan build link
// this file.
//
// These definitions take the place of the libraries' definitions, because a program's symbols come before a shared
// library's symbols. Each definition calls the library's definition.
#include <dlfcn.h>
#include <grpc/grpc.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <mutex>
#include <unordered_map>

#include "absl/synchronization/mutex.h"

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
extern char __executable_start;
extern char etext;

// TSan ignores the libraries' own reads and writes, but still counts the libraries' locks.
const char* __tsan_default_options() {
  return "ignore_noninstrumented_modules=1";
}

// gRPC's own handler serves a call of a method that the daemon does not have. The handler counts down the references to
// the call's state where no function of this program runs: there is no place for an edge. The suppression names only
// this instantiation of the handler; the services' handlers have messages of other types.
const char* __tsan_default_suppressions() {
  return "race:CallbackBidiHandler<grpc::ByteBuffer, grpc::ByteBuffer>::ServerCallbackReaderWriterImpl::~\n";
}
}

namespace {

using Functor = grpc_completion_queue_functor;
using FunctorRun = decltype(Functor::functor_run);

// The mutex and the map are never destroyed: gRPC's threads may outlive main().
std::mutex& functors_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
std::unordered_map<Functor*, FunctorRun>& functors() {
  static auto* const map = new std::unordered_map<Functor*, FunctorRun>;
  return *map;
}

// Runs in place of the completion's own function.
void RunAfterAcquire(Functor* functor, int ok) {
  __tsan_acquire(functor);
  FunctorRun run = nullptr;
  {
    const std::lock_guard<std::mutex> lock(functors_mutex());
    const auto it = functors().find(functor);
    run = it->second;
    functors().erase(it);
    functor->functor_run = run;
  }
  run(functor, ok);
}

// Tells the APIs apart: a tag of the callback API begins with a function of this program; a tag of the synchronous API
// begins with a table of virtual functions, which is data.
bool IsFunctor(void* tag) {
  const char* first = *static_cast<char**>(tag);
  return first >= &__executable_start && first < &etext;
}

template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" grpc_call_error grpc_call_start_batch(grpc_call* call, const grpc_op* ops, size_t nops, void* tag,
                                                 void* reserved) {
  static const auto next = Next<decltype(&grpc_call_start_batch)>("grpc_call_start_batch");
  if (tag != nullptr) {
    if (IsFunctor(tag)) {
      auto* functor = static_cast<Functor*>(tag);
      const std::lock_guard<std::mutex> lock(functors_mutex());
      functors()[functor] = functor->functor_run;
      functor->functor_run = &RunAfterAcquire;
    }
    __tsan_release(tag);
  }
  return next(call, ops, nops, tag, reserved);
}

extern "C" grpc_event grpc_completion_queue_pluck(grpc_completion_queue* queue, void* tag, gpr_timespec deadline,
                                                  void* reserved) {
  static const auto next = Next<decltype(&grpc_completion_queue_pluck)>("grpc_completion_queue_pluck");
  const grpc_event event = next(queue, tag, deadline, reserved);
  if (tag != nullptr) __tsan_acquire(tag);
  return event;
}

// The thread that gets the connection's events makes the state of a call, including the interceptors' data. The thread
// then hands the state to the thread that serves the call or deletes the state. The constructor ends with
// grpc_metadata_array_init(). The other thread begins with BindDeadlineAndMetadata (below) or with
// grpc_metadata_array_destroy(), on the same array.
extern "C" void grpc_metadata_array_init(grpc_metadata_array* array) {
  static const auto next = Next<decltype(&grpc_metadata_array_init)>("grpc_metadata_array_init");
  next(array);
  __tsan_release(array);
}

extern "C" void grpc_metadata_array_destroy(grpc_metadata_array* array) {
  static const auto next = Next<decltype(&grpc_metadata_array_destroy)>("grpc_metadata_array_destroy");
  __tsan_acquire(array);
  next(array);
}

namespace {

// Finds the library's definition of the function that this file defines at `address`.
void* Overridden(void* address) {
  Dl_info info = {};
  return dladdr(address, &info) != 0 ? dlsym(RTLD_NEXT, info.dli_sname) : nullptr;
}

// Returns a member function's address. The address works like an ordinary function that takes `this` first.
template <typename Method>
void* Address(Method method) {
  void* address = nullptr;
  static_assert(sizeof(method) >= sizeof(address));
  __builtin_memcpy(&address, &method, sizeof(address));
  return address;
}

}  // namespace

namespace grpc::internal {

// gRPC destroys a call's state when every reaction has counted down. The last countdown may be inside of the library,
// where TSan misses the acquire of the other reactions' releases: ScheduleOnDone() acquires the counter in the
// library's place.
void ServerCallbackCall::ScheduleOnDone(bool inline_ondone) {
  using Function = void (*)(ServerCallbackCall*, bool);
  static const auto next = reinterpret_cast<Function>(Overridden(Address(&ServerCallbackCall::ScheduleOnDone)));
  __tsan_acquire(&callbacks_outstanding_);
  next(this, inline_ondone);
}

// CallOnCancel() does the same for the reaction to a cancellation: the thread that completes the last condition runs
// the reaction.
void ServerCallbackCall::CallOnCancel(ServerReactor* reactor) {
  using Function = void (*)(ServerCallbackCall*, ServerReactor*);
  static const auto next = reinterpret_cast<Function>(Overridden(Address(&ServerCallbackCall::CallOnCancel)));
  __tsan_acquire(&on_cancel_conditions_remaining_);
  next(this, reactor);
}

}  // namespace grpc::internal

namespace grpc {

void ServerContextBase::BindDeadlineAndMetadata(gpr_timespec deadline, grpc_metadata_array* array) {
  using Function = void (*)(ServerContextBase*, gpr_timespec, grpc_metadata_array*);
  static const auto next = reinterpret_cast<Function>(Overridden(Address(&ServerContextBase::BindDeadlineAndMetadata)));
  __tsan_acquire(array);
  next(this, deadline, array);
}

}  // namespace grpc

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static const auto next = reinterpret_cast<void (*)(Mutex*)>(Overridden(Address(&Mutex::Lock)));
  next(this);
  __tsan_acquire(this);
}

void Mutex::Unlock() {
  static const auto next = reinterpret_cast<void (*)(Mutex*)>(Overridden(Address(&Mutex::Unlock)));
  __tsan_release(this);
  next(this);
}

bool Mutex::TryLock() {
  static const auto next = reinterpret_cast<bool (*)(Mutex*)>(Overridden(Address(&Mutex::TryLock)));
  const bool locked = next(this);
  if (locked) __tsan_acquire(this);
  return locked;
}

void CondVar::Wait(Mutex* mu) {
  static const auto next = reinterpret_cast<void (*)(CondVar*, Mutex*)>(Overridden(Address(&CondVar::Wait)));
  __tsan_release(mu);
  next(this, mu);
  __tsan_acquire(mu);
}

bool CondVar::WaitWithDeadline(Mutex* mu, absl::Time deadline) {
  static const auto next =
      reinterpret_cast<bool (*)(CondVar*, Mutex*, absl::Time)>(Overridden(Address(&CondVar::WaitWithDeadline)));
  __tsan_release(mu);
  const bool expired = next(this, mu, deadline);
  __tsan_acquire(mu);
  return expired;
}

ABSL_NAMESPACE_END
}  // namespace absl
