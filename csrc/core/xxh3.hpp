// XXH3, 64-bit, seeded, for long inputs: the checksum of every part on disk.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

/// Inputs up to this length use other formulas of the specification, which are not built here.
inline constexpr size_t kXxh3ShortInput = 240;

/// Equals XXH3_64bits_withSeed(data, length, seed); `length` must exceed kXxh3ShortInput.
uint64_t xxh3_64(const void* data, size_t length, uint64_t seed);

/// The same of `src`, which it copies to `dst` on the way. Where it can the copy bypasses the
/// cache, and is seen by other threads after a store fence only. The two must not overlap.
uint64_t xxh3_64_copy(void* dst, const void* src, size_t length, uint64_t seed);

}  // namespace kvtier
