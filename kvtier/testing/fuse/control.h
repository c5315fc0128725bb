// The hidden directory ".kvtier" of every emulated device: "stats" to read, "control" to write.
#pragma once

#include <sys/stat.h>

#include "device.h"

// Whether the request is about the hidden files, which no rule and no counter sees.
bool is_control(fuse_ino_t ino);
// The hidden child's number, or 0.
fuse_ino_t control_find(fuse_ino_t parent, const char* name);
void control_attributes(fuse_ino_t ino, struct stat* attributes);

// The state as JSON text, freed by the caller; NULL without memory.
char* control_stats(void);
// Obey one command: a verb, then "key=value" lines. 0 or an errno.
int control_obey(const char* text, size_t length);
