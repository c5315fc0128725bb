// The inner loop of XXH3: the only part that depends on the vector path.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvtier::xxh3 {

inline constexpr size_t kStripe = 64;       // bytes taken per step, eight lanes
inline constexpr size_t kSecretSize = 192;  // bytes
inline constexpr size_t kSecretStep = 8;    // the secret's window moves this far per stripe
inline constexpr size_t kStripesPerBlock = (kSecretSize - kStripe) / kSecretStep;
inline constexpr size_t kBlock = kStripe * kStripesPerBlock;
inline constexpr uint32_t kPrime32_1 = 0x9E3779B1U;

struct alignas(kStripe) Accumulator {
  uint64_t lane[8];
};

using Secret = std::array<uint8_t, kSecretSize>;

/// A copy to make on the way: as many bytes as there are in whole blocks of stripes, from anywhere
/// to a multiple of 64 bytes.
struct Copied {
  uint8_t* dst;
  const uint8_t* src;
};

/// Adds `stripes` stripes, scrambling the lanes after each full block of them; then adds the 64
/// bytes at `last`, which end the input and may overlap the stripes, unless that is null. `copied`
/// is for a kernel that copies.
using Kernel = void (*)(Accumulator& acc, const uint8_t* data, size_t stripes, const uint8_t* last,
                        const Secret& secret, Copied copied);

/// The kernel of the current vector path.
Kernel kernel();

/// The one that copies; null where the path has none.
Kernel copying_kernel();

}  // namespace kvtier::xxh3
