// SPDX-License-Identifier: Apache-2.0
//
// How users share places of which there are few.
#ifndef VRAMBROKER_SERVER_BASE_FAIR_SHARE_H_
#define VRAMBROKER_SERVER_BASE_FAIR_SHARE_H_

#include <cstddef>

#include "server/base/saturating.h"

namespace vrambroker {

// Whether a user who has `of_user` of the `of_all` places that are taken may have another one: while he has fewer than
// half as many as are free. So one user alone gets a third of all, and each further one leaves two thirds of what he
// found. (After the dynamic thresholds of Choudhury and Hahne, IEEE/ACM Transactions on Networking 6, 1998.)
inline bool MayTakeAnother(size_t of_user, size_t of_all, size_t places) {
  return of_user < (SaturatingSub(places, of_all) + 1) / 2;
}

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_FAIR_SHARE_H_
