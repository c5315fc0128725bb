// The operation record, shared byte for byte with OP in kvtier/io/base.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

/// Lengths and part sizes are multiples of this; so are offsets and addresses under O_DIRECT.
inline constexpr uint32_t kAlignment = 4096;

struct Op {
  uint64_t offset;      // byte offset in the file
  uint64_t address;     // host memory
  uint64_t seed;        // checksum seed of the first part; part j uses seed + j
  uint32_t length;      // bytes
  uint32_t part_bytes;  // bytes per checksummed part, the last may be shorter; 0 = unchecked
  uint32_t sums;        // index of the first part's checksum in the batch's sums
  int32_t fd;
  uint32_t write;    // 0 = read, 1 = write
  uint32_t collect;  // 1 = a read stores its parts' checksums instead of comparing them

  /// Checksummed parts: none if it is unchecked.
  uint64_t parts() const {
    return part_bytes == 0 ? 0 : (uint64_t{length} + part_bytes - 1) / part_bytes;
  }
};

static_assert(sizeof(Op) == 48);
static_assert(offsetof(Op, offset) == 0 && offsetof(Op, address) == 8);
static_assert(offsetof(Op, seed) == 16 && offsetof(Op, length) == 24);
static_assert(offsetof(Op, part_bytes) == 28 && offsetof(Op, sums) == 32);
static_assert(offsetof(Op, fd) == 36 && offsetof(Op, write) == 40);

/// The result of one operation is kOk, a positive errno, or one of the negative ones.
inline constexpr int32_t kOk = 0;
inline constexpr int32_t kShort = -1;
inline constexpr int32_t kChecksum = -2;

}  // namespace kvtier
