#include <algorithm>
#include <vector>

#include "check.hpp"
#include "copy.hpp"
#include "cpu.hpp"

using namespace kvtier;

namespace {

constexpr size_t kGap = 100;

// Pieces on either side of the streaming threshold, at odd addresses; what lies between them stays.
void copies_exactly_its_ranges(size_t total) {
  const std::vector<uint8_t> source = pattern(total + 2 * kStreamingPiece);
  std::vector<uint8_t> target(2 * source.size(), 0xEE);
  std::vector<uint8_t> expected = target;
  std::vector<uint64_t> from, to, nbytes;
  size_t read = 3;
  size_t written = 1;
  for (size_t length = 0; read < total; length = (length + 1001) % (2 * kStreamingPiece)) {
    from.push_back(reinterpret_cast<uint64_t>(source.data()) + read);
    to.push_back(reinterpret_cast<uint64_t>(target.data()) + written);
    nbytes.push_back(length);
    std::copy_n(source.begin() + read, length, expected.begin() + written);
    read += length;
    written += length + kGap;
  }
  copy_many(from, to, nbytes);
  CHECK(target == expected);
}

}  // namespace

int main() {
  for (const char* path : kPaths) {
    if (!force_vector_path(path)) continue;
    copies_exactly_its_ranges(kStreamingTotal / 2);
    copies_exactly_its_ranges(kStreamingTotal * 2);
  }
}
