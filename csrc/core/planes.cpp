#include "planes.hpp"

#include "cpu.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

void split_elements(const uint8_t* src, size_t elements, uint8_t* high, uint8_t* low) {
  for (size_t i = 0; i < elements; ++i) {
    const unsigned lower = src[2 * i];
    const unsigned upper = src[2 * i + 1];
    high[i] = static_cast<uint8_t>(upper << 1 | lower >> 7);
    low[i] = static_cast<uint8_t>(lower << 1 | upper >> 7);
  }
}

void join_elements(const uint8_t* high, const uint8_t* low, size_t elements, uint8_t* dst) {
  for (size_t i = 0; i < elements; ++i) {
    const unsigned upper = high[i];
    const unsigned lower = low[i];
    dst[2 * i] = static_cast<uint8_t>(lower >> 1 | upper << 7);
    dst[2 * i + 1] = static_cast<uint8_t>(upper >> 1 | lower << 7);
  }
}

#if defined(__x86_64__)

constexpr size_t kStep = 32;

// Both return how many elements they did: whole steps only. Cache and memory are the limit already
// at this width, so there is no wider path.
__attribute__((target("avx2"))) size_t split_avx2(const uint8_t* src, size_t elements,
                                                  uint8_t* high, uint8_t* low) {
  const __m256i low_byte = _mm256_set1_epi16(0xFF);
  size_t at = 0;
  for (; at + kStep <= elements; at += kStep) {
    const auto* from = reinterpret_cast<const __m256i*>(src + 2 * at);
    __m256i first = _mm256_loadu_si256(from);
    __m256i second = _mm256_loadu_si256(from + 1);
    first = _mm256_or_si256(_mm256_slli_epi16(first, 1), _mm256_srli_epi16(first, 15));
    second = _mm256_or_si256(_mm256_slli_epi16(second, 1), _mm256_srli_epi16(second, 15));
    const __m256i upper =
        _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
    const __m256i lower =
        _mm256_packus_epi16(_mm256_and_si256(first, low_byte), _mm256_and_si256(second, low_byte));
    // A pack works on the halves of its inputs in turn; this puts the four quarters in order.
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + at),
                        _mm256_permute4x64_epi64(upper, 0xD8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + at),
                        _mm256_permute4x64_epi64(lower, 0xD8));
  }
  return at;
}

__attribute__((target("avx2"))) size_t join_avx2(const uint8_t* high, const uint8_t* low,
                                                 size_t elements, uint8_t* dst) {
  size_t at = 0;
  for (; at + kStep <= elements; at += kStep) {
    const __m256i upper = _mm256_permute4x64_epi64(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high + at)), 0xD8);
    const __m256i lower = _mm256_permute4x64_epi64(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + at)), 0xD8);
    __m256i first = _mm256_unpacklo_epi8(lower, upper);
    __m256i second = _mm256_unpackhi_epi8(lower, upper);
    first = _mm256_or_si256(_mm256_srli_epi16(first, 1), _mm256_slli_epi16(first, 15));
    second = _mm256_or_si256(_mm256_srli_epi16(second, 1), _mm256_slli_epi16(second, 15));
    auto* to = reinterpret_cast<__m256i*>(dst + 2 * at);
    _mm256_storeu_si256(to, first);
    _mm256_storeu_si256(to + 1, second);
  }
  return at;
}

#endif

}  // namespace

void split_planes16(const uint8_t* src, size_t nbytes, uint8_t* high, uint8_t* low) {
  const size_t elements = nbytes / 2;
  size_t done = 0;
#if defined(__x86_64__)
  if (vector_path() != VectorPath::kPortable) done = split_avx2(src, elements, high, low);
#endif
  split_elements(src + 2 * done, elements - done, high + done, low + done);
  if (nbytes % 2 != 0) low[elements] = src[nbytes - 1];
}

void join_planes16(const uint8_t* high, const uint8_t* low, size_t nbytes, uint8_t* dst) {
  const size_t elements = nbytes / 2;
  size_t done = 0;
#if defined(__x86_64__)
  if (vector_path() != VectorPath::kPortable) done = join_avx2(high, low, elements, dst);
#endif
  join_elements(high + done, low + done, elements - done, dst + 2 * done);
  if (nbytes % 2 != 0) dst[nbytes - 1] = low[elements];
}

}  // namespace kvtier
