// The smallest test kit: a check that ends the program with its place, and reproducible bytes.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

inline std::vector<uint8_t> pattern(size_t nbytes) {
  std::vector<uint8_t> bytes(nbytes);
  uint64_t state = 1;
  for (uint8_t& byte : bytes) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    byte = static_cast<uint8_t>(state >> 56);
  }
  return bytes;
}

inline constexpr const char* kPaths[] = {"portable", "avx2", "avx512"};
