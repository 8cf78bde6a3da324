// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_server.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <chrono>
#include <limits>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/mutex.h"
#include "server/base/http_address.h"
#include "server/base/log_line.h"
#include "server/base/peer_queue.h"
#include "server/http/http_message.h"
#include "server/http/page_turns.h"

namespace vrambroker {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;

// Waiting takes no thread, so silent and slow clients get some time. Only pages use threads; costly pages never use all
// threads.
constexpr std::chrono::seconds kRequestTimeout(30);  // for a whole request to arrive
constexpr std::chrono::seconds kSendTimeout(5);      // for the whole answer, and a second for each MiB
constexpr std::chrono::seconds kCloseTimeout(2);     // for a client to close after the answer
constexpr std::chrono::seconds kListenAgain(1);
constexpr std::chrono::milliseconds kAcceptAgain(100);
constexpr size_t kCostlyAtATime = 6;
constexpr size_t kLargeAtATime = 1;
constexpr size_t kThreads = kCostlyAtATime + kLargeAtATime + 2;
constexpr size_t kDiscardBytes = 2048;
constexpr size_t kMaxConnections = 4096;
// Answers are memory, too. kMaxMaking bounds the pages being made or waiting to be made. kMaxSendingBytes bounds the
// answers being sent; each counts as at least a 64th of the bound, for its connection.
constexpr size_t kMaxMaking = 128;
constexpr size_t kMaxSending = 64;
constexpr size_t kMaxSendingBytes = 256 << 20;

size_t ChooseMaxConnections(size_t wanted) {
  if (wanted != 0) return std::max<size_t>(wanted, 8);
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) files.rlim_cur = 1024;
  return std::clamp<size_t>(files.rlim_cur / 8, 8, kMaxConnections);
}

class BeastHttpServer;

// A request and its answer. Runs on the server's thread, except pages.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(BeastHttpServer* server, tcp::socket socket);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void ReadRequest();

 private:
  void OnRequest(const error_code& error);
  // Makes the answer on another thread.
  void Make(const HttpRequest& request, const HttpPage* page, HttpParameters parameters);
  void Refuse(const HttpRequest& request, const HttpResponse& response);
  void Send(std::string answer);
  // Reads until the client closes: closing first could cost a client that sent too much its answer.
  void Linger();
  void Discard();
  void CountTimeout(const error_code& error, HttpDrop reason) const;
  std::function<void()> Dropper();

  BeastHttpServer& server_;
  beast::tcp_stream stream_;
  const std::string peer_;
  beast::flat_buffer buffer_{kMaxHeadBytes + 1};
  http::request_parser<http::empty_body> parser_;
  std::string answer_;
  PeerQueue::EntryId waiting_ = 0;
  PeerQueue::EntryId sending_ = 0;
};

class BeastHttpServer : public HttpServer {
 public:
  BeastHttpServer(const SocketAddress& address, std::vector<HttpPage> pages, HttpServerOptions options)
      : max_connections_(ChooseMaxConnections(options.max_connections)),
        wanted_(address),
        options_(std::move(options)),
        router_(std::move(pages), IsLocalHost(wanted_.host())),
        max_making_(std::min(kMaxMaking, max_connections_ / 4)),
        waiting_(max_connections_ - max_making_ - max_sending(), (max_connections_ - max_making_ - max_sending()) / 2),
        sending_(max_sending() * weight_of_answer_, std::max<size_t>(1, max_sending() / 2) * weight_of_answer_) {}

  ~BeastHttpServer() override {
    io_.stop();
    if (thread_.joinable()) thread_.join();
    pages_.stop();
    pages_.join();  // pages being made still need their data
  }

  absl::Status Start() {
    absl::Status status = Listen();
    if (absl::IsAlreadyExists(status)) {
      LogLine("http port taken")
          .Add("http_address", wanted_.text())
          .Add("why", status.message())
          .Add("do",
               absl::StrCat("memory is served all the same, and the port is tried every second: see who has it by "
                            "'ss -ltnp sport = :",
                            wanted_.port(), "', and stop that, or set another http_address"))
          .Write(spdlog::level::err);
      ListenLater();
    } else if (!status.ok()) {
      return status;
    }
    thread_ = std::thread([this] { io_.run(); });
    return absl::OkStatus();
  }

  bool listening() const override { return listening_; }
  std::string address() const override {
    MutexLock lock(mu_);
    return address_;
  }

  const HttpRouter& router() const { return router_; }
  HttpStats& stats() { return *options_.stats; }
  PeerQueue& waiting() { return waiting_; }
  PeerQueue& sending() { return sending_; }

  // Weight of an answer about to be sent: see kMaxSendingBytes.
  size_t WeightOf(const std::string& answer) const { return std::max(weight_of_answer_, answer.size()); }

  // Runs `work` on a page thread when its turn comes, and `then` with the result on the server's thread; or `refuse` on
  // the server's thread, when too many pages wait.
  void Make(const std::string& peer, PageCost cost, std::function<std::string()> work,
            std::function<void(std::string)> then, const std::function<void()>& refuse) {
    if (cost == PageCost::kCheap) {
      if (!MakeNow(peer, std::move(work), std::move(then))) refuse();
      return;
    }
    PageTurns& turns = cost == PageCost::kLarge ? large_turns_ : costly_turns_;
    const auto make = [this, &turns, peer, work = std::move(work), then = std::move(then), refuse] {
      const bool taken = MakeNow(peer, work, [&turns, peer, then](std::string answer) {
        turns.Done(peer);  // sending takes no turn
        then(std::move(answer));
      });
      if (taken) return;
      refuse();
      turns.Done(peer);
    };
    turns.Add(peer, {.make = make, .refuse = refuse});
  }

 private:
  size_t max_sending() const { return std::min(kMaxSending, max_connections_ / 4); }

  bool MakeNow(const std::string& peer, std::function<std::string()> work, std::function<void(std::string)> then) {
    if (making_ >= max_making_ / 2 || making_of_[peer] >= std::max<size_t>(1, max_making_ / 8)) return false;
    ++making_;
    ++making_of_[peer];
    asio::post(pages_, [this, peer, work = std::move(work), then = std::move(then)]() mutable {
      std::string result = work();
      asio::post(io_, [this, peer, then = std::move(then), result = std::move(result)]() mutable {
        --making_;
        if (--making_of_[peer] == 0) making_of_.erase(peer);
        then(std::move(result));
      });
    });
    return true;
  }

  absl::Status Listen() {
    absl::StatusOr<UniqueFd> socket = ListenHttp(wanted_);
    if (!socket.ok()) {
      ++stats().listen_failures;
      return socket.status();
    }
    {
      MutexLock lock(mu_);
      address_ = absl::StrCat(wanted_.host(), ":", AddressOf(*socket).port());
    }
    acceptor_.assign(wanted_.is_ipv6() ? tcp::v6() : tcp::v4(), socket->Release());
    listening_ = true;
    LogLine("http ready").Add("http", absl::StrCat("http://", address(), "/metrics")).Write(spdlog::level::info);
    Accept();
    return absl::OkStatus();
  }

  void ListenLater() {
    timer_.expires_after(kListenAgain);
    timer_.async_wait([this](const error_code& error) {
      if (error) return;
      if (Listen().ok()) {
        options_.listens();
      } else {
        ListenLater();
      }
    });
  }

  void Accept() {
    acceptor_.async_accept([this](const error_code& error, tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (error) {
        // Out of descriptors, usually. Drops a silent connection first to free its descriptor.
        waiting_.DropOne();
        timer_.expires_after(kAcceptAgain);
        timer_.async_wait([this](const error_code& stopped) {
          if (!stopped) Accept();
        });
        return;
      }
      std::make_shared<Connection>(this, std::move(socket))->ReadRequest();
      Accept();
    });
  }

  const size_t max_connections_;
  const SocketAddress wanted_;
  const HttpServerOptions options_;
  const HttpRouter router_;
  const size_t max_making_;  // half may be in the making, a quarter may wait for each kind of turn
  const size_t weight_of_answer_ = kMaxSendingBytes / kMaxSending;
  // Members below are used on the server's thread, or before it runs.
  PeerQueue waiting_;  // for a request, or for the client to close
  PeerQueue sending_;
  size_t making_ = 0;
  std::map<std::string, size_t> making_of_;  // by peer
  std::atomic<bool> listening_{false};
  mutable Mutex mu_;
  std::string address_ ABSL_GUARDED_BY(mu_) = wanted_.text();
  asio::io_context io_{1};
  tcp::acceptor acceptor_{io_};
  asio::steady_timer timer_{io_};
  asio::thread_pool pages_{kThreads};
  // Destroyed before io_context, because waiting pages hold connections.
  PageTurns costly_turns_{kCostlyAtATime, std::max<size_t>(1, max_making_ / 4)};
  PageTurns large_turns_{kLargeAtATime, std::max<size_t>(1, max_making_ / 4)};
  std::thread thread_;
};

Connection::Connection(BeastHttpServer* server, tcp::socket socket)
    : server_(*server), stream_(std::move(socket)), peer_(HttpPeer(stream_.socket().native_handle())) {
  ++server_.stats().connections;
  fcntl(stream_.socket().native_handle(), F_SETFD, FD_CLOEXEC);
  parser_.header_limit(kMaxHeadBytes);
  parser_.body_limit(std::numeric_limits<uint64_t>::max());  // of any length, because the body is not read
}

Connection::~Connection() {
  server_.waiting().Remove(waiting_);
  server_.sending().Remove(sending_);
  --server_.stats().connections;
}

// Returns the callback for a queue; the connection leaves the queue before its destruction.
std::function<void()> Connection::Dropper() {
  return [this] {
    ++server_.stats().dropped[static_cast<size_t>(HttpDrop::kTooMany)];
    stream_.close();
  };
}

void Connection::CountTimeout(const error_code& error, HttpDrop reason) const {
  if (error == beast::error::timeout) ++server_.stats().dropped[static_cast<size_t>(reason)];
}

void Connection::ReadRequest() {
  waiting_ = server_.waiting().Add(peer_, Dropper());
  stream_.expires_after(kRequestTimeout);
  http::async_read_header(stream_, buffer_, parser_,
                          [self = shared_from_this()](const error_code& error, size_t) { self->OnRequest(error); });
}

void Connection::OnRequest(const error_code& error) {
  server_.waiting().Remove(waiting_);
  CountTimeout(error, HttpDrop::kSlowRequest);
  if (error) {
    if (const std::optional<HttpResponse> response = AnswerTo(error)) Refuse({}, *response);
    return;
  }
  const HttpRequest request = ToRequest(parser_.get());
  HttpRouter::Match match = server_.router().Find(request);
  if (match.page == nullptr) {
    Refuse(request, match.refusal);
  } else {
    Make(request, match.page, std::move(match.parameters));
  }
}

void Connection::Make(const HttpRequest& request, const HttpPage* page, HttpParameters parameters) {
  server_.Make(
      peer_, page->cost,
      [request, page, parameters = std::move(parameters)] { return MakeAnswer(request, *page, parameters); },
      [self = shared_from_this()](std::string answer) { self->Send(std::move(answer)); },
      [self = shared_from_this(), request] { self->Refuse(request, TooManyRequests()); });
}

void Connection::Refuse(const HttpRequest& request, const HttpResponse& response) {
  Send(Serialize(request, response, /*compress=*/false));
}

void Connection::Send(std::string answer) {
  answer_ = std::move(answer);
  sending_ = server_.sending().Add(peer_, Dropper(), server_.WeightOf(answer_));
  stream_.expires_after(kSendTimeout + std::chrono::seconds(answer_.size() >> 20));
  asio::async_write(stream_, asio::buffer(answer_), [self = shared_from_this()](const error_code& error, size_t) {
    self->server_.sending().Remove(self->sending_);
    self->CountTimeout(error, HttpDrop::kSlowReader);
    if (!error) self->Linger();
  });
}

void Connection::Linger() {
  std::string().swap(answer_);
  error_code ignored;
  (void)stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
  waiting_ = server_.waiting().Add(peer_, Dropper());
  stream_.expires_after(kCloseTimeout);
  Discard();
}

void Connection::Discard() {
  buffer_.clear();
  stream_.async_read_some(buffer_.prepare(kDiscardBytes), [self = shared_from_this()](const error_code& error, size_t) {
    if (!error) self->Discard();
  });
}

}  // namespace

const char* HttpDropName(HttpDrop reason) {
  switch (reason) {
    case HttpDrop::kTooMany:
      return "too_many";
    case HttpDrop::kSlowRequest:
      return "slow_request";
    case HttpDrop::kSlowReader:
      return "slow_reader";
  }
  return "unknown";
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& text, std::vector<HttpPage> pages,
                                                              HttpServerOptions options) {
  const absl::StatusOr<HttpAddress> where = ParseHttpAddress(text);
  if (!where.ok()) return where.status();
  const absl::StatusOr<SocketAddress> address = Resolve(*where);
  if (!address.ok()) return address.status();
  auto server = std::make_unique<BeastHttpServer>(*address, std::move(pages), std::move(options));
  if (absl::Status status = server->Start(); !status.ok()) return status;
  return server;
}

}  // namespace vrambroker
