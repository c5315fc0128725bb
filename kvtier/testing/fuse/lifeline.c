#include "lifeline.h"

#include <ftw.h>
#include <libgen.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "device.h"

enum { LOOK_EVERY_MS = 500 };

static struct pollfd ends[2];

static int delete_one(const char* path, const struct stat* attributes, int kind, struct FTW* walk) {
  (void)attributes, (void)kind, (void)walk;
  remove(path);
  return 0;
}

void lifeline_end(void) {
  static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&once);  // for ever: unmounting ends the main thread's loop too
  // Detached at once; the kernel fails what is in flight when this process, hence /dev/fuse, ends.
  fuse_session_unmount(device.session);
  rmdir(device.mountpoint);
  nftw(device.backing, delete_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
  rmdir(dirname(strdupa(device.backing)));  // succeeds in the last of the folder's devices
  _exit(0);
}

// A killed parent does not end while one of its threads waits for us: see the kill itself.
static bool parent_is_dying(void) {
  char path[32], line[256], state = 'X';
  unsigned long long own = 0, shared = 0;
  snprintf(path, sizeof path, "/proc/%d/status", device.parent);
  FILE* status = fopen(path, "re");
  if (!status) return true;
  while (fgets(line, sizeof line, status)) {
    sscanf(line, "State: %c", &state);
    sscanf(line, "SigPnd: %llx", &own);
    sscanf(line, "ShdPnd: %llx", &shared);
  }
  fclose(status);
  return state == 'Z' || state == 'X' || (own | shared) & 1 << (SIGKILL - 1);
}

static void* wait_for_the_end(void* unused) {
  (void)unused;
  while (poll(ends, 2, LOOK_EVERY_MS) <= 0 && !parent_is_dying()) continue;
  lifeline_end();
}

bool lifeline_start(void) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, NULL);
  // Not PR_SET_PDEATHSIG: that fires at the end of the thread which started us, not of its process.
  const int parent = (int)syscall(SYS_pidfd_open, device.parent, 0);
  const int signal_fd = signalfd(-1, &signals, SFD_CLOEXEC);
  if (parent < 0 || signal_fd < 0 || getppid() != device.parent) return false;
  ends[0] = (struct pollfd){.fd = parent, .events = POLLIN};
  ends[1] = (struct pollfd){.fd = signal_fd, .events = POLLIN};
  pthread_t thread;
  return pthread_create(&thread, NULL, wait_for_the_end, NULL) == 0;
}
