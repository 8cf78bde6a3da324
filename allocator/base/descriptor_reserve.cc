// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/descriptor_reserve.h"

#include <sys/resource.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

absl::Status TooFew() {
  return absl::FailedPreconditionError(absl::StrCat("file descriptors: the daemon has too few of its ",
                                                    DescriptorLimit(),
                                                    " left; raise LimitNOFILE of its unit, or ulimit -n"));
}

}  // namespace

size_t DescriptorLimit() {
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return 1024;
  return static_cast<size_t>(files.rlim_cur);
}

absl::Status CheckNotReserved(int fd) {
  const size_t limit = DescriptorLimit();
  return static_cast<size_t>(fd) < limit - limit / 8 ? absl::OkStatus() : TooFew();
}

absl::Status DescriptorError(int error, const char* what) {
  if (error == EMFILE) return TooFew();
  if (error == ENFILE) {
    return absl::FailedPreconditionError(
        absl::StrCat("file descriptors: ", what, " failed: the machine has none left; raise fs.file-max"));
  }
  return absl::ErrnoToStatus(error, absl::StrCat(what, " failed"));
}

}  // namespace vrambroker
