// The device ends with its parent, whatever happens to either.
#pragma once

#include <stdbool.h>

// To be called before any thread starts: SIGTERM, SIGINT and the parent's end will unmount, delete
// the backing files and exit. False if that cannot be had.
bool lifeline_start(void);

// Unmount, delete the backing files and end the process, even under hanging requests.
_Noreturn void lifeline_end(void);
