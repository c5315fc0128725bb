#include <algorithm>
#include <vector>

#include "check.hpp"
#include "copy.hpp"
#include "cpu.hpp"
#include "xxh3.hpp"

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

// Equal pieces, as pages are, in another order than they lie in: more than go side by side, and
// some left.
void copies_pages(size_t page, size_t skew) {
  const size_t count = 2 * kStreamingTotal / page + 11;
  const std::vector<uint8_t> source = pattern(count * page + skew);
  std::vector<uint8_t> target(count * (page + kGap) + skew, 0xEE);
  std::vector<uint8_t> expected = target;
  std::vector<uint64_t> from, to;
  for (size_t i = 0; i < count; ++i) {
    const size_t read = (i * 7) % count * page + skew;
    const size_t written = skew + (i * 5) % count * (page + kGap);
    from.push_back(reinterpret_cast<uint64_t>(source.data()) + read);
    to.push_back(reinterpret_cast<uint64_t>(target.data()) + written);
    std::copy_n(source.begin() + read, page, expected.begin() + written);
  }
  copy_many(from, to, std::vector<uint64_t>(count, page));
  CHECK(target == expected);
}

// Pieces of all kinds of lengths, onto a cache line and off it.
void hashes_what_it_copies(size_t skew) {
  const std::vector<uint64_t> lengths{241, 4096, 4097, 100'000, uint64_t{1} << 20};
  const std::vector<uint8_t> source = pattern(lengths.back() + 1);
  std::vector<std::vector<uint8_t>> targets;
  std::vector<uint64_t> from, to, sums(lengths.size());
  for (const uint64_t length : lengths) {
    targets.emplace_back(length + skew + 1, 0xEE);
    from.push_back(reinterpret_cast<uint64_t>(source.data()) + 1);
    to.push_back(reinterpret_cast<uint64_t>(targets.back().data()) + skew);
  }
  copy_hashed(from, to, lengths, sums);
  for (size_t i = 0; i < lengths.size(); ++i) {
    CHECK(sums[i] == xxh3_64(&source[1], lengths[i], 0));
    CHECK(std::equal(targets[i].begin() + skew, targets[i].end() - 1, source.begin() + 1));
    CHECK(targets[i].back() == 0xEE);
  }
}

}  // namespace

int main() {
  for (const char* path : kPaths) {
    if (!force_vector_path(path)) continue;
    copies_exactly_its_ranges(kStreamingTotal / 2);
    copies_exactly_its_ranges(kStreamingTotal * 2);
    for (const size_t page : {kStreamingPiece, size_t{36} << 10, size_t{200} << 10})
      for (const size_t skew : {0, 1, 63}) copies_pages(page, skew);
    for (const size_t skew : {0, 1, 48}) hashes_what_it_copies(skew);
  }
}
