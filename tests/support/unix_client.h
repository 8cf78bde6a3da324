// SPDX-License-Identifier: Apache-2.0
//
// Operations of a client on a unix socket, below gRPC.
#ifndef VRAMBROKER_TESTS_SUPPORT_UNIX_CLIENT_H_
#define VRAMBROKER_TESTS_SUPPORT_UNIX_CLIENT_H_

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker::testing_support {

// Returns an invalid descriptor when no program listens; errno gives the reason.
inline UniqueFd ConnectUnix(const std::string& path, int type) {
  sockaddr_un address = {.sun_family = AF_UNIX};
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof address.sun_path - 1));
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  const bool connected =
      fd.valid() && connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  return connected ? std::move(fd) : UniqueFd();
}

// Tells whether a program can ask the kernel to refuse descriptors (Linux 6.16).
inline bool KernelRefusesDescriptors(int socket) {
  constexpr int kPassRights = 83;  // SO_PASSRIGHTS
  int passed = 0;
  socklen_t size = sizeof passed;
  return getsockopt(socket, SOL_SOCKET, kPassRights, &passed, &size) == 0;
}

// Works like send(), and adds a descriptor.
inline ssize_t SendWithDescriptor(int socket, absl::string_view bytes, int descriptor, int flags = 0) {
  iovec data = {.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  *header = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  return sendmsg(socket, &message, flags | MSG_NOSIGNAL);
}

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_UNIX_CLIENT_H_
