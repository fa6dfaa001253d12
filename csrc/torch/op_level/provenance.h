// Provenance: which record describes the bytes of a tensor, by storage, byte range and version.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "torch/read/storage_table.h"

namespace fastcheck::op_level {

// The number of a record, and whether it has non-finite components; unknown
// while the record is on a device.
struct RecordRef {
  std::int64_t seq;
  bool is_bad;
  bool is_pending = false;
  // The record is that of the part, or of the whole, in which its bad values began.
  bool is_of_origin = false;
};

// Memory that was allocated and not written yet.
constexpr std::int64_t kUninitialised = -2;
// Memory that a collective writes, whenever it does.
constexpr std::int64_t kCollective = -3;
// Memory that an op has written that a filter leaves out.
constexpr std::int64_t kUnseen = -4;

struct Known {
  // Every byte is covered: false for a tensor that was never met, or that somebody has written
  // unseen (its version is not one that we know).
  bool is_whole = false;
  // It has to be read before anything is known: uninitialised, or out of a collective.
  bool is_unread = false;
  bool is_collective = false;
  // Its version is not one that we know: of what was bad in it a reading tells if it still is.
  bool is_stale = false;
  // The youngest record that covers some of it; -1: none.
  std::int64_t seq = -1;
  // The records among the ones that cover it that are bad, and those that are bad or may be; the
  // youngest first.
  c10::SmallVector<std::int64_t, 2> bad, suspects;
  // One record covers it, of these very bytes, but where it is that of their origin.
  bool is_exact = false, is_of_origin = false;
};

// OpObserver's lock guards it. It holds storages weakly, and never makes one strong again.
class Provenance {
 public:
  // `any_version`: what it holds is known to have come from what is known.
  Known find(const at::Tensor& tensor, bool any_version = false) const;
  // The version that `tensor` counts is one of those that are up to date. `is_new`: no tensor that
  // was met before counts it.
  void accept(const at::Tensor& tensor, bool is_new = false);
  // `tensor` was read: this record tells what it holds now.
  void put(const at::Tensor& tensor, RecordRef ref);
  // An op has written `tensor`, which had `version_before`: views and aliases of the same storage
  // stay known but for these bytes.
  void wrote(const at::Tensor& tensor, std::int64_t version_before, RecordRef ref);
  // The number of the last write to this storage that was seen; -1: none was.
  std::int64_t written_at(const at::Tensor& tensor) const;
  // True if anything is known of this storage.
  bool knows(const at::Tensor& tensor) const { return entries_.find(tensor) != nullptr; }
  // Records below `stop` are known by now: visit(seq) tells the bad record that one is to be known
  // by, if it is bad.
  template <class Visit>
  void settle(std::int64_t stop, const Visit& visit) {
    entries_.each([&](Entry& entry) {
      for (Span& span : entry.spans) {
        RecordRef& ref = span.ref;
        if (!ref.is_pending || ref.seq >= stop) continue;
        const std::optional<std::int64_t> source = visit(ref.seq);
        const std::int64_t seq = source.value_or(ref.seq);
        ref = {seq, source.has_value(), false, seq != ref.seq};
      }
    });
  }
  void clear() { entries_.clear(); }

  static std::int64_t version(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<std::int64_t>(tensor._version());
  }

 private:
  struct Span {
    std::int64_t begin, end;  // bytes of the storage, from the first to the last element
    std::int64_t geometry;    // of a tensor that leaves bytes out between; 0: it does not
    RecordRef ref;
  };
  struct Version {
    std::int64_t version, counters;
  };
  struct Entry {
    // Tensors over one storage may count their versions apart (x.data, unsafe_chunk): those that
    // are up to date with the spans, and how many have come to each.
    c10::SmallVector<Version, 2> versions;
    c10::SmallVector<Span, 1> spans;  // the youngest last
    std::int64_t written_at = -1;
  };

  static Span span_of(const at::Tensor& tensor);
  static void lay(Entry& entry, const Span& span);

  StorageTable<Entry> entries_;
};

}  // namespace fastcheck::op_level
