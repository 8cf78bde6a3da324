// SPDX-License-Identifier: Apache-2.0
//
// Relay: carries the bytes of one connection between its client and gRPC, and shows its owner the frames as they go by.
// gRPC's own transport can neither be asked what a client does, nor be kept from taking it. Each call gets a header
// that says which connection it has come over.
#ifndef VRAMBROKER_SERVER_RPC_RELAY_H_
#define VRAMBROKER_SERVER_RPC_RELAY_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/event_loop.h"
#include "server/identity/client_socket.h"
#include "server/rpc/http2_frames.h"

namespace vrambroker {

// A side that does not take its bytes holds the other one up: at most kPieceBytes wait here in each direction, and the
// headers of the calls that begin in them. For the loop's thread.
class Relay {
 public:
  static constexpr size_t kPieceBytes = 16 << 10;

  class Owner {
   public:
    virtual ~Owner() = default;
    // An error ends the relay. gRPC does not get the frame then, nor what came with it.
    virtual absl::Status OnClientFrame(const Http2Frame& frame) = 0;
    virtual absl::Status OnServerFrame(const Http2Frame& frame) = 0;
    // The client has spoken: gRPC's end of the connection. Unavailable: not yet, and the owner calls Open() once more.
    virtual absl::StatusOr<UniqueFd> OpenServer() = 0;
    // The relay's last call. Either a side has closed the connection, and the other one has all that was sent before;
    // or a call above has failed. The owner may destroy the relay.
    virtual void OnEnd(const absl::Status& why) = 0;
  };

  // Loop and owner outlive this object. `header`: an Http2Header() for each call of the client.
  Relay(EventLoop* loop, ClientSocket client, std::string header, Owner* owner);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  absl::Status Start();
  void Open() { Run(client_, &Relay::TryOpen); }
  // Ends the client's side for every process that has its socket. What was sent before still arrives.
  void HangUp();

 private:
  struct Side {
    explicit Side(Http2Frames::From from, std::string header = "") : frames(from, std::move(header)) {}

    std::shared_ptr<const UniqueFd> fd;  // null: gRPC's end, which is not there yet
    Http2Frames frames;                  // that came from here
    std::string pending;                 // to be written here
    bool watched = false;
    uint32_t events = 0;   // that are watched for
    bool hung_up = false;  // the other end was closed while this one was not read: there may be bytes to read
    bool ended = false;    // nothing comes from here any more, nor is anything written here
  };
  using Step = absl::Status (Relay::*)(Side&);

  // Calls `step`, does what can be done then, and tells the owner when nothing is left to do.
  void Run(Side& side, Step step);
  // Steps. Errors end the relay.
  absl::Status OnReady(Side& side);
  absl::Status TryOpen(Side& client);
  // Reads a piece and passes it on.
  absl::Status Carry(Side& from);

  bool MayRead(const Side& from) const;
  absl::Status Write(Side& to, absl::string_view bytes);
  bool IsDone() const;
  // Waits for what can happen next.
  absl::Status Watch(Side& side);
  void Unwatch(Side& side);
  Side& Other(const Side& side) { return &side == &client_ ? server_ : client_; }
  const Side& Other(const Side& side) const { return &side == &client_ ? server_ : client_; }

  EventLoop& loop_;
  Owner& owner_;
  const ClientSocket client_socket_;
  Side client_;
  Side server_{Http2Frames::From::kServer};
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_RELAY_H_
