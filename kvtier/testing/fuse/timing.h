// When a device answers: lanes (requests served at once), a wire per direction, and a latency.
#pragma once

#include <stddef.h>
#include <stdint.h>

enum direction { READING, WRITING };

// Take latencies, bandwidths and the number of lanes from "key=value" arguments.
void timing_configure(char* const* fields);

// Serve one request: return once the device would have answered it.
void timing_serve(enum direction direction, size_t bytes);

int64_t now_ns(void);
void sleep_until_ns(int64_t when);

// The n-th pseudo-random number of a seed, uniform in [0, 1).
double random_fraction(uint64_t seed, uint64_t n);
