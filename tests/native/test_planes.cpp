#include <algorithm>
#include <vector>

#include "check.hpp"
#include "cpu.hpp"
#include "planes.hpp"

using namespace kvtier;

namespace {

constexpr size_t kGuard = 40;
constexpr uint8_t kUntouched = 0xEE;

struct Plane {
  explicit Plane(size_t nbytes) : bytes(nbytes + 2 * kGuard, kUntouched) {}

  uint8_t* data() { return bytes.data() + kGuard; }

  // Nothing but the `nbytes` bytes behind the guard was written.
  bool is_guarded(size_t nbytes) const {
    const auto untouched = [](uint8_t byte) { return byte == kUntouched; };
    return std::all_of(bytes.begin(), bytes.begin() + kGuard, untouched) &&
           std::all_of(bytes.begin() + kGuard + nbytes, bytes.end(), untouched);
  }

  std::vector<uint8_t> bytes;
};

// By the element's value, not by its bytes as the code does it.
void splits_and_joins(const uint8_t* src, size_t nbytes) {
  const size_t elements = nbytes / 2;
  Plane high(elements), low(nbytes - elements), back(nbytes);
  split_planes16(src, nbytes, high.data(), low.data());
  for (size_t i = 0; i < elements; ++i) {
    const unsigned element = src[2 * i] + 256U * src[2 * i + 1];
    const unsigned rotated = (element * 2) % 65536 + element / 32768;
    CHECK(high.data()[i] == rotated / 256);
    CHECK(low.data()[i] == rotated % 256);
  }
  if (nbytes % 2 != 0) CHECK(low.data()[elements] == src[nbytes - 1]);
  CHECK(high.is_guarded(elements));
  CHECK(low.is_guarded(nbytes - elements));

  join_planes16(high.data(), low.data(), nbytes, back.data());
  CHECK(std::equal(src, src + nbytes, back.data()));
  CHECK(back.is_guarded(nbytes));
}

}  // namespace

int main() {
  const std::vector<uint8_t> source = pattern(300001);
  for (const char* path : kPaths) {
    if (!force_vector_path(path)) continue;
    for (size_t nbytes = 0; nbytes <= 300; ++nbytes)
      splits_and_joins(source.data() + nbytes % 7, nbytes);
    splits_and_joins(source.data(), source.size());
  }
}
