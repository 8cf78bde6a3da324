// SPDX-License-Identifier: Apache-2.0
//
// The web page: the files of server/http/web/, embedded into the daemon at build time (embed.cmake).
#ifndef VRAMBROKER_SERVER_HTTP_WEB_FILES_H_
#define VRAMBROKER_SERVER_HTTP_WEB_FILES_H_

#include <vector>

#include "absl/strings/string_view.h"

namespace vrambroker {

struct WebFile {
  absl::string_view path;  // "/style.css"; the main page is "/"
  absl::string_view content_type;
  absl::string_view content;
};

const std::vector<WebFile>& WebFiles();

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_WEB_FILES_H_
