// Host memory to host memory, many pieces in one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

/// A call that moves this much in total bypasses the cache, where its data would not stay anyway...
inline constexpr uint64_t kStreamingTotal = uint64_t{1} << 20;
/// ...except for pieces smaller than this, whose ragged ends would cost more than that saves.
inline constexpr uint64_t kStreamingPiece = 4096;

/// Copies lengths[i] bytes from address src[i] to address dst[i]; the ranges must not overlap and
/// the three spans have one length.
void copy_many(std::span<const uint64_t> src, std::span<const uint64_t> dst,
               std::span<const uint64_t> lengths);

/// The same, and sums[i] becomes the xxh3_64 with seed 0 of what piece i was copied from, taken in
/// the same pass. Every length must exceed kXxh3ShortInput.
void copy_hashed(std::span<const uint64_t> src, std::span<const uint64_t> dst,
                 std::span<const uint64_t> lengths, std::span<uint64_t> sums);

}  // namespace kvtier
