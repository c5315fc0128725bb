// Batches, their operations, and how far each operation has come.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "op.hpp"

namespace kvtier {

/// Operations that start together and report once. Owns a copy of the operations; `sums`, `results`
/// and the memory behind every address stay the caller's and live until the batch has finished.
struct Batch {
  /// Throws std::invalid_argument if an operation is malformed or points outside `sums`.
  Batch(uint64_t id, std::span<const Op> ops, std::span<uint64_t> sums, std::span<int32_t> results);

  const uint64_t id;
  const std::vector<Op> ops;
  uint64_t* const sums;
  int32_t* const results;
  std::atomic<size_t> unfinished;
};

/// One operation of a batch while it runs.
class Task {
 public:
  Task(std::shared_ptr<Batch> batch, size_t index) : batch_(std::move(batch)), index_(index) {}

  Batch& batch() const { return *batch_; }
  size_t index() const { return index_; }
  const Op& op() const { return batch_->ops[index_]; }
  bool writes() const { return op().write != 0; }

  // What the kernel is to transfer next.
  uint64_t offset() const { return op().offset + done_; }
  uint8_t* memory() const { return reinterpret_cast<uint8_t*>(op().address) + done_; }
  uint32_t remaining() const { return op().length - done_; }

  /// Takes what a read or write returned: a byte count or a negative errno. Yields the operation's
  /// result once it has one, or nothing if the rest must be transferred still.
  std::optional<int32_t> advance(int64_t returned);

  /// Stores the checksum of every part into the batch's sums; none if it is unchecked.
  void sign() const;

  /// kOk if every part has the checksum that the batch's sums expect, or it is unchecked; else
  /// kChecksum. An operation that collects stores the checksums instead.
  int32_t verify() const;

 private:
  uint64_t part_sum(uint64_t part) const;

  std::shared_ptr<Batch> batch_;
  size_t index_;
  uint32_t done_ = 0;         // bytes transferred, on an aligned boundary
  uint32_t furthest_ = 0;     // bytes ever transferred, at least `done_`
  uint32_t interrupted_ = 0;  // EINTR and EAGAIN in a row
};

}  // namespace kvtier
