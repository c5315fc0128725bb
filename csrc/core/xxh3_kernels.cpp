#include "xxh3_kernels.hpp"

#include "bytes.hpp"
#include "cpu.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier::xxh3 {
namespace {

constexpr size_t kScrambleKey = kSecretSize - kStripe;
constexpr size_t kLastStripeKey = kSecretSize - kStripe - 7;

// Reads ahead of the hash so that the next lines arrive while this one is multiplied.
constexpr size_t kPrefetchAhead = 4096;

void add_stripe(Accumulator& acc, const uint8_t* data, const uint8_t* key) {
  for (size_t i = 0; i < 8; ++i) {
    const uint64_t value = load_le64(data + 8 * i);
    const uint64_t mixed = value ^ load_le64(key + 8 * i);
    acc.lane[i ^ 1] += value;
    acc.lane[i] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
  }
}

void scramble(Accumulator& acc, const uint8_t* key) {
  for (size_t i = 0; i < 8; ++i) {
    uint64_t lane = acc.lane[i];
    lane ^= lane >> 47;
    lane ^= load_le64(key + 8 * i);
    acc.lane[i] = lane * kPrime32_1;
  }
}

void run_portable(Accumulator& acc, const uint8_t* data, size_t stripes, const uint8_t* last,
                  const Secret& secret, Copied /*copied*/) {
  for (; stripes >= kStripesPerBlock; stripes -= kStripesPerBlock, data += kBlock) {
    for (size_t s = 0; s < kStripesPerBlock; ++s)
      add_stripe(acc, data + s * kStripe, &secret[s * kSecretStep]);
    scramble(acc, &secret[kScrambleKey]);
  }
  for (size_t s = 0; s < stripes; ++s)
    add_stripe(acc, data + s * kStripe, &secret[s * kSecretStep]);
  if (last != nullptr) add_stripe(acc, last, &secret[kLastStripeKey]);
}

#if defined(__x86_64__)

#define KVTIER_AVX2 __attribute__((target("avx2"), always_inline)) inline
#define KVTIER_AVX512 __attribute__((target("avx512f"), always_inline)) inline

struct Avx2Lanes {
  __m256i low, high;
};

KVTIER_AVX2 __m256i load256(const uint8_t* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

KVTIER_AVX2 void stream_stripe_avx2(uint8_t* dst, const uint8_t* data) {
  auto* to = reinterpret_cast<__m256i*>(dst);
  _mm256_stream_si256(to, load256(data));
  _mm256_stream_si256(to + 1, load256(data + 32));
}

KVTIER_AVX2 __m256i add_half(__m256i acc, __m256i data, __m256i key) {
  const __m256i mixed = _mm256_xor_si256(data, key);
  const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
  const __m256i neighbour = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(acc, _mm256_add_epi64(product, neighbour));
}

KVTIER_AVX2 void add_stripe(Avx2Lanes& acc, const uint8_t* data, const uint8_t* key) {
  acc.low = add_half(acc.low, load256(data), load256(key));
  acc.high = add_half(acc.high, load256(data + 32), load256(key + 32));
}

KVTIER_AVX2 __m256i scramble_half(__m256i acc, __m256i key) {
  const __m256i prime = _mm256_set1_epi64x(kPrime32_1);
  acc = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), key);
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(acc, prime), _mm256_slli_epi64(high, 32));
}

template <bool kCopies>
__attribute__((target("avx2"))) void run_avx2(Accumulator& memory, const uint8_t* data,
                                              size_t stripes, const uint8_t* last,
                                              const Secret& secret, Copied copied) {
  __m256i* lanes = reinterpret_cast<__m256i*>(memory.lane);
  Avx2Lanes acc{_mm256_load_si256(lanes), _mm256_load_si256(lanes + 1)};
  for (; stripes >= kStripesPerBlock; stripes -= kStripesPerBlock, data += kBlock) {
    for (size_t s = 0; s < kStripesPerBlock; ++s) {
      _mm_prefetch(reinterpret_cast<const char*>(data + s * kStripe + kPrefetchAhead), _MM_HINT_T0);
      if constexpr (kCopies) stream_stripe_avx2(copied.dst + s * kStripe, copied.src + s * kStripe);
      add_stripe(acc, data + s * kStripe, &secret[s * kSecretStep]);
    }
    if constexpr (kCopies) copied = {copied.dst + kBlock, copied.src + kBlock};
    acc.low = scramble_half(acc.low, load256(&secret[kScrambleKey]));
    acc.high = scramble_half(acc.high, load256(&secret[kScrambleKey + 32]));
  }
  for (size_t s = 0; s < stripes; ++s)
    add_stripe(acc, data + s * kStripe, &secret[s * kSecretStep]);
  if (last != nullptr) add_stripe(acc, last, &secret[kLastStripeKey]);
  _mm256_store_si256(lanes, acc.low);
  _mm256_store_si256(lanes + 1, acc.high);
}

KVTIER_AVX512 void stream_stripe_avx512(uint8_t* dst, const uint8_t* data) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(data));
}

KVTIER_AVX512 __m512i add_stripe(__m512i acc, const uint8_t* at, const uint8_t* key) {
  const __m512i data = _mm512_loadu_si512(at);
  const __m512i mixed = _mm512_xor_si512(data, _mm512_loadu_si512(key));
  const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
  const __m512i neighbour = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
  return _mm512_add_epi64(acc, _mm512_add_epi64(product, neighbour));
}

KVTIER_AVX512 __m512i scramble(__m512i acc, const uint8_t* key) {
  const __m512i prime = _mm512_set1_epi64(kPrime32_1);
  acc =
      _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)), _mm512_loadu_si512(key));
  const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(acc, 32), prime);
  return _mm512_add_epi64(_mm512_mul_epu32(acc, prime), _mm512_slli_epi64(high, 32));
}

template <bool kCopies>
__attribute__((target("avx512f"))) void run_avx512(Accumulator& memory, const uint8_t* data,
                                                   size_t stripes, const uint8_t* last,
                                                   const Secret& secret, Copied copied) {
  __m512i acc = _mm512_load_si512(memory.lane);
  for (; stripes >= kStripesPerBlock; stripes -= kStripesPerBlock, data += kBlock) {
    for (size_t s = 0; s < kStripesPerBlock; ++s) {
      _mm_prefetch(reinterpret_cast<const char*>(data + s * kStripe + kPrefetchAhead), _MM_HINT_T0);
      if constexpr (kCopies)
        stream_stripe_avx512(copied.dst + s * kStripe, copied.src + s * kStripe);
      acc = add_stripe(acc, data + s * kStripe, &secret[s * kSecretStep]);
    }
    if constexpr (kCopies) copied = {copied.dst + kBlock, copied.src + kBlock};
    acc = scramble(acc, &secret[kScrambleKey]);
  }
  for (size_t s = 0; s < stripes; ++s)
    acc = add_stripe(acc, data + s * kStripe, &secret[s * kSecretStep]);
  if (last != nullptr) acc = add_stripe(acc, last, &secret[kLastStripeKey]);
  _mm512_store_si512(memory.lane, acc);
}

#endif

}  // namespace

Kernel kernel() {
#if defined(__x86_64__)
  switch (vector_path()) {
    case VectorPath::kAvx512:
      return run_avx512<false>;
    case VectorPath::kAvx2:
      return run_avx2<false>;
    case VectorPath::kPortable:
      break;
  }
#endif
  return run_portable;
}

Kernel copying_kernel() {
#if defined(__x86_64__)
  switch (vector_path()) {
    case VectorPath::kAvx512:
      return run_avx512<true>;
    case VectorPath::kAvx2:
      return run_avx2<true>;
    case VectorPath::kPortable:
      break;
  }
#endif
  return nullptr;
}

}  // namespace kvtier::xxh3
