// SPDX-License-Identifier: Apache-2.0
//
// Relay: carries the bytes of a connection between client and gRPC, and shows the frames to its owner. gRPC's own
// transport can neither report a client's actions, nor be kept from accepting bytes. Adds a header to each call to name
// its connection.
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

// A side that does not read holds up the opposite side: at most kPieceBytes wait here in each direction, plus the added
// headers of the calls begun by those bytes. For use on the loop's thread.
class Relay {
 public:
  static constexpr size_t kPieceBytes = 16 << 10;

  class Owner {
   public:
    virtual ~Owner() = default;
    // An error ends the relay. gRPC then gets neither the frame nor the bytes read along with it.
    virtual absl::Status OnClientFrame(const Http2Frame& frame) = 0;
    virtual absl::Status OnServerFrame(const Http2Frame& frame) = 0;
    // Opens gRPC's end once the client has sent data. Unavailable: not yet, and the owner calls Open() later.
    virtual absl::StatusOr<UniqueFd> OpenServer() = 0;
    // Last call of the relay. Either a side has closed the connection, and the opposite side has received all bytes
    // sent before; or a call above has failed. The owner may destroy the relay.
    virtual void OnEnd(const absl::Status& why) = 0;
  };

  // Loop and owner outlive this object. `header`: an Http2Header() for each call of the client.
  Relay(EventLoop* loop, ClientSocket client, std::string header, Owner* owner);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  absl::Status Start();
  void Open() { Run(client_, &Relay::TryOpen); }
  // Ends the client's side for every process holding its socket. Bytes sent before still arrive.
  void HangUp();

 private:
  struct Side {
    explicit Side(Http2Frames::From from, std::string header = "") : frames(from, std::move(header)) {}

    std::shared_ptr<const UniqueFd> fd;  // null: gRPC's end, not open yet
    Http2Frames frames;                  // of bytes from this side
    std::string pending;                 // to be written to this side
    bool watched = false;
    uint32_t events = 0;   // watched events
    bool hung_up = false;  // the peer closed while this side was not read: bytes may be left to read
    bool ended = false;    // no more bytes come from or go to this side
  };
  using Step = absl::Status (Relay::*)(Side&);

  // Calls `step`, does all further work possible now, and calls OnEnd() when the relay is done.
  void Run(Side& side, Step step);
  // Steps. Errors end the relay.
  absl::Status OnReady(Side& side);
  absl::Status TryOpen(Side& client);
  // Reads a piece and passes the bytes on.
  absl::Status Carry(Side& from);

  bool MayRead(const Side& from) const;
  absl::Status Write(Side& to, absl::string_view bytes);
  bool IsDone() const;
  // Watches for the events possible next.
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
