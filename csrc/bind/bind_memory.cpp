#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>

#include "bind.hpp"
#include "copy.hpp"
#include "cpu.hpp"
#include "planes.hpp"
#include "xxh3.hpp"

namespace kvtier::bind {
namespace {

void copy(const Array<const uint64_t>& src, const Array<const uint64_t>& dst,
          const Array<const uint64_t>& lengths) {
  if (src.size() != lengths.size() || dst.size() != lengths.size())
    throw std::invalid_argument("src, dst and nbytes must have one length");
  const nb::gil_scoped_release released;
  copy_many(span_of(src), span_of(dst), span_of(lengths));
}

void require_long_input(uint64_t length) {
  if (length <= kXxh3ShortInput)
    throw std::invalid_argument("only inputs longer than 240 bytes are supported");
}

void copy_and_hash(const Array<const uint64_t>& src, const Array<const uint64_t>& dst,
                   const Array<const uint64_t>& lengths, const Array<uint64_t>& sums) {
  const size_t count = lengths.size();
  if (src.size() != count || dst.size() != count || sums.size() != count)
    throw std::invalid_argument("src, dst, nbytes and sums must have one length");
  for (const uint64_t length : span_of(lengths)) require_long_input(length);
  const nb::gil_scoped_release released;
  copy_hashed(span_of(src), span_of(dst), span_of(lengths), span_of(sums));
}

uint64_t xxh3(uint64_t address, uint64_t length, uint64_t seed) {
  require_long_input(length);
  const nb::gil_scoped_release released;
  return xxh3_64(reinterpret_cast<const void*>(address), length, seed);
}

void xxh3_parts(uint64_t address, uint64_t length, uint64_t part_bytes, uint64_t seed,
                const Array<uint64_t>& out) {
  require_long_input(part_bytes);
  const uint64_t tail = length % part_bytes;
  const uint64_t parts = length / part_bytes + (tail != 0);
  if (tail != 0) require_long_input(tail);
  if (out.size() != parts) throw std::invalid_argument("out must hold one number per part");
  uint64_t* sums = out.data();
  const nb::gil_scoped_release released;
  for (uint64_t part = 0; part < parts; ++part) {
    const uint64_t at = part * part_bytes;
    sums[part] = xxh3_64(reinterpret_cast<const uint8_t*>(address) + at,
                         std::min(part_bytes, length - at), seed + part);
  }
}

void split(uint64_t src, uint64_t nbytes, uint64_t high, uint64_t low) {
  const nb::gil_scoped_release released;
  split_planes16(reinterpret_cast<const uint8_t*>(src), nbytes, reinterpret_cast<uint8_t*>(high),
                 reinterpret_cast<uint8_t*>(low));
}

void join(uint64_t high, uint64_t low, uint64_t nbytes, uint64_t dst) {
  const nb::gil_scoped_release released;
  join_planes16(reinterpret_cast<const uint8_t*>(high), reinterpret_cast<const uint8_t*>(low),
                nbytes, reinterpret_cast<uint8_t*>(dst));
}

void set_checksum_path(const std::string& name) {
  if (!force_vector_path(name))
    throw std::invalid_argument("unknown or unsupported path \"" + name + "\"");
}

}  // namespace

void bind_memory(nb::module_& module) {
  module.def("copy_many", &copy, nb::arg("src").noconvert(), nb::arg("dst").noconvert(),
             nb::arg("nbytes").noconvert(), "Copies nbytes[i] bytes from src[i] to dst[i].");
  module.def("copy_hashed", &copy_and_hash, nb::arg("src").noconvert(), nb::arg("dst").noconvert(),
             nb::arg("nbytes").noconvert(), nb::arg("sums").noconvert(),
             "copy_many that hashes: sums[i] becomes the xxh3_64 of piece i.");
  module.def("xxh3_64", &xxh3, nb::arg("address"), nb::arg("length"), nb::arg("seed"),
             "xxh3_64 of more than 240 bytes.");
  module.def("xxh3_parts", &xxh3_parts, nb::arg("address"), nb::arg("length"),
             nb::arg("part_bytes"), nb::arg("seed"), nb::arg("out").noconvert(),
             "xxh3_64 of every part, part j with seed + j.");
  module.def("split_planes16", &split, nb::arg("src"), nb::arg("nbytes"), nb::arg("high"),
             nb::arg("low"), "Splits 16-bit elements, rotated left by one bit, into two planes.");
  module.def("join_planes16", &join, nb::arg("high"), nb::arg("low"), nb::arg("nbytes"),
             nb::arg("dst"), "Joins the planes of split_planes16.");
  module.def(
      "checksum_path", [] { return std::string(name_of(vector_path())); },
      "The vector path in use: \"portable\", \"avx2\" or \"avx512\".");
  module.def("set_checksum_path", &set_checksum_path, nb::arg("name"),
             "Forces a vector path for the whole process, for tests; \"auto\" undoes it.");
}

}  // namespace kvtier::bind
