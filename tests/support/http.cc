// SPDX-License-Identifier: Apache-2.0
#include "tests/support/http.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "allocator/base/unique_fd.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {

absl::StatusOr<HttpAnswer> HttpGet(int port, const std::string& path) {
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot connect to port ", port));
  }
  const timeval timeout = absl::ToTimeval(kPatience);
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
  if (send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size())) {
    return absl::ErrnoToStatus(errno, "send failed");
  }
  std::string text;
  std::array<char, 1 << 14> buffer;
  ssize_t size;
  while ((size = recv(fd.get(), buffer.data(), buffer.size(), 0)) > 0) {
    text.append(buffer.data(), static_cast<size_t>(size));
  }
  if (size < 0) return absl::ErrnoToStatus(errno, "recv failed");
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits("\r\n\r\n", 1));
  HttpAnswer answer{.headers = parts.first, .body = parts.second};
  const std::vector<std::string> words = absl::StrSplit(parts.first.substr(0, parts.first.find('\r')), ' ');
  if (words.size() < 2 || !absl::SimpleAtoi(words[1], &answer.code)) {
    return absl::InternalError(absl::StrCat("not an HTTP answer: '", text, "'"));
  }
  return answer;
}

// Names in the tests contain no escapes, commas or braces.
MetricsPage::MetricsPage(const std::string& text) {
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    if (line[0] == '#') continue;
    Sample sample;
    const size_t space = line.rfind(' ');
    const absl::string_view series = line.substr(0, space);
    if (!absl::SimpleAtod(line.substr(space + 1), &sample.value)) continue;
    const size_t brace = series.find('{');
    sample.name = std::string(series.substr(0, brace));
    if (brace != absl::string_view::npos) {
      const absl::string_view labels = series.substr(brace + 1, series.size() - brace - 2);
      for (const absl::string_view label : absl::StrSplit(labels, ',', absl::SkipEmpty())) {
        const size_t equals = label.find('=');
        sample.labels[std::string(label.substr(0, equals))] =
            std::string(label.substr(equals + 2, label.size() - equals - 3));
      }
    }
    samples_.push_back(std::move(sample));
  }
}

std::vector<const MetricsPage::Sample*> MetricsPage::Find(const std::string& name, const Labels& labels) const {
  std::vector<const Sample*> found;
  for (const Sample& sample : samples_) {
    if (sample.name == name &&
        std::includes(sample.labels.begin(), sample.labels.end(), labels.begin(), labels.end())) {
      found.push_back(&sample);
    }
  }
  return found;
}

std::optional<double> MetricsPage::Value(const std::string& name, const Labels& labels) const {
  const std::vector<const Sample*> found = Find(name, labels);
  if (found.size() != 1) return std::nullopt;
  return found.front()->value;
}

double MetricsPage::Sum(const std::string& name, const Labels& labels) const {
  double sum = 0;
  for (const Sample* sample : Find(name, labels)) sum += sample->value;
  return sum;
}

size_t MetricsPage::Count(const std::string& name, const Labels& labels) const {
  return Find(name, labels).size();
}

}  // namespace vrambroker::testing_support
