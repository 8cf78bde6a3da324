// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/simulation.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker::fault {
namespace {

constexpr std::chrono::milliseconds kReclaimTimeout(2000);
constexpr std::chrono::milliseconds kHoldBackTime(1000);
constexpr std::chrono::milliseconds kSettleTime(50);
// Most delay of the timer in the simulation.
constexpr std::chrono::milliseconds kTimerSlack(1);

v1::OutOfMemory::Cause CauseOf(const absl::Status& status) {
  v1::OutOfMemory proto;
  if (const auto payload = status.GetPayload("type.googleapis.com/vrambroker.v1.OutOfMemory"); payload.has_value()) {
    proto.ParseFromString(std::string(*payload));
  }
  return proto.cause();
}

// Returns a policy that puts one user's sessions into a claim.
std::shared_ptr<const Policy> PolicyOfClaim(uint64_t limit) {
  PolicyRule rule;
  rule.label = "team";
  rule.uid = 1002;
  rule.claim = "team";
  rule.claim_limit = limit;
  return std::make_shared<const Policy>(PolicyOptions{.rules = {rule}});
}

}  // namespace

// A client process that leases segments. The client uses no unknown segment.
class SimClient {
 public:
  struct Held {
    uint64_t address = 0;
    uint64_t bytes = 0;
  };

  // A connection of the client.
  class Stream : public SessionEvents {
   public:
    explicit Stream(SimClient* client) : client_(*client) {}
    void CloseSegments(absl::Span<const SegmentId>) override {}
    void LimitChanged(int, uint64_t) override {}
    void Draining(const std::string&) override {}
    void Ended(const std::string&) override {}
    void Ask(uint64_t id, const ClientQuestion& question) override {
      Post([this, id, question] { client_.Answer(id, question); });
    }
    // Queues a message that the client reads later, unless the connection breaks first.
    void Post(std::function<void()> message) {
      if (!broken_) inbox_.push_back(std::move(message));
    }
    bool Read() {
      if (inbox_.empty()) return false;
      const auto message = std::move(inbox_.front());
      inbox_.pop_front();
      message();
      return true;
    }
    size_t Break() {
      broken_ = true;
      const size_t lost = inbox_.size();
      inbox_.clear();
      return lost;
    }
    bool broken() const { return broken_; }

   private:
    SimClient& client_;
    bool broken_ = false;
    std::deque<std::function<void()>> inbox_;
  };

  SimClient(Simulation* simulation, pid_t process, uid_t user)
      : sim(*simulation), pid(process), uid(user), tenant(absl::StrCat("uid:", user)) {}

  void Answer(uint64_t id, const ClientQuestion& question) {
    uint64_t released = 0;
    if (question.kind == ClientQuestion::Kind::kTrim) {
      std::vector<SegmentId> idle;
      for (const auto& [segment, what] : held) {
        if (!busy.contains(segment) && released < question.bytes) {
          idle.push_back(segment);
          released += what.bytes;
        }
      }
      Return(idle);
    }
    Report();
    session->leased()->questions().Receive(id, 0, /*more=*/false, [&](ClientAnswer& answer) {
      answer.released_bytes = released;
      return absl::OkStatus();
    });
  }

  void Report() {
    MemoryStats stats;
    for (const auto& [segment, what] : held) {
      stats.reserved_bytes.all.current += what.bytes;
      if (!busy.contains(segment)) continue;
      stats.allocated_bytes.all.current += what.bytes;
      stats.active_bytes.all.current += what.bytes;
    }
    session->leased()->Report(0, stats);
  }

  void Return(const std::vector<SegmentId>& segments) {
    if (segments.empty()) return;
    for (const SegmentId segment : segments) {
      const Held what = held.at(segment);
      held.erase(segment);
      busy.erase(segment);
      if (!keeps_mappings) mapped.erase(what.address);
      sim.owner_.erase(what.address);
    }
    const absl::Status status = sim.broker_->leases().ReturnSegments(session, 0, segments);
    if (!status.ok() && session->state() != SessionState::kClosed) {
      sim.Fail(absl::StrCat("a client could not return what it holds: ", status.ToString()));
    }
  }

  // Tells the client that the segments belong to the client.
  void Open(const std::vector<vrambroker::Lease>& leases) {
    for (const vrambroker::Lease& lease : leases) {
      const uint64_t address = AddressOf(std::get<CudaIpcHandle>(lease.handle));
      const auto memory = sim.memory_.live.find(address);
      if (memory == sim.memory_.live.end()) return sim.Fail("a leased segment was given back to the driver");
      if (!memory->second.contents.empty() && memory->second.contents != tenant) {
        return sim.Fail(absl::StrCat(tenant, " sees bytes of ", memory->second.contents));
      }
      memory->second.contents = tenant;
      held.emplace(lease.segment, Held{.address = address, .bytes = lease.bytes});
      busy.insert(lease.segment);
      mapped.insert(address);
    }
    Report();
  }

  bool connected() const { return alive && stream != nullptr && !stream->broken(); }

  Simulation& sim;
  const pid_t pid;
  const uid_t uid;
  const std::string tenant;
  SessionPtr session;
  std::shared_ptr<Stream> stream;
  bool alive = true;
  bool keeps_mappings = false;  // keeps mappings of returned segments
  bool silent = false;          // does not read, like a stopped process
  uint64_t limit_changes = 0;
  size_t asking = 0;  // requests without an answer
  std::function<void()> gone;
  absl::btree_map<SegmentId, Held> held;
  std::set<SegmentId> busy;   // segments in `held` that are in use
  std::set<uint64_t> mapped;  // addresses
};

Simulation::Simulation(uint64_t seed)
    : random_(seed), capacity_(2_MiB * (8 + Random(24))), driver_runs_out_(Chance(25)) {
  memory_.allocate_fails = [this]() -> absl::Status {
    if (ending_ || !Chance(4)) return absl::OkStatus();
    ++counts_.driver_failures;
    // The pool would really wait for other threads that give memory back to the driver.
    if (driver_runs_out_ && threads_.running() == 0) return absl::ResourceExhaustedError("the driver has no more");
    return absl::InternalError("the driver failed");
  };
  memory_.holders = [this](uint64_t address) {
    std::vector<pid_t> holders;
    for (const auto& [pid, mapped] : children_) {
      if (std::find(mapped.begin(), mapped.end(), address) != mapped.end()) holders.push_back(pid);
    }
    if (!holders.empty()) ++counts_.quarantines;
    return holders;
  };
  const auto clock = [this] { return now_; };
  pool_ =
      std::make_unique<SegmentPool>(std::make_unique<SimDevice>(&memory_, capacity_), capacity_, &next_segment_,
                                    SegmentPoolOptions{.settle_time = kSettleTime,
                                                       .free_timeout = std::chrono::milliseconds(0),  // no thread waits
                                                       .clock = clock});
  BrokerOptions options;
  options.reclaim_timeout = kReclaimTimeout;
  options.hold_back_time = kHoldBackTime;
  options.clock = clock;
  options.set_timer = [this](SteadyTime time) { timer_ = time; };
  options.watch_process = [this](const UniqueFd&, std::function<void()> gone) -> absl::StatusOr<int> {
    *watched_ = std::move(gone);
    return 1;
  };
  options.unwatch_process = [](int) {};
  options.policy = PolicyOfClaim(capacity_);
  broker_ = std::make_unique<Broker>(std::move(options), std::vector<SegmentPool*>{pool_.get()}, &threads_);
}

Simulation::~Simulation() {
  ending_ = true;
  broker_->CloseAll("the simulation ends");
  while (threads_.size() > 0) threads_.Step(0);
  broker_.reset();
  pool_.reset();
}

void Simulation::Fail(const std::string& what) {
  if (failure_.empty()) failure_ = absl::StrCat("step ", counts_.steps, ": ", what);
}

uint64_t Simulation::RandomBytes() {
  return 2_MiB * (1 + Random(Chance(20) ? capacity_ / 2_MiB : 4));
}

std::string Simulation::Run(int steps) {
  for (int i = 0; i < steps && failure_.empty(); ++i) {
    ++counts_.steps;
    Step();
    CheckSums();
  }
  if (failure_.empty()) {
    Settle();
    CheckSums();
    CheckNobodyIsStuck();
  }
  if (failure_.empty()) EndAll();
  return failure_;
}

void Simulation::Step() {
  std::vector<SimClient*> alive;
  for (const auto& client : clients_) {
    if (client->alive) alive.push_back(client.get());
  }
  const uint64_t dice = Random(100);
  if (!counted_.empty() && Chance(12)) {
    ActCounted(*counted_[Random(counted_.size())]);
  } else if (alive.empty() || (dice < 6 && alive.size() < 6)) {
    Open();
    if (counted_.size() < 4 && Chance(40)) OpenCounted();
  } else if (dice < 40) {
    Act(*alive[Random(alive.size())]);
  } else if (dice < 65 && threads_.size() > 0) {
    threads_.Step(Random(threads_.size()));
  } else if (dice < 85) {
    SimClient& reader = *alive[Random(alive.size())];
    if (reader.connected() && !reader.silent) reader.stream->Read();
  } else if (dice < 88 && !gone_.empty()) {
    ReportGone(*gone_.front());
  } else if (dice < 90 && !children_.empty()) {
    child_domains_.erase(children_.begin()->first);
    children_.erase(children_.begin());
  } else if (dice < 92) {
    threads_.Submit([this] { pool_->ReleaseIdleSince(now_ - std::chrono::milliseconds(300)); });
  } else if (dice < 93 && threads_.size() == 0) {
    broker_->SetPolicy(PolicyOfClaim(2 * RandomBytes()));  // no change is under way
  } else {
    Advance(std::chrono::milliseconds(Chance(20) ? Random(3000) : Random(40)));
  }
}

void Simulation::Open() {
  clients_.push_back(std::make_unique<SimClient>(this, ++next_pid_, static_cast<uid_t>(1000 + Random(3))));
  SimClient& client = *clients_.back();
  client.keeps_mappings = Chance(20);
  client.stream = std::make_shared<SimClient::Stream>(&client);
  watched_ = &client.gone;
  const OpenOptions options{.name = absl::StrCat("c", client.pid),
                            .limit = Chance(50) ? std::optional<Limit>(RandomBytes()) : std::nullopt,
                            .placement = Placement::kLeased};
  const absl::StatusOr<SessionPtr> session = broker_->OpenSession(
      {.pid = client.pid, .uid = client.uid, .pidfd = std::make_shared<UniqueFd>()}, options, client.stream);
  if (!session.ok()) return Fail(session.status().ToString());
  client.session = *session;
  ++counts_.sessions;
  if (Chance(40)) (void)broker_->limits().SetPriority(client.session, static_cast<int>(Random(3)) - 1);
  if (Chance(40)) broker_->limits().SetGuarantee(client.session, Limit(RandomBytes() / 2), [](const absl::Status&) {});
}

void Simulation::Act(SimClient& client) {
  const uint64_t dice = Random(100);
  if (!client.connected()) {
    if (dice < 60) {
      client.stream = std::make_shared<SimClient::Stream>(&client);
      absl::flat_hash_set<SegmentId> held;
      for (const auto& [segment, what] : client.held) held.insert(segment);
      ++client.asking;
      broker_->ResumeSession(
          {.pid = client.pid, .uid = client.uid}, client.session->leased()->resume_token(), held, client.stream,
          [this, &client, stream = client.stream](const absl::StatusOr<SessionPtr>& resumed) {
            --client.asking;
            if (!resumed.ok()) {
              counts_.lost_messages += stream->Break();
              return;
            }
            ++counts_.resumes;
            // Segments missing from `held` do not belong to the client any more.
            std::set<uint64_t> kept;
            for (const auto& [segment, what] : client.held) kept.insert(what.address);
            std::erase_if(owner_,
                          [&](const auto& entry) { return entry.second == &client && !kept.contains(entry.first); });
            if (!client.alive || stream->broken()) broker_->Disconnect(client.session);
          });
      return;
    }
    if (dice < 70) Kill(client);
    return;
  }
  if (dice < 50) {
    Lease(client);
  } else if (dice < 65) {
    for (const auto& [segment, what] : client.held) {  // work ends or begins
      if (Chance(50)) {
        client.busy.erase(segment);
      } else {
        client.busy.insert(segment);
      }
    }
    if (Chance(50)) client.Report();
  } else if (dice < 80) {
    std::vector<SegmentId> segments;
    for (const auto& [segment, what] : client.held) {
      if (!client.busy.contains(segment) && Chance(50)) segments.push_back(segment);
    }
    client.Return(segments);
  } else if (dice < 84) {
    if (broker_->limits().SetLimit(client.session, Limit(RandomBytes())).ok()) ++client.limit_changes;
  } else if (dice < 87) {
    broker_->limits().SetGuarantee(client.session, Limit(RandomBytes() - 2_MiB), [](const absl::Status&) {});
  } else if (dice < 89) {
    (void)broker_->limits().SetPriority(client.session, static_cast<int>(Random(5)) - 2);
  } else if (dice < 91) {
    client.silent = !client.silent;
  } else if (dice < 94) {
    ++counts_.disconnects;
    counts_.lost_messages += client.stream->Break();
    broker_->Disconnect(client.session);
  } else if (dice < 95) {
    (void)broker_->EndSession(client.session, "an operator");
  } else if (dice < 97) {
    // A client says goodbye when no request is under way. The client drops its mappings, unless it lies.
    if (client.asking > 0) return;
    client.alive = false;
    if (!client.keeps_mappings) client.mapped.clear();
    GiveUp(client);
    client.stream->Break();
    broker_->Close(client.session, "goodbye");
    gone_.push_back(&client);
  } else {
    Kill(client);
  }
}

void Simulation::Lease(SimClient& client) {
  auto request =
      std::make_shared<Request>(Request{.client = &client, .began = now_, .limit_changes = client.limit_changes});
  std::vector<uint64_t> sizes(1 + (Chance(20) ? Random(3) : 0));
  for (uint64_t& size : sizes) request->bytes += size = RandomBytes();
  RequestOptions growth{.may_reclaim = Chance(70)};
  if (growth.may_reclaim && Chance(60)) growth.wait = std::chrono::milliseconds(Random(6000));
  request->may_reclaim = growth.may_reclaim;
  ++client.asking;
  broker_->leases().LeaseSegments(
      client.session, 0, sizes,
      [this, request, stream = client.stream](const absl::StatusOr<std::vector<vrambroker::Lease>>& leases) {
        SimClient& asked = *request->client;
        --asked.asking;
        if (!leases.ok()) return Refused(*request, leases.status());
        Leased(*request, leases);
        if (!asked.alive) return;
        if (stream->broken()) {
          ++counts_.lost_messages;
        } else {
          stream->Post([&asked, got = *leases] { asked.Open(got); });
        }
      },
      growth);
  request->at_once = false;
}

void Simulation::TakeOver(SimClient& client, uint64_t address) {
  if (const auto owner = owner_.find(address); owner != owner_.end()) {
    return Fail(absl::StrCat("one segment is leased to ", owner->second->pid, " and to ", client.pid));
  }
  for (const auto& other : clients_) {
    if (other->alive && other->tenant != client.tenant && other->mapped.contains(address)) {
      Fail(absl::StrCat(other->tenant, " can still touch what ", client.tenant, " gets"));
    }
  }
  for (const auto& [pid, mapped] : children_) {
    // Exception within a tenant: the parent may have kept a mapping of a returned segment.
    if (child_domains_[pid] != client.tenant && std::find(mapped.begin(), mapped.end(), address) != mapped.end()) {
      Fail(absl::StrCat("a child of an ended process can still touch what ", client.tenant, " gets"));
    }
  }
  owner_[address] = &client;
}

void Simulation::Leased(const Request& request, const absl::StatusOr<std::vector<vrambroker::Lease>>& leases) {
  SimClient& client = *request.client;
  counts_.leases += leases->size();
  const std::optional<AccountState> account = pool_->GetAccount(client.session->id());
  if (!account.has_value()) return;  // the session was closed at this very moment
  for (const vrambroker::Lease& lease : *leases) {
    TakeOver(client, AddressOf(std::get<CudaIpcHandle>(lease.handle)));
  }
  if (request.limit_changes == client.limit_changes && account->reserved_bytes > account->limit_bytes) {
    Fail(absl::StrCat("a lease passed the limit: ", account->reserved_bytes, " of ", account->limit_bytes));
  }
  if (!request.at_once && now_ > request.began) ++counts_.waited;
}

void Simulation::Refused(const Request& request, const absl::Status& status) {
  ++counts_.refusals;
  if (driver_runs_out_ || CauseOf(status) != v1::OutOfMemory::CAUSE_CAPACITY) return;
  const AccountState account = pool_->GetAccount(request.client->session->id()).value_or(AccountState());
  if (account.reserved_bytes + request.bytes <= account.guarantee_bytes) {
    Fail(absl::StrCat("a promise was broken: ", request.bytes, " refused with ", account.reserved_bytes, " of ",
                      account.guarantee_bytes, " guaranteed bytes: ", std::string(status.message())));
  }
  if (request.may_reclaim && now_ < request.began + kReclaimTimeout &&
      pool_->IsHeldBack(request.client->session->id(), request.bytes)) {
    Fail("a request was refused although it is only held back");
  }
}

void Simulation::GiveUp(const SimClient& client) {
  std::erase_if(owner_, [&](const auto& entry) { return entry.second == &client; });
}

void Simulation::Kill(SimClient& client) {
  ++counts_.kills;
  client.alive = false;
  counts_.lost_messages += client.stream->Break();
  if (Chance(25)) {  // the process had forked
    const pid_t child = ++next_pid_;
    children_[child] = {client.mapped.begin(), client.mapped.end()};
    child_domains_[child] = client.tenant;
  }
  client.mapped.clear();
  gone_.push_back(&client);
}

void Simulation::ReportGone(SimClient& client) {
  gone_.erase(std::find(gone_.begin(), gone_.end(), &client));
  GiveUp(client);
  client.gone();
}

void Simulation::Advance(std::chrono::nanoseconds by) {
  // Timers fire in time, however far the clock goes.
  const SteadyTime end = now_ + by;
  threads_.RunFirst();
  for (int fired = 0; timer_.has_value() && *timer_ <= end && failure_.empty(); ++fired) {
    if (fired > 10000) return Fail("the timer is set for now again and again");
    now_ = std::max(now_, *timer_);
    FireTimer();
    threads_.RunFirst();
    CheckHeldBack();
  }
  now_ = std::max(now_, end);
  if (now_ >= next_health_) {  // checks health periodically, like the daemon
    next_health_ = now_ + std::chrono::seconds(2);
    if (!pool_->UpdateHealth().ok()) Fail("the device is not healthy");
  }
  CheckWaiting();
  CheckHeldBack();
}

void Simulation::FireTimer() {
  timer_.reset();
  broker_->OnTimer();
  if (timer_.has_value() && *timer_ <= now_)
    now_ += std::chrono::microseconds(100);  // the kernel's timer takes at least some time
}

void Simulation::Settle() {
  for (bool active = true; active && failure_.empty();) {
    active = threads_.size() > 0;
    if (active) threads_.Step(Random(threads_.size()));
    for (const auto& client : clients_) {
      if (client->connected() && !client->silent && client->stream->Read()) active = true;
    }
    CheckSums();
  }
}

void Simulation::CheckSums() {
  const PoolStats stats = pool_->GetStats();
  uint64_t reserved = 0;
  uint64_t committed = 0;
  uint64_t guaranteed = 0;
  for (const SessionView& info : broker_->operator_view().Look().sessions) {
    const AccountState& account = info.devices[0].account;
    reserved += account.reserved_bytes;
    committed += account.committed_bytes();
    guaranteed += account.guarantee_bytes;
    if (account.guarantee_bytes > account.limit_bytes) Fail("a guarantee is above its limit");
    CheckClaim(account);
  }
  // Bytes that the driver refused are promised to no session.
  const uint64_t in_all = stats.charged_bytes - stats.outside_bytes;
  const uint64_t of_nobody = in_all - reserved;
  if (in_all < reserved || of_nobody < stats.quarantined_bytes) {
    Fail("more is reserved and quarantined than charged");
  }
  const uint64_t promised = stats.committed_bytes - stats.outside_bytes;
  if (promised != committed + of_nobody) Fail("the committed bytes do not add up");
  if (stats.guaranteed_bytes != guaranteed) Fail("the guarantees do not add up");
  if (promised > capacity_) Fail("more is promised than there is");
  if (threads_.size() == 0 && of_nobody != stats.quarantined_bytes) Fail("bytes are charged to nobody");
  uint64_t charged = 0;  // charges for memory that clients got from the driver themselves
  for (const SessionPtr& session : broker_->sessions().GetAll()) {
    if (session->counted() != nullptr) charged += session->GetMemoryStats(0).reserved_bytes.all.current;
  }
  if (threads_.size() == 0 && stats.reserved_bytes != memory_.live_bytes + charged) {
    Fail(absl::StrCat("the pool counts ", stats.reserved_bytes, " bytes of the driver's, which gave ",
                      memory_.live_bytes, ", and clients are charged ", charged));
  }
  CheckCounted();
  if (!memory_.misuse.empty()) Fail(memory_.misuse);
  for (const auto& client : clients_) {
    if (!client->alive) continue;
    for (const auto& [segment, what] : client->held) {
      const auto live = memory_.live.find(what.address);
      if (live == memory_.live.end()) return Fail("a client's segment was given back to the driver");
      if (live->second.contents != client->tenant) return Fail("a client's bytes were changed");
    }
  }
}

void Simulation::CheckClaim(const AccountState& account) {
  const ClaimId* const claim = std::get_if<ClaimId>(&account.share);
  if (claim == nullptr) return;
  const ClaimBytes now{.charged = pool_->GetShare(*claim).charged_bytes, .limit = account.share_limit_bytes};
  const ClaimBytes before = std::exchange(claims_[*claim], now);
  if (now.charged > before.charged && now.charged > std::max(before.limit, now.limit)) {
    Fail(absl::StrCat("a claim passed its limit: ", now.charged, " of ", now.limit));
  }
}

void Simulation::CheckWaiting() {
  for (const WaitingRequest& waiting : broker_->waiting().GetWaiting(0)) {
    if (now_ > std::max(waiting.deadline, waiting.since + kReclaimTimeout) + kTimerSlack) {
      Fail("a request waits beyond its time");
    }
  }
}

// Checks that no request is held back for longer than the bound.
void Simulation::CheckHeldBack() {
  std::map<HeldBackKey, SteadyTime> held_back;
  for (const WaitingRequest& waiting : broker_->waiting().GetWaiting(0)) {
    if (waiting.guarantee || !pool_->IsHeldBack(waiting.session, waiting.bytes)) continue;
    const HeldBackKey key(waiting.session, waiting.since, waiting.bytes);
    const auto before = held_back_.find(key);
    const SteadyTime since = held_back[key] = before == held_back_.end() ? now_ : before->second;
    counts_.longest_held_back = std::max(counts_.longest_held_back, std::chrono::nanoseconds(now_ - since));
    if (now_ > since + kHoldBackTime + kTimerSlack) Fail("a request was held back for longer than the bound");
  }
  held_back_.swap(held_back);
}

void Simulation::CheckNobodyIsStuck() {
  if (!failure_.empty()) return;
  const std::vector<WaitingRequest> waiting = broker_->waiting().GetWaiting(0);
  if (waiting.empty() || waiting[0].guarantee) return;
  pool_->HoldBack(std::nullopt);  // ends the hold: held-back memory counts as available
  if (pool_->AvailableBytes(waiting[0].session) >= waiting[0].bytes) {
    Fail(absl::StrCat("the first request waits for ", waiting[0].bytes, " bytes, which are there"));
  }
}

void Simulation::EndAll() {
  ending_ = true;
  for (const auto& client : clients_) {
    if (client->alive) Kill(*client);
  }
  for (const auto& program : counted_) KillCounted(*program);
  while (!gone_.empty()) ReportGone(*gone_.front());
  children_.clear();
  for (int i = 0; i < 20; ++i) {
    Settle();
    Advance(std::chrono::seconds(1));
  }
  Settle();
  const PoolStats stats = pool_->GetStats();
  if (stats.charged_bytes != 0 || stats.committed_bytes != 0 || stats.quarantined_bytes != 0) {
    Fail(absl::StrCat("everybody is gone, and ", stats.charged_bytes, " bytes are charged, ", stats.committed_bytes,
                      " committed, ", stats.quarantined_bytes, " quarantined"));
  }
  if (stats.idle_bytes != memory_.live_bytes) Fail("everybody is gone, and not all memory is idle");
  for (const auto& client : clients_) {
    if (client->asking > 0) Fail("a request was never answered");
  }
  for (const auto& program : counted_) {
    if (program->asking > 0) Fail("a charge was never answered");
  }
  threads_.Submit([this] { pool_->ReleaseIdleSince(now_); });
  Settle();
  if (memory_.live_bytes != 0) Fail(absl::StrCat(memory_.live_bytes, " bytes are lost"));
}

}  // namespace vrambroker::fault
