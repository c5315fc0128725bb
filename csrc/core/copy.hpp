// Host memory to host memory, many pieces in one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

/// Copies this large bypass the cache: their data would not stay in it anyway.
inline constexpr size_t kStreamingCopy = size_t{256} << 10;

/// Copies lengths[i] bytes from address src[i] to address dst[i]; the ranges must not overlap and
/// the three spans have one length.
void copy_many(std::span<const uint64_t> src, std::span<const uint64_t> dst,
               std::span<const uint64_t> lengths);

}  // namespace kvtier
