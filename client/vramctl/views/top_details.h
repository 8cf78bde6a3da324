// SPDX-License-Identifier: Apache-2.0
//
// TopDetails: the view of a session or claim opened by Enter in vramctl top. Pure: no terminal, no daemon.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_DETAILS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_DETAILS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "allocator/heap/heap_snapshot.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/claim_output.h"
#include "client/vramctl/views/top_scroll.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

// Names the session or claim with open details, for specific questions to the daemon.
struct DetailsRequest {
  uint64_t session = 0;           // 0: a claim
  std::string claim;              // name, for claims
  std::string run_id;             // the daemon's: a later run may assign the id again
  std::vector<uint32_t> devices;  // devices where the session holds memory
  bool operator==(const DetailsRequest&) const = default;
  bool IsOfSame(const DetailsRequest& other) const {
    return session == other.session && claim == other.claim && run_id == other.run_id;
  }
};

// The daemon's answers.
struct DetailsData {
  struct Map {
    uint32_t device = 0;
    absl::StatusOr<HeapSnapshot> heap;
  };
  DetailsRequest request;
  std::vector<Map> maps;                                       // for the request's devices
  absl::StatusOr<std::vector<v1::OutOfMemoryEvent>> refusals;  // newest first
};

class TopDetails {
 public:
  struct Options {
    bool utf8 = false;
    UserNames user_name;
    absl::TimeZone time_zone;
  };
  TopDetails(v1::Session session, Options options);
  TopDetails(v1::Claim claim, Options options);

  // Updates the figures. Keeps the last figures of a session or claim missing in the data.
  void SetData(const v1::ListSessionsResponse& sessions, const v1::ListClaimsResponse& claims, absl::Time now);
  // Ignores data about a different session or claim.
  void SetDetails(DetailsData data);
  bool has_details() const { return details_.has_value(); }

  const v1::Session* session() const { return session_.get(); }  // null: a claim
  std::string claim() const;                                     // printable name of the claim
  bool has_ended() const { return has_ended_; }
  DetailsRequest request() const;

  // False: the key scrolls nothing.
  bool HandleKey(int key) { return scroll_.HandleKey(key); }
  // Returns at most `rows` lines of `columns` cells, without the title.
  std::vector<Line> Lines(int rows, int columns);
  Line Title(int columns) const;
  std::string Place() const { return scroll_.Place(); }  // for the last Lines()

 private:
  std::vector<Line> AllLines(int columns) const;
  void AppendSession(std::vector<Line>& lines, int columns) const;
  void AppendDevice(std::vector<Line>& lines, const v1::SessionDevice& device, int columns) const;
  void AppendMap(std::vector<Line>& lines, uint32_t device, int columns) const;
  void AppendClaim(std::vector<Line>& lines, int columns) const;
  void AppendRefusals(std::vector<Line>& lines, int columns) const;

  const Options options_;
  std::unique_ptr<v1::Session> session_;
  std::unique_ptr<v1::Claim> claim_;  // the claim shown, or the claim of the session
  v1::ListSessionsResponse members_;  // sessions of the claim
  std::string run_id_;                // run of the daemon last listing the session or claim
  absl::Time now_;
  bool has_ended_ = false;
  std::optional<DetailsData> details_;  // nullopt: being read
  Scroll scroll_;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_DETAILS_H_
