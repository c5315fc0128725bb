// 16-bit elements to two planes of bytes and back: what the codecs compress apart.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

/// Rotates each little-endian 16-bit element left by one bit, so that the sign leaves the top, and
/// writes the nbytes / 2 upper bytes to `high`, the lower ones to `low`. An odd last byte follows
/// the lower ones as it is. The three ranges must not overlap.
void split_planes16(const uint8_t* src, size_t nbytes, uint8_t* high, uint8_t* low);

/// The inverse: `nbytes` bytes at `dst` from the nbytes / 2 at `high` and the rest at `low`.
void join_planes16(const uint8_t* high, const uint8_t* low, size_t nbytes, uint8_t* dst);

}  // namespace kvtier
