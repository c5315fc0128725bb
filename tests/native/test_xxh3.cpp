#include <algorithm>

#include "check.hpp"
#include "cpu.hpp"
#include "xxh3.hpp"

using namespace kvtier;

namespace {

struct Golden {
  size_t length;
  uint64_t seed, hash;
};

// What the reference implementation gives for the first bytes of pattern().
constexpr Golden kGolden[] = {
    {241, 0, 0x2cb1ed4a30c8bded},     {241, UINT64_MAX, 0xf891ea03dddbe387},
    {1024, 0, 0x5ec111a1e5a293ae},    {1024, UINT64_MAX, 0xde82edddfbc4a641},
    {1025, 0, 0x5ea0264528a903fc},    {1025, UINT64_MAX, 0x9593aa310c07c7a1},
    {4096, 0, 0xa76570548864595e},    {4096, UINT64_MAX, 0x051dbabae0d6bd37},
    {12288, 0, 0x295df1cf6630e0b6},   {12288, UINT64_MAX, 0xc6e2c5dcaec0b107},
    {65536, 0, 0xd062f29c26da8cf9},   {65536, UINT64_MAX, 0xd87202451d257c1c},
    {1048576, 0, 0x7b0c7e7348bde3ff}, {1048576, UINT64_MAX, 0xd0e056cb5df35c59},
};

// Into memory on a cache line, and off it; what lies around stays.
void copies_what_it_hashes(const uint8_t* source, const Golden& golden, size_t skew) {
  constexpr size_t kLine = 64;
  std::vector<uint8_t> memory(golden.length + 4 * kLine, 0xEE);
  const size_t start = kLine + (kLine - reinterpret_cast<uintptr_t>(memory.data()) % kLine) + skew;
  CHECK(xxh3_64_copy(&memory[start], source, golden.length, golden.seed) == golden.hash);
  CHECK(std::equal(source, source + golden.length, memory.begin() + start));
  CHECK(memory[start - 1] == 0xEE && memory[start + golden.length] == 0xEE);
}

}  // namespace

int main() {
  const std::vector<uint8_t> data = pattern(size_t{1} << 20);
  for (const char* path : kPaths) {
    if (!force_vector_path(path)) continue;
    for (const Golden& golden : kGolden) {
      // A copy of exactly this length, at an odd address, lets sanitizers see a read beyond it.
      std::vector<uint8_t> shifted(golden.length + 1);
      std::copy_n(data.begin(), golden.length, shifted.begin() + 1);
      CHECK(xxh3_64(shifted.data() + 1, golden.length, golden.seed) == golden.hash);
      for (const size_t skew : {0, 1, 16, 63})
        copies_what_it_hashes(shifted.data() + 1, golden, skew);
    }
  }
  CHECK(!force_vector_path("mmx"));
}
