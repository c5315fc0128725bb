// "key=value" texts: the device's arguments and its control commands.
#pragma once

#include <stdint.h>

// The value of `key` among NULL-terminated "key=value" texts, or `otherwise`.
const char* field(char* const* fields, const char* key, const char* otherwise);
int64_t field_number(char* const* fields, const char* key, int64_t otherwise);
double field_fraction(char* const* fields, const char* key, double otherwise);
