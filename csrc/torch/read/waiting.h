// Waiting: small tensors on a device that are read together, a few hooks or operators after they
// were seen.
//
// A launch for each costs more than reading it. What waits is an alias: it keeps the memory as it
// was, whatever becomes of the tensor (`x.data = y`, a storage that goes), and has its version. A
// tensor whose version or memory has changed by its turn is not read, since its record would be
// that of other contents, and its site is read at once from then on.
//
// Not every write raises the version: those through `.data`, of collectives and of some kernels do
// not. So a site waits only after a trial: all its tensors of one step are read at once, and once
// more in their turn. Where any two of these records differ, the site is read at once for good.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "torch/read/observe.h"

namespace fastcheck {

// For one thread at a time.
class Waiting {
 public:
  // Of the memory that a tensor keeps: a view keeps all of its storage.
  static constexpr std::size_t kMostBytes = 256 * 1024;
  static constexpr std::size_t kMost = 32;  // as many as a launch takes
  // A bit in the flags of an identity: the tensor has a record, and this one is compared with it
  // (python/fastcheck/monitor/session/drain.py).
  static constexpr std::uint32_t kAgain = std::uint32_t{1} << 31;

  enum class Turn : std::uint8_t { kNow, kNowAndAgain, kLater };

  struct Item {
    at::Tensor tensor;
    Identity identity;
    std::int64_t dtype;
    std::int64_t order;
    // The state of the tensor when it was seen.
    std::uint32_t version;
    const void* memory;
  };
  struct Due {
    c10::Stream stream;
    std::vector<Item> items;    // as they were
    std::vector<Item> changed;  // are not, and have no record
  };

  // Autograd adds a gradient to another in place only where nobody else holds its memory. With
  // this, a site is watched for a step before its trial: what autograd has added to is read at
  // once for good.
  void watch_sums() { watches_sums_ = true; }
  // Autograd is about to add something to it.
  void added_to(const at::Tensor& tensor);
  // Tensors of devices of this type may wait; nullopt: none may.
  void allow(std::optional<c10::DeviceType> type) { type_ = type; }
  Turn turn_of(const at::Tensor& tensor, std::int64_t site, std::int64_t step);
  // True if the site has passed its trial, and this tensor of it may wait. For captured graphs,
  // which have no trial: their tensors wait elsewhere (GraphSlots in
  // python/fastcheck/ring/graph_slots.py).
  bool has_passed(const at::Tensor& tensor, std::int64_t site);
  // `stream`: the current one, that of all that waits.
  void add(const at::Tensor& tensor, const Identity& identity, std::int64_t dtype,
           std::int64_t order, const c10::Stream& stream);
  bool is_empty() const { return items_.empty(); }
  bool is_on(const c10::Stream& stream) const { return stream_ == stream; }
  // Call it before take() where another stream may be current. That one may have waited for what
  // waits and not for its reading, and write to it: these sites are read at once from then on.
  // `written`: what it is about to write, which is not read.
  void leave_stream(const at::Tensor* written = nullptr);
  // True if anything that waits is in this tensor's memory.
  bool reaches(const at::Tensor& tensor) const;
  bool is_full() const { return items_.size() >= kMost; }
  // Call it when there is something.
  Due take();
  // The two records of a trial have arrived.
  void compared(std::int64_t site, bool are_same);
  // Hands out what waits, and forgets what is known of sites.
  std::vector<Item> clear();

 private:
  struct Site {
    std::int64_t first = -1;   // the step in which it was met
    std::int64_t trial = -1;   // the step of its trial
    std::int64_t pending = 0;  // pairs of records that have not arrived
    bool is_at_once = false;
  };
  Site& site_of(std::int64_t number);
  void read_at_once(const Item& item) { site_of(item.identity.site).is_at_once = true; }
  bool can_wait(const at::Tensor& tensor, std::int64_t site) const;

  std::optional<c10::DeviceType> type_;
  std::optional<c10::Stream> stream_;
  std::vector<Item> items_;
  std::vector<Site> sites_;
  bool watches_sums_ = false;
  // The sites of memory in a step in which they are watched; addresses, which may be given anew.
  std::unordered_map<const c10::StorageImpl*, std::int64_t> watched_;
  std::int64_t watched_in_ = -1;
};

}  // namespace fastcheck
