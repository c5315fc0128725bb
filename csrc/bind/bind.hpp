// What the parts of the extension share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <span>

namespace kvtier::bind {

namespace nb = nanobind;

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<T> span_of(const Array<T>& array) {
  return {array.data(), array.size()};
}

void bind_engine(nb::module_& module);
void bind_index(nb::module_& module);
void bind_memory(nb::module_& module);

}  // namespace kvtier::bind
