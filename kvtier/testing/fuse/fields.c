#include "fields.h"

#include <stdlib.h>
#include <string.h>

const char* field(char* const* fields, const char* key, const char* otherwise) {
  const size_t length = strlen(key);
  for (; *fields; fields++)
    if (strncmp(*fields, key, length) == 0 && (*fields)[length] == '=') return *fields + length + 1;
  return otherwise;
}

int64_t field_number(char* const* fields, const char* key, int64_t otherwise) {
  const char* text = field(fields, key, NULL);
  return text ? strtoll(text, NULL, 10) : otherwise;
}

double field_fraction(char* const* fields, const char* key, double otherwise) {
  const char* text = field(fields, key, NULL);
  return text ? strtod(text, NULL) : otherwise;
}
