// SPDX-License-Identifier: Apache-2.0
#include "allocator/wire/out_of_memory_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/heap/out_of_memory.h"
#include "client/heap/out_of_memory_json.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {
namespace {

using Json = nlohmann::json;
using google::protobuf::FieldDescriptor;

// Gives every field of `message` a unique value. A list gets one element.
void Fill(google::protobuf::Message& message, int* last) {
  const google::protobuf::Reflection& set = *message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = message.GetDescriptor()->field(i);
    const int value = ++*last;
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_UINT64:
        set.SetUInt64(&message, field, (uint64_t{1} << 63) + static_cast<uint64_t>(value));
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        set.SetUInt32(&message, field, static_cast<uint32_t>(value));
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        set.SetString(&message, field, absl::StrCat("\"text\" ", value, "\n"));
        break;
      case FieldDescriptor::CPPTYPE_ENUM:
        set.SetEnumValue(&message, field, 2);
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE:
        Fill(field->is_repeated() ? *set.AddMessage(&message, field) : *set.MutableMessage(&message, field), last);
        break;
      default:
        FAIL() << field->full_name();
    }
  }
}

// Collects the values of all leaves.
void Leaves(const Json& json, std::multiset<std::string>* leaves) {
  for (const Json& inner : json) {
    if (inner.is_structured()) {
      Leaves(inner, leaves);
    } else {
      leaves->insert(inner.dump());
    }
  }
}

void Leaves(const google::protobuf::Message& message, std::multiset<std::string>* leaves) {
  const google::protobuf::Reflection& get = *message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = message.GetDescriptor()->field(i);
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_UINT64:
        leaves->insert(Json(get.GetUInt64(message, field)).dump());
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        leaves->insert(Json(get.GetUInt32(message, field)).dump());
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        leaves->insert(Json(get.GetString(message, field)).dump());
        break;
      case FieldDescriptor::CPPTYPE_ENUM: {
        const std::string name = get.GetEnum(message, field)->name();
        leaves->insert(Json(name.substr(name.find('_') + 1)).dump());
        break;
      }
      default:
        Leaves(field->is_repeated() ? get.GetRepeatedMessage(message, field, 0) : get.GetMessage(message, field),
               leaves);
    }
  }
}

TEST(OutOfMemoryJsonTest, HasEveryFieldOfTheReport) {
  v1::OutOfMemory report;
  int last = 0;
  Fill(report, &last);
  const Json json = Json::parse(OutOfMemoryJson(report));
  std::multiset<std::string> expected;
  Leaves(report, &expected);
  std::multiset<std::string> found;
  Leaves(json, &found);
  EXPECT_EQ(found, expected) << json.dump(2);
  EXPECT_EQ(json["cause"], "CAPACITY");
  EXPECT_EQ(json["limit_bytes"], report.limit_bytes());
  EXPECT_EQ(json["refusal"], report.refusal());
  EXPECT_EQ(json["hole_segments"], report.holes().segments());
  EXPECT_EQ(json["idle_holders"][0]["why"], "IN_PART_USED");
  EXPECT_EQ(json["scopes"][0]["scope"], report.scopes(0).scope());
  EXPECT_EQ(json["pinned_segments"][0]["longest_held"][0]["held_seconds"],
            report.holes().most_bytes(0).longest_held(0).held_seconds());
}

TEST(OutOfMemoryJsonTest, OfAnEmptyReportListsAreEmpty) {
  const Json json = Json::parse(OutOfMemoryJson({}));
  for (const char* list : {"pinned_segments", "largest_holders", "idle_holders", "scopes"}) {
    EXPECT_EQ(json[list], Json::array()) << list;
  }
  EXPECT_EQ(json["scope"], "");
}

TEST(OutOfMemoryJsonTest, OfAStatusThatIsNoRefusalThereIsNone) {
  EXPECT_EQ(client_internal::OutOfMemoryJsonOf(absl::OkStatus()), "");
  EXPECT_EQ(client_internal::OutOfMemoryJsonOf(absl::ResourceExhaustedError("too many sessions")), "");
  v1::OutOfMemory report;
  report.set_scope("forward");
  EXPECT_EQ(client_internal::OutOfMemoryJsonOf(client_internal::OutOfMemoryError(report)), OutOfMemoryJson(report));
}

}  // namespace
}  // namespace vrambroker
