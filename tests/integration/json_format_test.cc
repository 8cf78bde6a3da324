// SPDX-License-Identifier: Apache-2.0
//
// Scripts rely on client/JSON.md: vramctl prints every field that the file names, of the named type, and no other
// field.
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"
#include "tests/support/any_library.h"
#include "tests/support/client_process.h"
#include "tests/support/paths.h"
#include "tests/support/status_macros.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using Json = nlohmann::json;

// Tells whether a value is of a type in the notation of the column `type`: "integer, bytes", "array of
// [device](#device)".
bool IsOfType(const Json& value, absl::string_view type) {
  if (absl::ConsumePrefix(&type, "array of ")) {
    if (!value.is_array()) return false;
    for (const Json& element : value) {
      if (!IsOfType(element, type)) return false;
    }
    return true;
  }
  if (value.is_null()) return absl::EndsWith(type, "or null");
  if (absl::StartsWith(type, "integer")) return value.is_number_integer();
  if (absl::StartsWith(type, "number")) return value.is_number();
  if (absl::StartsWith(type, "string")) return value.is_string();
  if (absl::StartsWith(type, "boolean")) return value.is_boolean();
  return value.is_object() && (absl::StartsWith(type, "object") || absl::StartsWith(type, "["));
}

// Returns the heading of the section that a type links to; empty if the type has no link.
std::string LinkedHeading(const std::string& type) {
  const size_t link = type.find("](#");
  if (link == std::string::npos) return "";
  const size_t start = link + 3;
  return absl::StrReplaceAll(type.substr(start, type.find(')', start) - start), {{"-", " "}});
}

class JsonFormatTest : public VramctlDaemonTest {
 protected:
  struct Field {
    std::string type;
    bool occurs = false;
  };

  void SetUp() override {
    std::ifstream document(absl::StrCat(paths::kSourceDir, "/client/JSON.md"));
    std::string heading;
    bool in_table = false;
    for (std::string line; std::getline(document, line);) {
      if (absl::StartsWith(line, "#")) {
        heading = line.substr(line.find_first_not_of("# "));
        for (const absl::string_view name : absl::StrSplit(heading, ", ")) headings_.emplace(name);
      }
      in_table = line == "| field | type | meaning |" || (in_table && absl::StartsWith(line, "|"));
      if (in_table && absl::StartsWith(line, "| `")) ReadRow(heading, line);
    }
    ASSERT_FALSE(fields_.empty()) << "no tables in client/JSON.md";
  }

  // Reads a row, such as "| `devices[].name` | string | for people |".
  void ReadRow(const std::string& heading, const std::string& row) {
    const std::vector<std::string> cells = absl::StrSplit(row, '|');
    ASSERT_EQ(cells.size(), 5u) << row;
    const std::string path = absl::StrReplaceAll(cells[1], {{"`", ""}, {" ", ""}});
    const std::string type(absl::StripAsciiWhitespace(cells[2]));
    for (const char* pool : {"all", "small_pool", "large_pool"}) {
      for (const char* figure : {"current", "peak", "allocated", "freed"}) {
        fields_[heading][absl::StrReplaceAll(path, {{"POOL", pool}, {"FIGURE", figure}})].type = type;
      }
    }
  }

  // Checks that the tables of this section, or of sections linked there, name every field of `object`, including nested
  // fields.
  void Check(const std::string& heading, const Json& object, const std::string& prefix = "") {
    ASSERT_TRUE(object.is_object()) << "section " << heading << ": " << object;
    std::map<std::string, Field>& section = fields_[heading];
    for (const auto& [key, value] : object.items()) {
      const std::string path = absl::StrCat(prefix, key);
      const auto field = section.find(path);
      if (field == section.end()) {
        ADD_FAILURE() << "client/JSON.md, section " << heading << ", does not name `" << path << "`";
        continue;
      }
      field->second.occurs = true;
      const std::string& type = field->second.type;
      EXPECT_TRUE(IsOfType(value, type)) << heading << ": `" << path << "` is no " << type << ": " << value;
      const std::string linked = LinkedHeading(type);
      for (const Json& inner : value.is_array() ? value : Json::array({value})) {
        if (!inner.is_object()) continue;
        if (linked.empty()) {
          Check(heading, inner, absl::StrCat(path, value.is_array() ? "[]." : "."));
        } else {
          Check(linked, inner);
        }
      }
    }
  }

  void CheckCommand(const std::string& heading, const Arguments& arguments) {
    SCOPED_TRACE(::testing::PrintToString(arguments));
    Check(heading, CtlJson(arguments));
  }

  void CheckRefusal(Arguments arguments) {
    SCOPED_TRACE(::testing::PrintToString(arguments));
    arguments.push_back("--format=json");
    const RunResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(result.out, "");
    Check("errors", Json::parse(result.err, nullptr, /*allow_exceptions=*/false));
  }

  std::map<std::string, std::map<std::string, Field>> fields_;  // fields by heading and path
  std::set<std::string> headings_;
};

TEST_F(JsonFormatTest, EveryCommandHasItsSection) {
  const RunResult commands = RunProgram({VramctlProgram(), "__complete", ""});
  ASSERT_EQ(commands.exit_code, 0) << commands.err;
  for (const absl::string_view name : absl::StrSplit(commands.out, '\n', absl::SkipEmpty())) {
    if (name == "top" || name == "help" || name == "version") continue;  // commands without JSON
    if (name == "policy" || name == "plan") continue;                    // commands with subcommands
    EXPECT_TRUE(headings_.contains(std::string(name))) << name;
  }
  for (const char* name : {"policy explain", "plan train", "plan serve", "plan share"}) {
    EXPECT_TRUE(headings_.contains(name)) << name;
  }
}

// Memory that a process leaves behind stays in quarantine.
constexpr char kConfig[] = R"(
  settle_time: "1h"
  rules { name: "training" session_name: "train-*" limit { fraction: 0.5 } }
)";

TEST_F(JsonFormatTest, IsAsDocumented) {
  ASSERT_OK(StartDaemon({.capacity = "256MiB", .config = kConfig}));

  // An emptied cache would have prevented the refusal: see diagnose_test.cc in tests/unit.
  {
    ASSERT_OK_AND_ASSIGN(Client job, Connect("job", Limit(200_MiB)));
    const MemoryScope scope("forward");
    std::vector<Buffer> kept;
    for (const uint64_t bytes : {60_MiB, 50_MiB}) {
      std::vector<Buffer> phase;
      for (int i = 0; i < 3; ++i) {
        ASSERT_OK_AND_ASSIGN(phase.emplace_back(), job.Allocate(bytes));
        if (bytes == 60_MiB) continue;
        ASSERT_OK_AND_ASSIGN(kept.emplace_back(), job.Allocate(10_MiB));
      }
    }
    EXPECT_FALSE(job.Allocate(150_MiB).ok());
    CheckCommand("diagnose", {"diagnose", "job", "--for=torch-2.6"});
    CheckCommand("map", {"map", "job"});
  }

  // The daemon knows a remote session's figures at once.
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ClientProcess::Start(dir()));
  ASSERT_OK(holder.Call("connect holder - remote"));
  CheckCommand("record", {"record", "holder", "100"});
  ASSERT_OK(holder.Call(absl::StrCat("alloc ", 5_MiB)));  // part of a segment of 20 MiB
  ASSERT_OK(holder.Call(absl::StrCat("alloc ", 80_MiB)));
  CheckCommand("status", {"status"});
  CheckCommand("sessions", {"sessions"});
  CheckCommand("watch", {"watch", "--count=1"});
  CheckCommand("map", {"map"});
  CheckCommand("stats", {"stats"});
  CheckCommand("stats", {"stats", "holder"});
  for (const Arguments& arguments : std::vector<Arguments>{{"summary", "holder"},
                                                           {"limit", "holder", "0.9"},
                                                           {"guarantee", "holder", "16MiB"},
                                                           {"priority", "holder", "3"}}) {
    CheckCommand("session", arguments);
  }
  Check("claim", CtlJson({"claim", "create", "jobs", "--limit=64MiB"}));
  Check("claim", CtlJson({"claim", "set", "jobs", "--limit=32MiB"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess job, ClientProcess::Connect(dir() + "/claims/jobs", "job"));
  const RunResult run =
      RunProgram({VramctlProgram(), "run", "--report", "--format=json", "--socket-dir=" + dir(), "--", "true"},
                 {{"VRAMBROKER_PRELOAD", AnyLibrary()}});
  const std::vector<std::string> run_lines = absl::StrSplit(run.err, '\n', absl::SkipEmpty());
  ASSERT_FALSE(run_lines.empty());
  Check("run", Json::parse(run_lines.back(), nullptr, /*allow_exceptions=*/false));
  CheckCommand("claim ls", {"claim", "ls"});
  CheckCommand("claim show", {"claim", "show", "jobs"});
  CheckCommand("claim cdi", {"claim", "cdi", "jobs", "--output=" + dir() + "/cdi.json"});
  CheckCommand("claim rm", {"claim", "rm", "jobs"});
  CheckRefusal({"claim", "show", "nobodys"});
  CheckCommand("trim", {"trim", "holder"});
  CheckCommand("release", {"release"});
  CheckCommand("reload", {"reload"});
  CheckCommand("policy explain", {"policy", "explain"});
  CheckCommand("policy explain", {"policy", "explain", "--name=train-1", "--uid=65533", "--cgroup=/a"});

  CheckCommand("diagnose without a refusal", {"diagnose", "holder", "--for=torch-2.6"});

  // Checks hold, and two refusals: one refusal names other sessions and their unused memory.
  ASSERT_OK_AND_ASSIGN(
      const std::unique_ptr<ChildProcess> hold,
      ChildProcess::Start({VramctlProgram(), "hold", "1MiB", "--name=hold", "--format=json", "--socket-dir=" + dir()}));
  ASSERT_OK_AND_ASSIGN(const std::string line, hold->ReadLine());
  Check("hold", Json::parse(line, nullptr, /*allow_exceptions=*/false));
  CheckRefusal({"hold", "500MiB"});
  CheckRefusal({"end", "nobody"});
  EXPECT_FALSE(holder.Call(absl::StrCat("alloc ", 200_MiB)).ok()) << "and it has a partly used segment";
  CheckCommand("ooms", {"ooms"});

  // Checks traces: a trace of the session, and a trace for which other settings are better.
  const std::string file = MakeTempDir() + "/holder.pickle";
  CheckCommand("snapshot", {"snapshot", "holder", "-o", file});
  ASSERT_OK(holder.Call(absl::StrCat("alloc ", 1_MiB)));
  CheckCommand("snapshot", {"snapshot", "holder", "-o", file + ".later"});
  CheckCommand("trace", {"trace", "holder", "-o", file + ".trace", "--seconds=0.1"});
  CheckCommand("replay", {"replay", file, "--device-bytes=1GiB"});
  CheckCommand("map", {"map", file});
  CheckCommand("diagnose of a file", {"diagnose", file});
  CheckCommand("snapshot diff", {"snapshot", "--diff", file, file + ".later"});
  const std::string trace = absl::StrCat(paths::kGoldenDir, "/maxsplit_128");
  CheckCommand("tune", {"tune", trace + ".trace", "--conf", trace + ".conf"});

  // Checks plans.
  const std::string step = MakeTempDir() + "/step.trace";
  const Arguments model = {"--layers=2", "--hidden=256", "--heads=2", "--vocab=1000", "--device-bytes=1GiB"};
  Arguments train = {"plan", "train", "-o", step, "--batch=4"};
  train.insert(train.end(), model.begin(), model.end());
  CheckCommand("plan train", train);
  Arguments serve = {"plan", "serve"};
  serve.insert(serve.end(), model.begin(), model.end());
  CheckCommand("plan serve", serve);
  CheckCommand("plan share", {"plan", "share", step, step, "--device-bytes=4GiB"});

  // A process has ended, and another process has lost its session. The second process keeps its memory, and the daemon
  // cannot ask the process for its blocks.
  ASSERT_OK_AND_ASSIGN(ClientProcess dead, ConnectProcess("dead"));
  ASSERT_OK(dead.Call(absl::StrCat("alloc ", 1_MiB)));
  dead.process().Signal(SIGKILL);
  ASSERT_OK(dead.process().Wait());
  ASSERT_TRUE(WaitFor([&] { return !CtlJson({"quarantine"})["quarantine"].empty(); }));
  CheckCommand("quarantine", {"quarantine"});
  ASSERT_OK_AND_ASSIGN(ClientProcess ended, ConnectProcess("ended"));
  ASSERT_OK(ended.Call(absl::StrCat("alloc ", 1_MiB)));
  CheckCommand("end", {"end", "ended"});
  CheckCommand("map", {"map"});

  // A request waits that the device could serve without the memory in use.
  ASSERT_OK_AND_ASSIGN(ClientProcess patient, ClientProcess::Start(dir()));
  ASSERT_OK(patient.Call("connect patient - remote wait_ms=3600000"));
  ASSERT_OK(patient.Send(absl::StrCat("alloc ", 200_MiB)));
  ASSERT_TRUE(WaitFor([&] {
    const Json session = CtlJson({"summary", "patient"});
    return session.is_object() && !session["devices"][0]["waiting"].empty();
  }));
  CheckCommand("session", {"summary", "patient"});

  // Checks the fields of a GPU: this daemon has no GPU.
  v1::Device gpu;
  gpu.add_processes()->set_kind(v1::DeviceProcess::CLIENT);
  Check("device", ToJson(gpu, DeviceSums()));

  for (const auto& [heading, section] : fields_) {
    for (const auto& [path, field] : section) {
      EXPECT_TRUE(field.occurs) << "client/JSON.md, section " << heading << ", names `" << path
                                << "`, which no command has printed";
    }
  }
}

}  // namespace
}  // namespace vrambroker::testing_support
