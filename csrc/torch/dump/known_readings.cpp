#include "torch/dump/known_readings.h"

#include <optional>

#include "torch/dump/probe.h"

namespace fastcheck::dump {

KnownReadings::Reading* KnownReadings::find(const at::Tensor& tensor) {
  const std::optional<std::uint64_t> looks = probe(tensor);
  if (!looks.has_value() || tensor.is_inference()) return nullptr;
  if (readings_.size() >= kMost) clear();
  const std::int64_t seen = seen_.add(tensor, next_);
  Reading& reading = readings_[seen < 0 ? next_++ : seen];
  const auto written = written_.find(tensor.storage().unsafeGetStorageImpl());
  const bool is_older = written != written_.end() && reading.seq < written->second;
  if (reading.probe != *looks || is_older) reading.seq = -1;
  reading.probe = *looks;
  return &reading;
}

void KnownReadings::wrote(const at::Tensor& tensor, std::int64_t seq) {
  if (tensor.has_storage()) written_[tensor.storage().unsafeGetStorageImpl()] = seq;
}

void KnownReadings::clear() {
  seen_.clear();
  readings_.clear();
  written_.clear();
}

}  // namespace fastcheck::dump
