#include "batch.hpp"

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "xxh3.hpp"

namespace kvtier {
namespace {

// A device that answers "again" this often without moving a byte is reported as it is.
constexpr uint32_t kMostInterruptions = 1000;

void check(const Op& op, size_t sums) {
  if (op.length == 0 || op.length % kAlignment != 0)
    throw std::invalid_argument("length must be a positive multiple of 4096");
  if (op.part_bytes % kAlignment != 0)
    throw std::invalid_argument("part_bytes must be a multiple of 4096, or 0 for no checksums");
  if (op.address == 0) throw std::invalid_argument("address is null");
  if (op.sums + op.parts() > sums)
    throw std::invalid_argument("an operation's parts do not fit into sums");
}

}  // namespace

Batch::Batch(uint64_t id, std::span<const Op> ops, std::span<uint64_t> sums,
             std::span<int32_t> results)
    : id(id),
      ops(ops.begin(), ops.end()),
      sums(sums.data()),
      results(results.data()),
      unfinished(ops.size()) {
  if (results.size() != ops.size())
    throw std::invalid_argument("results must hold one number per operation");
  for (const Op& op : this->ops) check(op, sums.size());
}

std::optional<int32_t> Task::advance(int64_t returned) {
  if (returned == -EINTR || returned == -EAGAIN) {
    if (++interrupted_ < kMostInterruptions) return std::nullopt;
    return static_cast<int32_t>(-returned);
  }
  if (returned < 0) return static_cast<int32_t>(-returned);
  interrupted_ = 0;
  const uint32_t reached = done_ + static_cast<uint32_t>(returned);
  if (reached >= op().length) return kOk;
  if (reached <= furthest_) return writes() ? EIO : kShort;
  furthest_ = reached;
  // O_DIRECT refuses an odd offset, so the rest starts at the last aligned byte.
  done_ = reached - reached % kAlignment;
  return std::nullopt;
}

uint64_t Task::part_sum(uint64_t part) const {
  const uint64_t at = part * op().part_bytes;
  const auto* data = reinterpret_cast<const uint8_t*>(op().address) + at;
  return xxh3_64(data, std::min<uint64_t>(op().part_bytes, op().length - at), op().seed + part);
}

void Task::sign() const {
  for (uint64_t part = 0; part < op().parts(); ++part)
    batch_->sums[op().sums + part] = part_sum(part);
}

int32_t Task::verify() const {
  if (op().collect != 0) {
    sign();
    return kOk;
  }
  for (uint64_t part = 0; part < op().parts(); ++part)
    if (part_sum(part) != batch_->sums[op().sums + part]) return kChecksum;
  return kOk;
}

}  // namespace kvtier
