// Opening files, and moving their bytes: what timing, counters and most faults act on.
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fuse.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "control.h"
#include "faults.h"
#include "timing.h"

// libfuse 3.14 cannot ask for parallel direct writes, so the reply to open is made by hand.
static void reply_open(fuse_req_t req, const void* handle) {
  const struct fuse_open_out reply = {.fh = (uint64_t)handle,
                                      .open_flags = FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES};
  fuse_reply_buf(req, (const char*)&reply, sizeof reply);
}

static void do_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info* info) {
  if (is_control(ino)) return reply_open(req, control_stats());
  struct inode* inode = inode_of(ino);
  const bool direct = info->flags & O_DIRECT;
  const struct effect effect =
      faults_meet(&(struct request){.op = OP_OPEN, .inode = inode, .direct = direct});
  int error = faults_suffer(&effect);
  if (!error && info->flags & O_TRUNC) {
    if (ftruncate(inode->fd, 0)) error = errno;
    space_cut(inode, 0);
  }
  if (error) return (void)fuse_reply_err(req, error);
  inode_opened(inode);
  reply_open(req, NULL);
}

static void do_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info* info) {
  if (is_control(ino))
    free((char*)info->fh);
  else
    inode_closed(inode_of(ino));
  fuse_reply_err(req, 0);
}

static void read_stats(fuse_req_t req, const char* text, size_t size, off_t offset) {
  const off_t left = text ? (off_t)strlen(text) - offset : 0;
  if (left <= 0) return (void)fuse_reply_buf(req, NULL, 0);
  fuse_reply_buf(req, text + offset, (size_t)left < size ? (size_t)left : size);
}

static void reply_copy(fuse_req_t req, const struct effect* effect, int fd, off_t offset,
                       size_t length) {
  unsigned char* bytes = malloc(length);
  const ssize_t got = bytes ? pread(fd, bytes, length, offset) : -1;
  if (got < 0) {
    fuse_reply_err(req, EIO);
  } else {
    faults_flip(effect, bytes, offset, got);
    fuse_reply_buf(req, (char*)bytes, got);
  }
  free(bytes);
}

static void reply_bytes(fuse_req_t req, const struct effect* effect, struct inode* inode,
                        off_t offset, size_t length) {
  // The kernel copies from the mapping into the reader's memory: one copy in all, and no pipe.
  const char* mapped = effect->flip_at < 0 ? inode_bytes(inode, offset, length) : NULL;
  if (mapped)
    fuse_reply_buf(req, mapped, length);
  else
    reply_copy(req, effect, inode->fd, offset, length);
}

static size_t clamp(off_t length, off_t limit) {
  if (limit < 0) return 0;
  return length < limit ? length : limit;
}

static void do_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                    struct fuse_file_info* info) {
  if (is_control(ino)) return read_stats(req, (char*)info->fh, size, offset);
  struct inode* inode = inode_of(ino);
  struct stat attributes;
  if (fstat(inode->fd, &attributes)) return (void)fuse_reply_err(req, errno);
  size_t length = clamp(size, attributes.st_size - offset);
  const struct request request = {
      .op = OP_READ, .inode = inode, .offset = offset, .length = length};
  const struct effect effect = faults_meet(&request);
  int error = 0;
  if (length) {  // no device is asked for what lies beyond the end
    count_in();
    timing_serve(READING, length);
    error = faults_suffer(&effect);
    if (effect.keep >= 0) length = clamp(length, effect.keep);
    device.counters.reads++;
    if (!error) device.counters.read_bytes += length;
    count_out();  // before the reply, so that whoever has the bytes finds them counted
  }
  if (error)
    fuse_reply_err(req, error);
  else
    reply_bytes(req, &effect, inode, offset, length);
}

static int store(int fd, const char* bytes, size_t length, off_t offset) {
  while (length) {
    const ssize_t done = pwrite(fd, bytes, length, offset);
    if (done < 0) return errno;
    bytes += done, offset += done, length -= done;
  }
  return 0;
}

static int store_flipped(const struct effect* effect, int fd, const char* bytes, size_t length,
                         off_t offset) {
  unsigned char* copy = malloc(length);
  if (!copy) return ENOMEM;
  memcpy(copy, bytes, length);
  faults_flip(effect, copy, offset, length);
  const int error = store(fd, (char*)copy, length, offset);
  free(copy);
  return error;
}

static int store_within_capacity(struct inode* inode, const struct effect* effect,
                                 const char* bytes, size_t length, off_t offset) {
  int64_t reserved;
  if (!space_reserve(inode, offset, length, device.capacity, &reserved)) return ENOSPC;
  const int error = effect->flip_at >= 0 ? store_flipped(effect, inode->fd, bytes, length, offset)
                                         : store(inode->fd, bytes, length, offset);
  space_settle(inode, offset, error ? 0 : length, reserved);
  return error;
}

static void do_write(fuse_req_t req, fuse_ino_t ino, const char* bytes, size_t size, off_t offset,
                     struct fuse_file_info* info) {
  (void)info;
  if (is_control(ino)) {
    const int error = control_obey(bytes, size);
    return (void)(error ? fuse_reply_err(req, error) : fuse_reply_write(req, size));
  }
  struct inode* inode = inode_of(ino);
  count_in();
  const struct effect effect = faults_meet(
      &(struct request){.op = OP_WRITE, .inode = inode, .offset = offset, .length = size});
  timing_serve(WRITING, size);
  int error = faults_suffer(&effect);
  size_t stored = effect.keep < 0 ? size : clamp(size, effect.keep);
  if (error && !effect.torn) stored = 0;
  if (stored) {
    const int failed = store_within_capacity(inode, &effect, bytes, stored, offset);
    if (failed) error = failed, stored = 0;
  }
  device.counters.writes++;
  device.counters.written_bytes += stored;
  count_out();
  if (error)
    fuse_reply_err(req, error);
  else
    fuse_reply_write(req, effect.torn ? size : stored);
}

static void do_fsync(fuse_req_t req, fuse_ino_t ino, int data_only, struct fuse_file_info* info) {
  (void)data_only, (void)info;
  if (is_control(ino)) return (void)fuse_reply_err(req, 0);
  const struct request request = {.op = OP_FSYNC, .inode = inode_of(ino)};
  const struct effect effect = faults_meet(&request);
  device.counters.syncs++;
  fuse_reply_err(req, faults_suffer(&effect));
}

static void do_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t offset, off_t length,
                         struct fuse_file_info* info) {
  (void)info;
  if (is_control(ino)) return (void)fuse_reply_err(req, EOPNOTSUPP);
  struct inode* inode = inode_of(ino);
  const struct effect effect = faults_meet(
      &(struct request){.op = OP_FALLOCATE, .inode = inode, .offset = offset, .length = length});
  int error = faults_suffer(&effect);
  if (error) return (void)fuse_reply_err(req, error);
  const bool allocates = (mode & ~FALLOC_FL_KEEP_SIZE) == 0;
  int64_t reserved = 0;
  if (allocates && !space_reserve(inode, offset, length, device.capacity, &reserved))
    return (void)fuse_reply_err(req, ENOSPC);
  if (fallocate(inode->fd, mode, offset, length)) error = errno;
  if (allocates)
    space_settle(inode, offset, error ? 0 : length, reserved);
  else
    space_cut(inode, offset);
  fuse_reply_err(req, error);
}

void add_data_operations(struct fuse_lowlevel_ops* ops) {
  ops->open = do_open;
  ops->release = do_release;
  ops->read = do_read;
  ops->write = do_write;
  ops->fsync = do_fsync;
  ops->fallocate = do_fallocate;
}
