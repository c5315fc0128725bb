// An emulated storage device: a FUSE file system over a directory in memory, with a device's timing
// and a device's faults. Arguments are "key=value": see device.h and timing.c.
#include <fcntl.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "fields.h"
#include "inodes.h"
#include "lifeline.h"
#include "timing.h"

struct device device;

void count_most(atomic_llong* most, long long value) {
  long long seen = *most;
  while (seen < value && !atomic_compare_exchange_weak(most, &seen, value)) continue;
}

void count_in(void) {
  count_most(&device.counters.most_outstanding, ++device.counters.outstanding);
}

void count_out(void) {
  device.counters.outstanding--;
}

static void do_init(void* unused, struct fuse_conn_info* connection) {
  (void)unused;
  connection->want |= connection->capable & FUSE_CAP_ASYNC_DIO;
  connection->max_write = connection->max_read = REQUEST_LIMIT;
  connection->max_background = connection->congestion_threshold = BACKGROUND_LIMIT;
}

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  return 1;
}

static bool mount_it(void) {
  static char options[] =
      "-ofsname=kvtier-emulated,subtype=kvtier,default_permissions,max_read=1048576";
  char* arguments[] = {"kvtier-emulated", options, NULL};
  struct fuse_args args = FUSE_ARGS_INIT(2, arguments);
  struct fuse_lowlevel_ops ops = {.init = do_init};
  add_tree_operations(&ops);
  add_data_operations(&ops);
  device.session = fuse_session_new(&args, &ops, sizeof ops, NULL);
  fuse_opt_free_args(&args);
  return device.session && fuse_session_mount(device.session, device.mountpoint) == 0;
}

static void serve(void) {
  struct fuse_loop_config* config = fuse_loop_cfg_create();
  fuse_loop_cfg_set_clone_fd(config, 1);
  fuse_loop_cfg_set_max_threads(config, THREAD_LIMIT);
  fuse_loop_cfg_set_idle_threads(config, THREAD_LIMIT);  // a burst's threads stay for the next
  fuse_session_loop_mt(device.session, config);
  fuse_loop_cfg_destroy(config);
}

static void prepare_process(void) {
  struct rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;  // every inode that the kernel knows holds a descriptor
  setrlimit(RLIMIT_NOFILE, &files);
  prctl(PR_SET_TIMERSLACK, 1);          // sleeps end when they should; threads inherit it
  mallopt(M_MMAP_THRESHOLD, 64 << 20);  // request buffers are kept, not mapped anew each time
  mallopt(M_TRIM_THRESHOLD, 1024 << 20);
  umask(0);
}

int main(int count, char** fields) {
  (void)count;
  device.name = field(fields, "name", "device");
  device.backing = field(fields, "backing", "");
  device.mountpoint = field(fields, "mountpoint", "");
  device.parent = field_number(fields, "parent", 0);
  device.capacity = field_number(fields, "capacity", 0);
  timing_configure(fields);
  prepare_process();
  const int backing = open(device.backing, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (backing < 0 || !inodes_setup(backing)) return fail(device.backing);
  if (!mount_it()) return fail("cannot mount");
  if (!lifeline_start()) {
    fuse_session_unmount(device.session);
    return fail("cannot watch the parent process");
  }
  puts("ready");
  fflush(stdout);
  serve();
  lifeline_end();
}
