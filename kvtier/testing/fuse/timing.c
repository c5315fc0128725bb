#include "timing.h"

#include <pthread.h>
#include <time.h>

#include "device.h"
#include "fields.h"

enum { MOST_LANES = 1024 };

struct wire {
  int64_t latency_ns;
  int64_t jitter_ns;
  int64_t bytes_per_s;  // 0: no cap
  int64_t free_ns;      // when the last booked transfer ends
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct wire wires[2];
static int64_t lane_free_ns[MOST_LANES];
static size_t lanes = MOST_LANES;
static uint64_t seed, served;

void timing_configure(char* const* fields) {
  wires[READING].latency_ns = field_number(fields, "read_latency_ns", 0);
  wires[WRITING].latency_ns = field_number(fields, "write_latency_ns", 0);
  wires[READING].bytes_per_s = field_number(fields, "read_bytes_per_s", 0);
  wires[WRITING].bytes_per_s = field_number(fields, "write_bytes_per_s", 0);
  wires[READING].jitter_ns = wires[WRITING].jitter_ns = field_number(fields, "jitter_ns", 0);
  lanes = field_number(fields, "max_in_flight", MOST_LANES);
  if (lanes < 1 || lanes > MOST_LANES) lanes = MOST_LANES;
  seed = field_number(fields, "seed", 0);
}

int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000 + now.tv_nsec;
}

void sleep_until_ns(int64_t when) {
  const struct timespec until = {when / 1000000000, when % 1000000000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) continue;
}

double random_fraction(uint64_t random_seed, uint64_t n) {  // splitmix64
  uint64_t x = random_seed + (n + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return (double)((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

static size_t first_free_lane(void) {
  size_t first = 0;
  for (size_t i = 1; i < lanes && lane_free_ns[first] > 0; i++)
    if (lane_free_ns[i] < lane_free_ns[first]) first = i;
  return first;
}

static void count_lanes_busy_at(int64_t when) {
  long long busy = 0;
  for (size_t i = 0; i < lanes; i++) busy += lane_free_ns[i] > when;
  if (busy == 0) busy = 1;  // a device without latency serves one request after another
  count_most(&device.counters.most_in_flight, busy);
}

// All of it is arithmetic on the clock, so a thread that wakes late delays nobody else.
static int64_t book(struct wire* wire, size_t bytes) {
  pthread_mutex_lock(&lock);
  int64_t when = now_ns();
  const size_t lane = first_free_lane();
  if (when < lane_free_ns[lane]) when = lane_free_ns[lane];
  const int64_t start = when;
  if (wire->bytes_per_s) {
    if (when < wire->free_ns) when = wire->free_ns;
    when += (int64_t)((__int128)bytes * 1000000000 / wire->bytes_per_s);
    wire->free_ns = when;
  }
  when += wire->latency_ns;
  if (wire->jitter_ns) when += (int64_t)(random_fraction(seed, served++) * wire->jitter_ns);
  lane_free_ns[lane] = when;
  count_lanes_busy_at(start);
  pthread_mutex_unlock(&lock);
  return when;
}

void timing_serve(enum direction direction, size_t bytes) {
  const int64_t when = book(&wires[direction], bytes);
  if (when > now_ns()) sleep_until_ns(when);
}
