#include <algorithm>
#include <vector>

#include "check.hpp"
#include "copy.hpp"
#include "cpu.hpp"

using namespace kvtier;

namespace {

// Every alignment of the target around the streaming threshold; the bytes outside stay as they
// were.
void copies_exactly_its_range() {
  const std::vector<uint8_t> source = pattern(kStreamingCopy + 256);
  for (size_t shift = 0; shift < 130; shift += 13) {
    for (const size_t length : {size_t{0}, size_t{100}, kStreamingCopy - 1, kStreamingCopy + 65}) {
      std::vector<uint8_t> target(kStreamingCopy + 512, 0xEE);
      const uint64_t from = reinterpret_cast<uint64_t>(source.data()) + shift;
      const uint64_t to = reinterpret_cast<uint64_t>(target.data()) + shift;
      const uint64_t nbytes = length;
      copy_many({&from, 1}, {&to, 1}, {&nbytes, 1});

      std::vector<uint8_t> expected(target.size(), 0xEE);
      std::copy_n(source.begin() + shift, length, expected.begin() + shift);
      CHECK(target == expected);
    }
  }
}

}  // namespace

int main() {
  for (const char* path : kPaths)
    if (force_vector_path(path)) copies_exactly_its_range();
}
