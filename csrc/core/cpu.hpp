// Which vector instructions to use: chosen once at run time, or forced by a test.
#pragma once

#include <string_view>

namespace kvtier {

enum class VectorPath { kPortable, kAvx2, kAvx512 };

/// The widest path this processor and operating system support, unless another one was forced.
VectorPath vector_path();

/// Forces "portable", "avx2" or "avx512" for the whole process; "auto" takes the widest again.
/// Returns false, and changes nothing, if the path is unknown or unsupported here.
bool force_vector_path(std::string_view name);

std::string_view name_of(VectorPath path);

}  // namespace kvtier
