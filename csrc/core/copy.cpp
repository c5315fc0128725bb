#include "copy.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cpu.hpp"
#include "xxh3.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

using Numbers = std::span<const uint64_t>;
using Copy = void (*)(Numbers src, Numbers dst, Numbers lengths);

uint8_t* target(uint64_t address) {
  return reinterpret_cast<uint8_t*>(address);
}

const uint8_t* source(uint64_t address) {
  return reinterpret_cast<const uint8_t*>(address);
}

// Streaming stores are weakly ordered: without this another thread could see them late.
void publish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void copy_portable(Numbers src, Numbers dst, Numbers lengths) {
  for (size_t i = 0; i < lengths.size(); ++i)
    if (lengths[i] != 0) std::memcpy(target(dst[i]), source(src[i]), lengths[i]);
}

#if defined(__x86_64__)

constexpr size_t kLine = 64;
constexpr size_t kStep = 4 * kLine;

// Pieces are copied side by side, a step of each in turn: alone, a piece of a few pages would end
// before the processor's own read-ahead is under way. Small ones also gain from more of them, and
// from having the next ones fetched meanwhile.
constexpr size_t kSmallPiece = 64 << 10;
constexpr size_t kSmallLanes = 8;
constexpr size_t kLargeLanes = 4;

// A piece without its ragged ends: the destination starts on a cache line, the length is whole
// steps.
struct Lane {
  uint8_t* dst;
  const uint8_t* src;
  size_t length;
};

// Copies the ends, or all of a piece that is too small to bypass the cache; what is left is the
// lane.
Lane trim(uint8_t* dst, const uint8_t* src, size_t length) {
  if (length < kStreamingPiece) {
    if (length != 0) std::memcpy(dst, src, length);
    return {dst, src, 0};
  }
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(dst) % kLine) % kLine;
  const size_t steps = (length - head) / kStep * kStep;
  const size_t tail = head + steps;
  std::memcpy(dst, src, head);
  std::memcpy(dst + tail, src + tail, length - tail);
  return {dst + head, src + head, steps};
}

__attribute__((target("avx2"))) void step_avx2(uint8_t* dst, const uint8_t* src) {
  for (size_t at = 0; at < kStep; at += kLine) {
    const auto* from = reinterpret_cast<const __m256i*>(src + at);
    auto* to = reinterpret_cast<__m256i*>(dst + at);
    const __m256i low = _mm256_loadu_si256(from);
    const __m256i high = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, low);
    _mm256_stream_si256(to + 1, high);
  }
}

__attribute__((target("avx512f"))) void step_avx512(uint8_t* dst, const uint8_t* src) {
  for (size_t at = 0; at < kStep; at += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), _mm512_loadu_si512(src + at));
}

void fetch_step(const uint8_t* src) {
  for (size_t at = 0; at < kStep; at += kLine)
    _mm_prefetch(reinterpret_cast<const char*>(src + at), _MM_HINT_T1);
}

template <auto kCopyStep>
void copy_streaming(Numbers src, Numbers dst, Numbers lengths) {
  const size_t pieces = lengths.size();
  Lane lanes[kSmallLanes];
  for (size_t first = 0, next; first < pieces; first = next) {
    const bool small = lengths[first] <= kSmallPiece;
    next = std::min(first + (small ? kSmallLanes : kLargeLanes), pieces);
    const size_t count = next - first;
    size_t together = SIZE_MAX;
    for (size_t i = 0; i < count; ++i) {
      lanes[i] = trim(target(dst[first + i]), source(src[first + i]), lengths[first + i]);
      together = std::min(together, lanes[i].length);
    }
    const size_t fetched = small ? std::min(count, pieces - next) : 0;
    for (size_t at = 0; at < together; at += kStep)
      for (size_t i = 0; i < count; ++i) {
        if (i < fetched && at < lengths[next + i]) fetch_step(source(src[next + i]) + at);
        kCopyStep(lanes[i].dst + at, lanes[i].src + at);
      }
    for (size_t i = 0; i < count; ++i)
      for (size_t at = together; at < lanes[i].length; at += kStep)
        kCopyStep(lanes[i].dst + at, lanes[i].src + at);
  }
  publish_stores();
}

#endif

Copy copy_for(uint64_t total) {
  if (total < kStreamingTotal) return copy_portable;
#if defined(__x86_64__)
  switch (vector_path()) {
    case VectorPath::kAvx512:
      return copy_streaming<step_avx512>;
    case VectorPath::kAvx2:
      return copy_streaming<step_avx2>;
    case VectorPath::kPortable:
      break;
  }
#endif
  return copy_portable;
}

}  // namespace

void copy_many(std::span<const uint64_t> src, std::span<const uint64_t> dst,
               std::span<const uint64_t> lengths) {
  copy_for(std::accumulate(lengths.begin(), lengths.end(), uint64_t{0}))(src, dst, lengths);
}

void copy_hashed(std::span<const uint64_t> src, std::span<const uint64_t> dst,
                 std::span<const uint64_t> lengths, std::span<uint64_t> sums) {
  for (size_t i = 0; i < lengths.size(); ++i)
    sums[i] = xxh3_64_copy(target(dst[i]), source(src[i]), lengths[i], 0);
  publish_stores();
}

}  // namespace kvtier
