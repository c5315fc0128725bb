// Names and attributes: free of charge, passed through to the backing directory.
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "control.h"
#include "faults.h"

// A rule made the operation fail, or it is about the hidden files, which only open and close.
static bool refused(fuse_req_t req, fuse_ino_t ino, enum op op) {
  int error = EACCES;
  if (!is_control(ino)) {
    const struct effect effect = faults_meet(&(struct request){.op = op, .inode = inode_of(ino)});
    error = faults_suffer(&effect);
  }
  if (error) fuse_reply_err(req, error);
  return error;
}

// Timeouts of 0: the kernel asks every time, so what happens underneath shows at once.
static void reply_entry(fuse_req_t req, fuse_ino_t parent, const char* name, int created) {
  struct fuse_entry_param entry = {0};
  struct inode* inode;
  const int error = inode_find(inode_of(parent), name, created, &inode, &entry.attr);
  if (error) return (void)fuse_reply_err(req, error);
  entry.ino = number_of(inode);
  if (fuse_reply_entry(req, &entry)) inode_forget(inode, 1);
}

static void do_lookup(fuse_req_t req, fuse_ino_t parent, const char* name) {
  struct fuse_entry_param entry = {.ino = control_find(parent, name)};
  if (entry.ino) {
    control_attributes(entry.ino, &entry.attr);
    fuse_reply_entry(req, &entry);
  } else if (!refused(req, parent, OP_METADATA)) {
    reply_entry(req, parent, name, -1);
  }
}

static void do_forget(fuse_req_t req, fuse_ino_t ino, uint64_t lookups) {
  if (!is_control(ino)) inode_forget(inode_of(ino), lookups);
  fuse_reply_none(req);
}

static int get_attributes(fuse_ino_t ino, struct stat* attributes) {
  if (!is_control(ino)) return fstatat(inode_of(ino)->fd, "", attributes, AT_EMPTY_PATH);
  control_attributes(ino, attributes);
  return 0;
}

static void reply_attributes(fuse_req_t req, fuse_ino_t ino) {
  struct stat attributes;
  if (get_attributes(ino, &attributes))
    fuse_reply_err(req, errno);
  else
    fuse_reply_attr(req, &attributes, 0);
}

static void do_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info* info) {
  (void)info;
  // The root always answers: the control file is behind it.
  const bool answers = ino == FUSE_ROOT_ID || is_control(ino);
  if (answers || !refused(req, ino, OP_METADATA)) reply_attributes(req, ino);
}

static int set_times(int fd, const struct stat* new, int which) {
  struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_OMIT}};
  if (which & FUSE_SET_ATTR_ATIME) times[0] = new->st_atim;
  if (which & FUSE_SET_ATTR_MTIME) times[1] = new->st_mtim;
  if (which & FUSE_SET_ATTR_ATIME_NOW) times[0].tv_nsec = UTIME_NOW;
  if (which & FUSE_SET_ATTR_MTIME_NOW) times[1].tv_nsec = UTIME_NOW;
  return futimens(fd, times);
}

static int set_owner(int fd, const struct stat* new, int which) {
  const uid_t user = which & FUSE_SET_ATTR_UID ? new->st_uid : (uid_t)-1;
  const gid_t group = which & FUSE_SET_ATTR_GID ? new->st_gid : (gid_t)-1;
  return fchownat(fd, "", user, group, AT_EMPTY_PATH);
}

static int set_size(struct inode* inode, off_t size) {
  const int result = ftruncate(inode->fd, size);
  space_cut(inode, size);
  return result;
}

static void do_setattr(fuse_req_t req, fuse_ino_t ino, struct stat* new, int which,
                       struct fuse_file_info* info) {
  (void)info;
  const int owner = FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID;
  const int times =
      FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME | FUSE_SET_ATTR_ATIME_NOW | FUSE_SET_ATTR_MTIME_NOW;
  if (is_control(ino)) return reply_attributes(req, ino);  // O_TRUNC on the control file
  if (refused(req, ino, which & FUSE_SET_ATTR_SIZE ? OP_FTRUNCATE : OP_METADATA)) return;
  struct inode* inode = inode_of(ino);
  if ((which & FUSE_SET_ATTR_MODE && fchmod(inode->fd, new->st_mode)) ||
      (which & owner && set_owner(inode->fd, new, which)) ||
      (which & FUSE_SET_ATTR_SIZE && set_size(inode, new->st_size)) ||
      (which & times && set_times(inode->fd, new, which)))
    fuse_reply_err(req, errno);
  else
    reply_attributes(req, ino);
}

static void do_mknod(fuse_req_t req, fuse_ino_t parent, const char* name, mode_t mode, dev_t dev) {
  (void)dev;
  if (refused(req, parent, OP_METADATA)) return;
  if (!S_ISREG(mode)) return (void)fuse_reply_err(req, EPERM);
  const int flags = O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC;
  const int fd = openat(inode_of(parent)->fd, name, flags, mode & 07777);
  if (fd < 0) return (void)fuse_reply_err(req, errno);
  reply_entry(req, parent, name, fd);
}

static void do_mkdir(fuse_req_t req, fuse_ino_t parent, const char* name, mode_t mode) {
  if (refused(req, parent, OP_METADATA)) return;
  if (mkdirat(inode_of(parent)->fd, name, mode)) return (void)fuse_reply_err(req, errno);
  reply_entry(req, parent, name, -1);
}

static void do_symlink(fuse_req_t req, const char* target, fuse_ino_t parent, const char* name) {
  if (refused(req, parent, OP_METADATA)) return;
  if (symlinkat(target, inode_of(parent)->fd, name)) return (void)fuse_reply_err(req, errno);
  reply_entry(req, parent, name, -1);
}

static void do_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t parent, const char* name) {
  if (refused(req, ino, OP_METADATA)) return;
  char self[32];
  snprintf(self, sizeof self, "/proc/self/fd/%d", inode_of(ino)->fd);
  if (linkat(AT_FDCWD, self, inode_of(parent)->fd, name, AT_SYMLINK_FOLLOW))
    return (void)fuse_reply_err(req, errno);
  reply_entry(req, parent, name, -1);
}

static void do_readlink(fuse_req_t req, fuse_ino_t ino) {
  if (refused(req, ino, OP_METADATA)) return;
  char target[PATH_MAX];
  const ssize_t length = readlinkat(inode_of(ino)->fd, "", target, sizeof target - 1);
  if (length < 0) return (void)fuse_reply_err(req, errno);
  target[length] = '\0';
  fuse_reply_readlink(req, target);
}

static void remove_name(fuse_req_t req, fuse_ino_t parent, const char* name, int flags) {
  if (refused(req, parent, OP_METADATA)) return;
  struct stat gone;
  const int fd = inode_of(parent)->fd;
  if (fstatat(fd, name, &gone, AT_SYMLINK_NOFOLLOW) || unlinkat(fd, name, flags))
    return (void)fuse_reply_err(req, errno);
  inode_unlinked(gone.st_ino);
  fuse_reply_err(req, 0);
}

static void do_unlink(fuse_req_t req, fuse_ino_t parent, const char* name) {
  remove_name(req, parent, name, 0);
}

static void do_rmdir(fuse_req_t req, fuse_ino_t parent, const char* name) {
  remove_name(req, parent, name, AT_REMOVEDIR);
}

static void do_rename(fuse_req_t req, fuse_ino_t parent, const char* name, fuse_ino_t new_parent,
                      const char* new_name, unsigned flags) {
  if (refused(req, parent, OP_METADATA)) return;
  if (is_control(new_parent)) return (void)fuse_reply_err(req, EACCES);
  const int from = inode_of(parent)->fd, to = inode_of(new_parent)->fd;
  struct stat replaced;
  const bool replaces = fstatat(to, new_name, &replaced, AT_SYMLINK_NOFOLLOW) == 0;
  if (renameat2(from, name, to, new_name, flags)) return (void)fuse_reply_err(req, errno);
  if (replaces) inode_unlinked(replaced.st_ino);
  fuse_reply_err(req, 0);
}

static void do_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info* info) {
  if (refused(req, ino, OP_METADATA)) return;
  const int fd = openat(inode_of(ino)->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* directory = fd < 0 ? NULL : fdopendir(fd);
  if (!directory) return (void)fuse_reply_err(req, errno);
  info->fh = (uint64_t)directory;
  fuse_reply_open(req, info);
}

static void do_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                       struct fuse_file_info* info) {
  if (refused(req, ino, OP_METADATA)) return;
  DIR* directory = (DIR*)info->fh;
  char* text = malloc(size);
  size_t filled = 0;
  if (!text) return (void)fuse_reply_err(req, ENOMEM);
  if (offset == 0)
    rewinddir(directory);
  else
    seekdir(directory, offset);
  for (const struct dirent* entry; (entry = readdir(directory));) {
    const struct stat kind = {.st_ino = entry->d_ino, .st_mode = DTTOIF(entry->d_type)};
    const size_t needed = fuse_add_direntry(req, text + filled, size - filled, entry->d_name, &kind,
                                            telldir(directory));
    if (needed > size - filled) break;
    filled += needed;
  }
  fuse_reply_buf(req, text, filled);
  free(text);
}

static void do_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info* info) {
  (void)ino;
  closedir((DIR*)info->fh);
  fuse_reply_err(req, 0);
}

static void do_fsyncdir(fuse_req_t req, fuse_ino_t ino, int data_only,
                        struct fuse_file_info* info) {
  (void)data_only, (void)info;
  if (!refused(req, ino, OP_FSYNC)) fuse_reply_err(req, 0);
}

static void do_statfs(fuse_req_t req, fuse_ino_t ino) {
  if (refused(req, ino, OP_METADATA)) return;
  const int64_t room = device.capacity - space_used();
  const fsblkcnt_t free = room > 0 ? room / PAGE : 0;
  const struct statvfs state = {.f_bsize = PAGE,
                                .f_frsize = PAGE,
                                .f_blocks = device.capacity / PAGE,
                                .f_bfree = free,
                                .f_bavail = free,
                                .f_files = 1 << 20,
                                .f_ffree = 1 << 20,
                                .f_namemax = NAME_MAX};
  fuse_reply_statfs(req, &state);
}

void add_tree_operations(struct fuse_lowlevel_ops* ops) {
  ops->lookup = do_lookup;
  ops->forget = do_forget;
  ops->getattr = do_getattr;
  ops->setattr = do_setattr;
  ops->mknod = do_mknod;
  ops->mkdir = do_mkdir;
  ops->symlink = do_symlink;
  ops->link = do_link;
  ops->readlink = do_readlink;
  ops->unlink = do_unlink;
  ops->rmdir = do_rmdir;
  ops->rename = do_rename;
  ops->opendir = do_opendir;
  ops->readdir = do_readdir;
  ops->releasedir = do_releasedir;
  ops->fsyncdir = do_fsyncdir;
  ops->statfs = do_statfs;
}
