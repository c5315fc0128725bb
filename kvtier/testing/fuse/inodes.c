#include "inodes.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BUCKETS = 4096 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct inode root = {.path = "", .lookups = 2};  // never forgotten
static struct inode* buckets[BUCKETS];
static int64_t used, pending;

static off_t page_up(off_t offset) {
  return (offset + PAGE - 1) & -PAGE;
}

static struct inode** place(ino_t number) {
  struct inode** at = &buckets[number % BUCKETS];
  while (*at && (*at)->number != number) at = &(*at)->next;
  return at;
}

bool inodes_setup(int backing) {
  struct stat attributes;
  root.fd = backing;
  if (fstat(backing, &attributes)) return false;
  root.number = attributes.st_ino;
  *place(root.number) = &root;
  return true;
}

struct inode* inode_of(fuse_ino_t ino) {
  return ino == FUSE_ROOT_ID ? &root : (struct inode*)ino;
}

fuse_ino_t number_of(const struct inode* inode) {
  return inode == &root ? FUSE_ROOT_ID : (fuse_ino_t)inode;
}

static int open_backing(int parent, const char* name, mode_t mode) {
  if (S_ISDIR(mode)) return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (!S_ISREG(mode)) return openat(parent, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
  const int fd = openat(parent, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (fd >= 0 || errno != EACCES) return fd;
  return openat(parent, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
}

static void name_it(struct inode* inode, const struct inode* parent, const char* name) {
  char* path = NULL;
  if (inode == &root || asprintf(&path, "%s%s%s", parent->path, *parent->path ? "/" : "", name) < 0)
    return;
  free(inode->path);
  inode->path = path;
}

static void settle(struct inode* inode) {
  struct stat attributes;
  if (fstat(inode->fd, &attributes) || !S_ISREG(attributes.st_mode)) return;
  used += attributes.st_blocks * 512 - inode->charged;
  inode->charged = attributes.st_blocks * 512;
}

// What the kernel had forgotten was counted before, and still is.
static void adopt_space(struct inode* inode, const struct stat* attributes) {
  if (!S_ISREG(attributes->st_mode)) return;
  inode->charged = attributes->st_blocks * 512;
  if (inode->charged >= page_up(attributes->st_size)) inode->dense = page_up(attributes->st_size);
}

int inode_find(struct inode* parent, const char* name, int created, struct inode** found,
               struct stat* attributes) {
  pthread_mutex_lock(&lock);
  int error = 0, fd = created;
  if (fstatat(parent->fd, name, attributes, AT_SYMLINK_NOFOLLOW)) error = errno;
  struct inode** at = place(attributes->st_ino);
  if (!error && !*at) {
    if (fd < 0) fd = open_backing(parent->fd, name, attributes->st_mode);
    // The name may have changed hands since fstatat: what counts is what was opened.
    if (fd < 0 || fstat(fd, attributes)) error = errno;
    at = place(attributes->st_ino);
    if (!error && !*at && (*at = calloc(1, sizeof **at))) {
      (*at)->number = attributes->st_ino;
      (*at)->fd = fd;
      adopt_space(*at, attributes);
      fd = -1;
    }
  }
  if (!error && *at) {
    name_it(*at, parent, name);
    (*at)->lookups++;
    *found = *at;
  } else if (!error) {
    error = ENOMEM;
  }
  pthread_mutex_unlock(&lock);
  if (fd >= 0) close(fd);
  return error;
}

void inode_forget(struct inode* inode, uint64_t lookups) {
  pthread_mutex_lock(&lock);
  const bool last = inode != &root && (inode->lookups -= lookups) == 0;
  if (last) {
    struct stat attributes;
    if (fstat(inode->fd, &attributes) == 0 && attributes.st_nlink == 0) used -= inode->charged;
    struct inode** at = place(inode->number);
    *at = inode->next;
    if (inode->mapped) munmap(inode->mapped, device.capacity);
    close(inode->fd);
    free(inode->path);
    free(inode);
  }
  pthread_mutex_unlock(&lock);
}

void inode_opened(struct inode* inode) {
  pthread_mutex_lock(&lock);
  inode->opens++;
  pthread_mutex_unlock(&lock);
}

// The kernel forgets an inode some time after its last use, but its space must be free now.
static void free_if_dead(struct inode* inode) {
  struct stat attributes;
  if (inode->opens || fstat(inode->fd, &attributes) || attributes.st_nlink) return;
  if (S_ISREG(attributes.st_mode) && ftruncate(inode->fd, 0) == 0) settle(inode);
}

void inode_closed(struct inode* inode) {
  pthread_mutex_lock(&lock);
  inode->opens--;
  free_if_dead(inode);
  pthread_mutex_unlock(&lock);
}

void inode_unlinked(ino_t number) {
  pthread_mutex_lock(&lock);
  struct inode* inode = *place(number);
  if (inode) free_if_dead(inode);
  pthread_mutex_unlock(&lock);
}

const char* inode_bytes(struct inode* inode, off_t offset, off_t length) {
  const char* bytes = NULL;
  pthread_mutex_lock(&lock);
  if (offset + length <= inode->dense && offset + length <= device.capacity) {
    if (!inode->mapped) {
      void* mapped = mmap(NULL, device.capacity, PROT_READ, MAP_SHARED, inode->fd, 0);
      if (mapped != MAP_FAILED) inode->mapped = mapped;
    }
    if (inode->mapped) bytes = inode->mapped + offset;
  }
  pthread_mutex_unlock(&lock);
  return bytes;
}

void inode_path(const struct inode* inode, char* path, size_t size) {
  pthread_mutex_lock(&lock);
  snprintf(path, size, "%s", inode->path);
  pthread_mutex_unlock(&lock);
}

int64_t space_used(void) {
  pthread_mutex_lock(&lock);
  const int64_t now = used;
  pthread_mutex_unlock(&lock);
  return now;
}

bool space_reserve(struct inode* inode, off_t offset, off_t length, int64_t limit,
                   int64_t* reserved) {
  pthread_mutex_lock(&lock);
  const off_t first = offset < inode->dense ? inode->dense : offset & -PAGE;
  const off_t end = page_up(offset + length);
  *reserved = end > first ? end - first : 0;
  const bool fits = *reserved == 0 || used + pending + *reserved <= limit;
  if (fits) pending += *reserved;
  pthread_mutex_unlock(&lock);
  return fits;
}

void space_settle(struct inode* inode, off_t offset, off_t length, int64_t reserved) {
  pthread_mutex_lock(&lock);
  pending -= reserved;
  const off_t end = page_up(offset + length);
  if (length > 0 && offset <= inode->dense && inode->dense < end) inode->dense = end;
  if (reserved) settle(inode);
  pthread_mutex_unlock(&lock);
}

void space_cut(struct inode* inode, off_t from) {
  pthread_mutex_lock(&lock);
  const off_t kept = from & -PAGE;  // a page cut in half stays, but counting it again is harmless
  if (inode->dense > kept) inode->dense = kept;
  settle(inode);
  pthread_mutex_unlock(&lock);
}
