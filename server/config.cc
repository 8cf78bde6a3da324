// SPDX-License-Identifier: Apache-2.0
#include "server/config.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/bytes.h"
#include "allocator/size_class.h"
#include "server/http_server.h"

namespace vrambroker {
namespace {

class ErrorList : public google::protobuf::io::ErrorCollector {
 public:
  explicit ErrorList(absl::string_view name) : name_(name) {}
  void AddError(int line, google::protobuf::io::ColumnNumber column, const std::string& message) override {
    errors_.push_back(absl::StrCat(name_, ":", line + 1, ":", column + 1, ": ", message));
  }
  const std::vector<std::string>& errors() const { return errors_; }

 private:
  const std::string name_;
  std::vector<std::string> errors_;
};

// Collects what is wrong, so that all of it can be told at once.
class Checker {
 public:
  explicit Checker(const absl::flat_hash_map<std::string, std::string>& places) : places_(places) {}

  void Fault(absl::string_view field, absl::string_view what) {
    const auto place = places_.find(field);
    faults_.push_back(
        absl::StrCat("  ", place == places_.end() ? "" : absl::StrCat(place->second, ": "), field, ": ", what));
  }

  uint64_t Size(absl::string_view field, const std::string& text, uint64_t fallback) {
    if (text.empty()) return fallback;
    absl::StatusOr<uint64_t> bytes = ParseBytes(text);
    if (!bytes.ok()) {
      Fault(field, bytes.status().message());
      return fallback;
    }
    return *bytes;
  }

  absl::Duration Time(absl::string_view field, const std::string& text, absl::Duration fallback) {
    if (text.empty()) return fallback;
    absl::Duration duration;
    if (!absl::ParseDuration(text, &duration) || duration < absl::ZeroDuration() || duration > absl::Hours(24)) {
      Fault(field, absl::StrCat("'", text, "' is not a duration from 0 to 24h; write it as 10s, 500ms or 2m"));
      return fallback;
    }
    return duration;
  }

  absl::Status status() const {
    if (faults_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(faults_.size(), faults_.size() == 1 ? " fault" : " faults",
                                                   " in the configuration:\n", absl::StrJoin(faults_, "\n")));
  }

 private:
  const absl::flat_hash_map<std::string, std::string>& places_;
  std::vector<std::string> faults_;
};

void NotePlaces(absl::string_view name, const google::protobuf::Descriptor& message,
                const google::protobuf::TextFormat::ParseInfoTree& tree, const std::string& prefix,
                absl::flat_hash_map<std::string, std::string>& places) {
  for (int i = 0; i < message.field_count(); ++i) {
    const google::protobuf::FieldDescriptor* field = message.field(i);
    const std::string field_name = absl::StrCat(prefix, field->name());
    const auto location = tree.GetLocation(field, -1);
    if (location.line < 0) continue;
    places[field_name] = absl::StrCat(name, ":", location.line + 1, ":", location.column + 1);
    if (field->message_type() == nullptr) continue;
    if (const auto* nested = tree.GetTreeForNested(field, -1); nested != nullptr) {
      NotePlaces(name, *field->message_type(), *nested, field_name + ".", places);
    }
  }
}

std::string Or(const std::string& value, const char* fallback) {
  return value.empty() ? fallback : value;
}

}  // namespace

absl::StatusOr<ConfigText> ParseConfigText(absl::string_view name, const std::string& text) {
  ConfigText config;
  ErrorList errors(name);
  google::protobuf::TextFormat::ParseInfoTree tree;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  parser.WriteLocationsTo(&tree);
  if (!parser.ParseFromString(text, &config.proto)) {
    return absl::InvalidArgumentError(absl::StrJoin(errors.errors(), "\n"));
  }
  NotePlaces(name, *config.proto.GetDescriptor(), tree, "", config.places);
  return config;
}

absl::StatusOr<ConfigText> ReadConfigFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (errno != 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read the configuration file ", path));
  return ParseConfigText(path, text.str());
}

absl::StatusOr<Config> CheckConfig(const ConfigText& text) {
  const config::v1::DaemonConfig& proto = text.proto;
  Checker check(text.places);
  Config config;
  config.socket_dir = Or(proto.socket_dir(), "/run/vrambroker");

  const std::string mode = Or(proto.socket_mode(), "0660");
  unsigned int bits = 0;
  if (mode.size() > 4 || std::sscanf(mode.c_str(), "%o", &bits) != 1 ||
      mode.find_first_not_of("01234567") != std::string::npos || bits > 0777) {
    check.Fault("socket_mode", absl::StrCat("'", mode, "' is not an octal mode like 0660"));
  }
  config.socket_mode = bits;

  const std::string device = Or(proto.device(), "auto");
  if (device == "auto") {
    config.device = DeviceChoice::kAuto;
  } else if (device == "cuda") {
    config.device = DeviceChoice::kCuda;
  } else if (device == "host") {
    config.device = DeviceChoice::kHost;
  } else {
    check.Fault("device", absl::StrCat("'", device, "' is not auto, cuda or host"));
  }

  if (!proto.capacity().empty()) {
    const uint64_t capacity = check.Size("capacity", proto.capacity(), kSegmentGranuleBytes);
    if (capacity < kSegmentGranuleBytes || capacity >= kMaxRequestBytes) {
      check.Fault("capacity", absl::StrCat("'", proto.capacity(), "' is not within 2MiB and 1048575TiB"));
    }
    config.capacity_bytes = capacity;
  }
  config.headroom_bytes = check.Size("headroom", proto.headroom(), 1_GiB);

  config.host_devices = proto.host_devices() == 0 ? 1 : static_cast<int>(proto.host_devices());
  if (proto.host_devices() > 16) check.Fault("host_devices", absl::StrCat(proto.host_devices(), " is above 16"));

  const std::string http = Or(proto.http_address(), "127.0.0.1:9477");
  config.http_address = http == "off" ? "" : http;
  if (!config.http_address.empty()) {
    if (const auto address = ParseHttpAddress(http); !address.ok())
      check.Fault("http_address", address.status().message());
  }

  config.session_limit = 1.0;
  switch (proto.session_limit().limit_case()) {
    case config::v1::SessionLimit::kBytes:
      config.session_limit = check.Size("session_limit.bytes", Or(proto.session_limit().bytes(), "?"), 0);
      break;
    case config::v1::SessionLimit::kFraction:
      config.session_limit = proto.session_limit().fraction();
      if (!(proto.session_limit().fraction() > 0 && proto.session_limit().fraction() <= 1)) {
        check.Fault("session_limit.fraction",
                    absl::StrCat(proto.session_limit().fraction(), " is not above 0 and up to 1"));
      }
      break;
    case config::v1::SessionLimit::LIMIT_NOT_SET:
      if (proto.has_session_limit()) check.Fault("session_limit", "neither bytes nor fraction is given");
      break;
  }

  config.idle_decay = check.Time("idle_decay", proto.idle_decay(), absl::Seconds(10));
  config.drain_timeout = check.Time("drain_timeout", proto.drain_timeout(), absl::Seconds(5));
  config.max_sessions_per_uid = proto.max_sessions_per_uid() == 0 ? 1024 : proto.max_sessions_per_uid();
  config.max_blocks_per_session = proto.max_blocks_per_session() == 0 ? 1 << 20 : proto.max_blocks_per_session();

  config.log_level = Or(proto.log_level(), "info");
  if (config.log_level != "debug" && config.log_level != "info" && config.log_level != "warn" &&
      config.log_level != "error") {
    check.Fault("log_level", absl::StrCat("'", config.log_level, "' is not debug, info, warn or error"));
  }
  if (absl::StatusOr<AllocConf> conf = ParseAllocConf(proto.alloc_conf()); conf.ok()) {
    config.alloc_conf = *std::move(conf);
  } else {
    check.Fault("alloc_conf", conf.status().message());
  }
  config.record_events = proto.record_events();
  if (proto.record_events() > kMaxRecordedEvents) {
    check.Fault("record_events", absl::StrCat(proto.record_events(), " is above ", kMaxRecordedEvents));
  }
  if (absl::Status status = check.status(); !status.ok()) return status;
  return config;
}

}  // namespace vrambroker
