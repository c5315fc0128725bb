// Little-endian loads and stores at any address.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace kvtier {

constexpr uint64_t little_endian(uint64_t value) {
  return std::endian::native == std::endian::little ? value : __builtin_bswap64(value);
}

inline uint64_t load_le64(const void* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return little_endian(value);
}

inline void store_le64(void* at, uint64_t value) {
  value = little_endian(value);
  std::memcpy(at, &value, sizeof value);
}

}  // namespace kvtier
