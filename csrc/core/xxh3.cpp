#include "xxh3.hpp"

#include <cstring>

#include "bytes.hpp"
#include "xxh3_kernels.hpp"

namespace kvtier {
namespace {

using xxh3::Accumulator;
using xxh3::Secret;

constexpr uint64_t kPrime32_2 = 0x85EBCA77U;
constexpr uint64_t kPrime32_3 = 0xC2B2AE3DU;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87U;
constexpr uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4FU;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9U;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63U;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5U;
constexpr uint64_t kAvalanche = 0x165667919E3779F9U;
constexpr size_t kMergeKey = 11;

constexpr Accumulator kStart{{kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4,
                              kPrime32_2, kPrime64_5, xxh3::kPrime32_1}};

// The specification's default secret.
constexpr Secret kSecret{
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

Secret seeded_secret(uint64_t seed) {
  Secret secret;
  for (size_t at = 0; at < secret.size(); at += 16) {
    store_le64(&secret[at], load_le64(&kSecret[at]) + seed);
    store_le64(&secret[at + 8], load_le64(&kSecret[at + 8]) - seed);
  }
  return secret;
}

uint64_t multiply_and_fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merge(const Accumulator& acc, const Secret& secret, size_t length) {
  uint64_t hash = length * kPrime64_1;
  for (size_t i = 0; i < 8; i += 2) {
    const uint8_t* key = &secret[kMergeKey + 8 * i];
    hash += multiply_and_fold(acc.lane[i] ^ load_le64(key), acc.lane[i + 1] ^ load_le64(key + 8));
  }
  hash = (hash ^ (hash >> 37)) * kAvalanche;
  return hash ^ (hash >> 32);
}

// Whole steps; what is left, at most a stripe, is the end of the input.
size_t stripes_of(size_t length) {
  return (length - 1) / xxh3::kStripe;
}

}  // namespace

uint64_t xxh3_64(const void* data, size_t length, uint64_t seed) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  const Secret secret = seeded_secret(seed);
  Accumulator acc = kStart;
  xxh3::kernel()(acc, bytes, stripes_of(length), bytes + length - xxh3::kStripe, secret, {});
  return merge(acc, secret, length);
}

uint64_t xxh3_64_copy(void* dst, const void* src, size_t length, uint64_t seed) {
  const auto* bytes = static_cast<const uint8_t*>(src);
  auto* target = static_cast<uint8_t*>(dst);
  const xxh3::Kernel copying = xxh3::copying_kernel();
  if (copying == nullptr) {
    std::memcpy(target, bytes, length);
    return xxh3_64(bytes, length, seed);
  }
  const Secret secret = seeded_secret(seed);
  Accumulator acc = kStart;
  const size_t stripes = stripes_of(length);
  // At least a stripe stays behind, so that a copy which starts later ends within the input.
  const size_t streamed = (stripes - 1) / xxh3::kStripesPerBlock * xxh3::kBlock;
  const size_t head = -reinterpret_cast<uintptr_t>(dst) % xxh3::kStripe;
  const size_t tail = head + streamed;
  copying(acc, bytes, streamed / xxh3::kStripe, nullptr, secret, {target + head, bytes + head});
  xxh3::kernel()(acc, bytes + streamed, stripes - streamed / xxh3::kStripe,
                 bytes + length - xxh3::kStripe, secret, {});
  std::memcpy(target, bytes, head);
  std::memcpy(target + tail, bytes + tail, length - tail);
  return merge(acc, secret, length);
}

}  // namespace kvtier
