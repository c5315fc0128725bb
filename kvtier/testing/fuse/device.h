// What the parts of an emulated device share: its settings, its counters, its operations.
#pragma once

#include <errno.h>
#include <fuse_lowlevel.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { PAGE = 4096, REQUEST_LIMIT = 1 << 20, BACKGROUND_LIMIT = 256, THREAD_LIMIT = 512 };

// The kinds of request that faults tell apart.
enum op { OP_READ, OP_WRITE, OP_FSYNC, OP_OPEN, OP_FALLOCATE, OP_FTRUNCATE, OP_METADATA, OP_KINDS };

struct counters {
  atomic_llong reads, read_bytes, writes, written_bytes, syncs;
  atomic_llong outstanding, most_outstanding;  // requests that arrived and are not yet answered
  atomic_llong most_in_flight;                 // requests that the device served at once
  atomic_llong hanging, faults;
};

struct device {
  const char *name, *backing, *mountpoint;
  pid_t parent;
  int64_t capacity;  // bytes
  struct counters counters;
  struct fuse_session* session;
};

// One process is one device.
extern struct device device;

// Count one request in; pair with count_out.
void count_in(void);
void count_out(void);
void count_most(atomic_llong* most, long long value);

// The two halves of the file system's operations (names and attributes; opening and bytes).
void add_tree_operations(struct fuse_lowlevel_ops* ops);
void add_data_operations(struct fuse_lowlevel_ops* ops);
