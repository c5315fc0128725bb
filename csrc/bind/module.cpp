#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <system_error>

#include "bind.hpp"
#include "cpu.hpp"
#include "engine.hpp"

namespace kvtier::bind {
namespace {

void raise_os_error(const std::exception_ptr& exception, void*) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::system_error& error) {
    const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

std::map<std::string, std::string> features() {
  const std::string refusal = probe_uring();
  return {{"checksum", std::string(name_of(vector_path()))},
          {"uring", refusal.empty() ? "yes" : "no: " + refusal}};
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() = "Native I/O engines, checksums, copies and lookups of kvtier.";
  // An engine that the interpreter outlives is legal: see csrc/README.md.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(raise_os_error);
  bind_engine(module);
  bind_index(module);
  bind_memory(module);
  module.def("features", &features, "What this build can do on this machine, for people to read.");
}

}  // namespace kvtier::bind
