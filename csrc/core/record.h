// The Record: the fixed-size result of one pass over one tensor, format version 1.
//
// 192 bytes, little-endian, no padding. docs/record-format.md specifies every field;
// python/fastcheck/record/format.py mirrors this layout and tests/record/test_record_layout.py
// holds them together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcheck {

constexpr std::uint16_t kRecordVersion = 1;

// The part of a record that was computed. A field that the depth does not cover is zero bytes.
enum class Depth : std::uint8_t {
  kHealth = 1,
  kStats = 2,
  kFull = 3,
  kChecksum = 4  // the checksum alone: of cpu::checksum(), and of no record that is kept
};

// The rule by which the elements were traversed.
enum class Order : std::uint8_t { kStorage = 0, kLogical = 1 };

// The arithmetic by which the device treats a result that does not fit its format.
enum class DeviceMode : std::uint8_t { kIeee = 0, kSaturating = 1, kUnknown = 2 };

// Bits of Record::flags. Bits 8 to 11 hold the host's verdict (python/fastcheck/record/format.py).
enum RecordFlag : std::uint32_t {
  kFlagNonfinite = 1u << 0,  // the tensor has a NaN or an infinity
  kFlagRecompute = 1u << 1,  // seen while activation checkpointing ran a forward again
  kFlagScaled = 1u << 2,     // a gradient that carries a loss scale
  kFlagEvent = 1u << 3,      // the host counted this record as an overflow event
};

struct Record {
  std::int64_t numel;
  std::int64_t nan_count;
  std::int64_t posinf_count;
  std::int64_t neginf_count;
  std::int64_t zero_count;
  std::int64_t subnormal_count;
  std::int64_t negative_count;
  std::int64_t saturated_count;
  std::uint64_t min;  // bits of a double, an int64 or a uint64: which one depends on the dtype
  std::uint64_t max;
  double sum;
  double abs_sum;
  double sum_sq;
  std::uint64_t checksum;
  // Everything above is a value field: two records are equal when these bytes are.
  std::int64_t seq;
  std::int64_t step;
  std::int32_t call;
  std::int32_t site;
  std::uint32_t flags;
  std::uint16_t version;
  std::uint8_t dtype;
  std::uint8_t order;
  std::uint8_t depth;
  std::uint8_t device_mode;
  std::uint8_t reserved[46];
};

constexpr std::size_t kRecordValueBytes = 112;

static_assert(sizeof(Record) == 192);
static_assert(offsetof(Record, numel) == 0);
static_assert(offsetof(Record, nan_count) == 8);
static_assert(offsetof(Record, posinf_count) == 16);
static_assert(offsetof(Record, neginf_count) == 24);
static_assert(offsetof(Record, zero_count) == 32);
static_assert(offsetof(Record, subnormal_count) == 40);
static_assert(offsetof(Record, negative_count) == 48);
static_assert(offsetof(Record, saturated_count) == 56);
static_assert(offsetof(Record, min) == 64);
static_assert(offsetof(Record, max) == 72);
static_assert(offsetof(Record, sum) == 80);
static_assert(offsetof(Record, abs_sum) == 88);
static_assert(offsetof(Record, sum_sq) == 96);
static_assert(offsetof(Record, checksum) == 104);
static_assert(offsetof(Record, seq) == kRecordValueBytes);
static_assert(offsetof(Record, step) == 120);
static_assert(offsetof(Record, call) == 128);
static_assert(offsetof(Record, site) == 132);
static_assert(offsetof(Record, flags) == 136);
static_assert(offsetof(Record, version) == 140);
static_assert(offsetof(Record, dtype) == 142);
static_assert(offsetof(Record, order) == 143);
static_assert(offsetof(Record, depth) == 144);
static_assert(offsetof(Record, device_mode) == 145);
static_assert(offsetof(Record, reserved) == 146);

}  // namespace fastcheck
