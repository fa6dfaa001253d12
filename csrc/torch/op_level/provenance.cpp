#include "torch/op_level/provenance.h"

#include <ATen/core/Tensor.h>
#include <c10/util/hash.h>

#include <algorithm>

namespace fastcheck::op_level {
namespace {

// More than this many views of one storage, written one by one, are taken for one.
constexpr std::size_t kMaxSpans = 64;
constexpr std::size_t kMaxVersions = 64;

template <class Versions>
auto find_version(Versions& versions, std::int64_t version) {
  return std::find_if(versions.begin(), versions.end(),
                      [version](const auto& one) { return one.version == version; });
}

}  // namespace

Provenance::Span Provenance::span_of(const at::Tensor& tensor) {
  std::int64_t elements = 1, geometry = 0;
  if (tensor.is_contiguous() || tensor.is_non_overlapping_and_dense()) {
    elements = tensor.numel();
  } else {
    for (std::int64_t d = 0; d < tensor.dim(); ++d) {
      elements += (tensor.size(d) - 1) * tensor.stride(d);
      geometry = static_cast<std::int64_t>(
          c10::hash_combine(static_cast<std::size_t>(geometry),
                            static_cast<std::size_t>(tensor.size(d) * 1000003 + tensor.stride(d))));
    }
    geometry |= 1;
  }
  const std::int64_t begin = tensor.storage_offset() * tensor.element_size();
  return {begin, begin + elements * tensor.element_size(), geometry, {}};
}

Known Provenance::find(const at::Tensor& tensor, bool any_version) const {
  Known known;
  const Entry* const entry = entries_.find(tensor);
  if (entry == nullptr) return known;
  known.is_stale =
      !any_version && find_version(entry->versions, version(tensor)) == entry->versions.end();
  const Span wanted = span_of(tensor);
  // The search goes from the youngest on, until the bytes are covered by a span without gaps.
  std::size_t met = 0;
  for (auto span = entry->spans.rbegin(); span != entry->spans.rend(); ++span) {
    if (span->end <= wanted.begin || span->begin >= wanted.end) continue;
    const RecordRef& ref = span->ref;
    if (met++ == 0) {
      known.seq = ref.seq;
      known.is_of_origin = ref.is_of_origin;
      known.is_exact = span->begin == wanted.begin && span->end == wanted.end &&
                       span->geometry == wanted.geometry;
    }
    if (ref.seq < 0) {
      known.is_unread = true;
      known.is_collective = known.is_collective || ref.seq == kCollective;
    } else if ((ref.is_bad || ref.is_pending) &&
               std::find(known.suspects.begin(), known.suspects.end(), ref.seq) ==
                   known.suspects.end()) {
      known.suspects.push_back(ref.seq);
      if (ref.is_bad) known.bad.push_back(ref.seq);
    }
    const bool covers = span->begin <= wanted.begin && span->end >= wanted.end;
    if (covers && (span->geometry == 0 || span->geometry == wanted.geometry)) {
      known.is_whole = true;
      break;
    }
  }
  if (met != 1) known.is_exact = false;
  if (known.is_stale) {
    // Written unseen, or through an alias that counts by itself (x.data, x.data = y): what was bad
    // in these bytes may still be there.
    known.is_whole = known.is_exact = known.is_unread = known.is_collective = false;
    known.seq = -1;
    known.suspects = known.bad;
  }
  return known;
}

void Provenance::lay(Entry& entry, const Span& span) {
  auto& spans = entry.spans;
  if (span.geometry == 0) {
    spans.erase(std::remove_if(spans.begin(), spans.end(),
                               [&span](const Span& old) {
                                 return old.begin >= span.begin && old.end <= span.end;
                               }),
                spans.end());
  }
  if (spans.size() >= kMaxSpans) {
    // What is finite is read again when it is asked for. The oldest is mostly the whole.
    const auto finite = std::find_if(spans.begin(), spans.end(), [](const Span& old) {
      return old.ref.seq >= 0 && !old.ref.is_bad && !old.ref.is_pending;
    });
    spans.erase(finite != spans.end() ? finite : spans.begin() + 1);
  }
  spans.push_back(span);
}

void Provenance::accept(const at::Tensor& tensor, bool is_new) {
  auto& versions = entries_.at(tensor).versions;
  const auto found = find_version(versions, version(tensor));
  if (found != versions.end()) {
    if (is_new) ++found->counters;
    return;
  }
  if (versions.size() >= kMaxVersions) versions.erase(versions.begin());
  versions.push_back({version(tensor), 1});
}

void Provenance::put(const at::Tensor& tensor, RecordRef ref) {
  Entry& mine = entries_.at(tensor);
  if (find_version(mine.versions, version(tensor)) == mine.versions.end()) {
    // New, or written unseen: of what is known of it nothing holds any more.
    mine.spans.clear();
    mine.versions.clear();
    accept(tensor);
  }
  Span span = span_of(tensor);
  span.ref = ref;
  lay(mine, span);
}

void Provenance::wrote(const at::Tensor& tensor, std::int64_t version_before, RecordRef ref) {
  Entry& mine = entries_.at(tensor);
  const auto old = find_version(mine.versions, version_before);
  // Of an alias that counts by itself (x.data) nothing is known: the counts of the others are
  // still right.
  const bool is_known = old != mine.versions.end();
  if (is_known && --old->counters == 0) mine.versions.erase(old);
  accept(tensor, is_known);
  mine.written_at = ref.seq;
  Span span = span_of(tensor);
  span.ref = ref;
  lay(mine, span);
}

std::int64_t Provenance::written_at(const at::Tensor& tensor) const {
  const Entry* const entry = entries_.find(tensor);
  return entry == nullptr ? -1 : entry->written_at;
}

}  // namespace fastcheck::op_level
