// SPDX-License-Identifier: Apache-2.0
//
// Fair sharing of scarce places between users.
#ifndef VRAMBROKER_SERVER_BASE_FAIR_SHARE_H_
#define VRAMBROKER_SERVER_BASE_FAIR_SHARE_H_

#include <cstddef>

#include "server/base/saturating.h"

namespace vrambroker {

// True if a user with `of_user` of the `of_all` taken places may take another: while he has fewer than half as many as
// are free. So a user alone gets a third of all places, and each further user leaves two thirds of the places he
// found free. (After the dynamic thresholds of Choudhury and Hahne, IEEE/ACM Transactions on Networking 6, 1998.)
inline bool MayTakeAnother(size_t of_user, size_t of_all, size_t places) {
  return of_user < (SaturatingSub(places, of_all) + 1) / 2;
}

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_FAIR_SHARE_H_
