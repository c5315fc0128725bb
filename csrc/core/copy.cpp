#include "copy.hpp"

#include <cstring>
#include <numeric>

#include "cpu.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

using Copy = void (*)(uint8_t* dst, const uint8_t* src, size_t length);

void copy_portable(uint8_t* dst, const uint8_t* src, size_t length) {
  std::memcpy(dst, src, length);
}

#if defined(__x86_64__)

constexpr size_t kLine = 64;

// Each streaming copy below takes a destination on a cache line and a whole number of lines.
__attribute__((target("avx2"))) void stream_avx2(uint8_t* dst, const uint8_t* src, size_t length) {
  for (size_t at = 0; at < length; at += kLine) {
    const auto* from = reinterpret_cast<const __m256i*>(src + at);
    auto* to = reinterpret_cast<__m256i*>(dst + at);
    const __m256i low = _mm256_loadu_si256(from);
    const __m256i high = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, low);
    _mm256_stream_si256(to + 1, high);
  }
}

__attribute__((target("avx512f"))) void stream_avx512(uint8_t* dst, const uint8_t* src,
                                                      size_t length) {
  for (size_t at = 0; at < length; at += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), _mm512_loadu_si512(src + at));
}

template <Copy kStream>
void copy_streaming(uint8_t* dst, const uint8_t* src, size_t length) {
  if (length < kStreamingPiece) return copy_portable(dst, src, length);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(dst) % kLine) % kLine;
  const size_t lines = (length - head) / kLine * kLine;
  const size_t tail = head + lines;
  std::memcpy(dst, src, head);
  kStream(dst + head, src + head, lines);
  std::memcpy(dst + tail, src + tail, length - tail);
}

#endif

Copy copy_for(uint64_t total) {
  if (total < kStreamingTotal) return copy_portable;
#if defined(__x86_64__)
  switch (vector_path()) {
    case VectorPath::kAvx512:
      return copy_streaming<stream_avx512>;
    case VectorPath::kAvx2:
      return copy_streaming<stream_avx2>;
    case VectorPath::kPortable:
      break;
  }
#endif
  return copy_portable;
}

// Streaming stores are weakly ordered: without this another thread could see them late.
void publish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

void copy_many(std::span<const uint64_t> src, std::span<const uint64_t> dst,
               std::span<const uint64_t> lengths) {
  const Copy copy = copy_for(std::accumulate(lengths.begin(), lengths.end(), uint64_t{0}));
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] == 0) continue;
    copy(reinterpret_cast<uint8_t*>(dst[i]), reinterpret_cast<const uint8_t*>(src[i]), lengths[i]);
  }
  publish_stores();
}

}  // namespace kvtier
