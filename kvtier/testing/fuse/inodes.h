// The files that the kernel knows, and the space they take.
#pragma once

#include <sys/stat.h>

#include "device.h"

struct inode {
  ino_t number;      // of the backing file
  int fd;            // read-write for a file, O_PATH for what is neither file nor directory
  char* path;        // relative to the mount, for fault rules; changes under the table's lock
  uint64_t lookups;  // references that the kernel holds
  unsigned opens;
  int64_t charged;  // bytes counted in space_used
  off_t dense;      // everything before this offset is allocated
  char* mapped;     // device.capacity bytes of address space over the file, from its first read on
  struct inode* next;
};

bool inodes_setup(int backing);
struct inode* inode_of(fuse_ino_t ino);
fuse_ino_t number_of(const struct inode* inode);

// Look a name up, or adopt `created` (an open descriptor of a new file, else -1). 0 or an errno.
int inode_find(struct inode* parent, const char* name, int created, struct inode** found,
               struct stat* attributes);
void inode_forget(struct inode* inode, uint64_t lookups);
void inode_opened(struct inode* inode);
void inode_closed(struct inode* inode);
// The name is gone: give back the space at once if it was the last, and nobody has it open.
void inode_unlinked(ino_t number);
// [offset, offset + length) of the file in memory; NULL if it is not all allocated, for touching a
// hole would allocate it.
const char* inode_bytes(struct inode* inode, off_t offset, off_t length);
void inode_path(const struct inode* inode, char* path, size_t size);

int64_t space_used(void);
// Room for a write of [offset, offset + length) under `limit` bytes; pair with space_settle.
// `*reserved` is what it may newly allocate. False if there is no room.
bool space_reserve(struct inode* inode, off_t offset, off_t length, int64_t limit,
                   int64_t* reserved);
// Count what is allocated now. [offset, offset + length) has been allocated, if length > 0.
void space_settle(struct inode* inode, off_t offset, off_t length, int64_t reserved);
// The file was cut or punched from here on.
void space_cut(struct inode* inode, off_t from);
